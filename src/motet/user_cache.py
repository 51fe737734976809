"""The user's cache folder: files that motet can make again, such as shape cards and results of probes."""

import hashlib
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

CACHE = "MOTET_CACHE"
"""Environment variable: the cache folder, instead of `motet` in XDG_CACHE_HOME or ~/.cache."""


def cache_folder(kind: str) -> Path:
    """The folder of one kind of files."""
    if folder := os.environ.get(CACHE):
        return Path(folder) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "motet" / kind


def write_cached(path: Path, text: str) -> None:
    """Writes a file in one step, so that no process reads an incomplete one. Does nothing if the folder cannot be
    written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        return


def append_cached(path: Path, text: str) -> None:
    """Adds text to a file. Does nothing if the folder cannot be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)


@cache
def digest_of_files(files: tuple[Path, ...]) -> str:
    """A digest of what the files hold: what was made by an earlier version of them is then out of date."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
