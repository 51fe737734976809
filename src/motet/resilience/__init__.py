"""Training on through failures with pipeline templates: Oobleck (thesis chapter 2)."""
