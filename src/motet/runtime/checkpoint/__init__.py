"""Checkpoints: their folder, asynchronous writing, and loading under another plan."""
