"""Errors that are the user's to mend: the command line shows them as one line and exits with code 2."""


class UserError(ValueError):
    """Says in one line which key or file is wrong, what is wrong with it, and what would be right."""
