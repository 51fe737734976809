"""Segments of shared memory that nobody uses any more."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from waiting import wait_until

FOLDER = Path("/dev/shm")


def unused_segments(known: set[str]) -> set[str]:
    """Segments that no living process has mapped or open, without the `known` ones."""
    found = {*os.listdir(FOLDER)} - known
    if not found:
        return found
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It has ended.
            maps = (process / "maps").read_text()
            opened = [os.readlink(link) for link in (process / "fd").iterdir()]
            found -= {name for name in found if str(FOLDER / name) in maps or str(FOLDER / name) in opened}
    return found & {*os.listdir(FOLDER)}


@contextmanager
def no_segment_left() -> Iterator[None]:
    """Raises `AssertionError` if a segment that was made meanwhile is left although nobody uses it."""
    before = {*os.listdir(FOLDER)}
    yield
    # Others' segments, too, are unused for a moment: between being made and being mapped.
    wait_until(lambda: not unused_segments(before), f"segments of shared memory are left: {unused_segments(before)}")
