"""Files that users name in a run file or on the command line: read whole, and never beyond a limit."""

import errno
import os
from pathlib import Path

MAX_BYTES = 256 * 2**20
"""Largest file that is read: a plan, a table of costs or a trace, a secret, certificates."""


def read_bytes(path: str | Path) -> bytes:
    """Reads a file, which may be a device without an end. Raises `OSError` if it cannot be read, or is too large."""
    with Path(path).open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def read_text(path: str | Path) -> str:
    """The same of a text in UTF-8. Raises `UnicodeDecodeError` too."""
    return read_bytes(path).decode()
