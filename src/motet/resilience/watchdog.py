"""Ends what would wait for ever: a client of a store that is stopped, or behind a cut link, has no limit of time.

Limits: it acts once, by something that makes the wait fail or ends the process; it cannot interrupt a thread.
"""

import threading
from collections.abc import Callable
from types import TracebackType

ROUNDS = 8
"""Of its own thread, in the time for which it is patient. They are counted, not the time: if this whole process was
stopped and goes on, nothing was late."""


class Watchdog:
    """In a `with` block: calls `act` in a thread if `come_round` was not called for `patience_s`."""

    def __init__(self, patience_s: float, act: Callable[[], object]) -> None:
        self._round_s, self._act = patience_s / ROUNDS, act
        self._num_late = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def come_round(self) -> None:
        self._num_late = 0

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()  # Whoever forks after this has no thread.

    def _watch(self) -> None:
        while not self._is_over.wait(self._round_s):
            self._num_late += 1
            if self._num_late > ROUNDS:
                self._act()
                return
