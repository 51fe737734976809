"""Files that are there whole or not at all, whoever is ended while they are written."""

from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replaces what there is. Its folder must be there; until it is complete, it is a hidden file beside it.

    Limits: a power failure may still cut it short (it is not synced), and two must not write the same file at once."""
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(text)
    partial.replace(path)
