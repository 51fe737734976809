"""Errors that users can correct: the command line shows them as one line and exits with code 2."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Says in one line which key or file is wrong, what is wrong with it, and what would be right."""


def one_line(error: object) -> str:
    """The text of an error without line breaks; the name of its class if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def closest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Suggests a known word that resembles `word`, or all of them after `otherwise`."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{otherwise} {', '.join(known)}"
