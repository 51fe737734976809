"""Ends what would wait for ever: a client of a store that is stopped, or behind a cut link, has no limit of time.

Limits: it acts by something that makes the wait fail or ends the process; it cannot interrupt a thread.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

ROUNDS = 8
"""Of its own thread, in the time for which it is patient. They are counted, not the time: if this whole process was
stopped and goes on, nothing was late."""


class Watchdog:
    """In a `with` block: calls `act` in a thread if something that is watched takes `patience_s`, and again after each
    further round."""

    def __init__(self, patience_s: float, act: Callable[[], object]) -> None:
        self._round_s, self._act = patience_s / ROUNDS, act
        self._watched: list[None] | None = None
        """As many as it has taken rounds; None: nothing is watched."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watchdog", daemon=True)

    @contextmanager
    def watch(self) -> Iterator[None]:
        self._watched = []
        try:
            yield
        finally:
            self._watched = None

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()  # Whoever forks after this has no thread.

    def _look_on(self) -> None:
        while not self._is_over.wait(self._round_s):
            watched = self._watched
            if watched is None:
                continue
            watched.append(None)
            if len(watched) > ROUNDS:
                self._act()
