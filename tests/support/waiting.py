"""Tests wait for events, not for times to pass; what would hang is bounded, far beyond what a busy machine takes."""

import time
from collections.abc import Callable

LONGEST_S = 60.0


def wait_until(has_come: Callable[[], object], what: str = "") -> None:
    """Raises `AssertionError` with `what` after `LONGEST_S`."""
    deadline = time.monotonic() + LONGEST_S
    while not has_come():
        assert time.monotonic() < deadline, what or "it does not come"
        time.sleep(0.005)
