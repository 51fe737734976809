"""Ends what this process waits for in torch.distributed, where shut connections (connections.py) do not.

gloo tells two kinds of operations nothing of a lost connection: a send that has begun to leave, and a receive that has
begun to arrive. They sleep until their timeout, and so does the thread that runs the collective that they belong to.
So a helper thread waits in the place of whoever waits, who can be called off, and leaves the helper behind.

Cost: two changes of threads for each wait (6 us of a processor, 15 us on an idle machine).

Limits: replaces `torch.distributed.Work.wait` for all, as most collectives wait inside torch. What is left behind keeps
its buffers, and its groups their descriptors, until the timeout that it was begun with.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

GRACE_S = 0.5
"""For a wait to end by itself, which it does within milliseconds where gloo is told."""
_RELEASE_POLL_S = 0.2
_OWN_REFERENCES = 2
"""To a group, of the list that it is in and of the call that counts them."""

_Outcome = SimpleQueue[tuple[Any, BaseException | None]]
"""What a wait returned, or raised."""
_Tasks = SimpleQueue[tuple[Callable[[], Any], _Outcome] | None]


class Waits:
    """Those of all threads of this process."""

    def __init__(self) -> None:
        self.generation = 0
        """Of the membership under which waits begin."""
        self._helpers = threading.local()
        self._lock = threading.Lock()
        self._pending: dict[_Outcome, tuple[int, float]] = {}
        """Where the outcome of each is awaited: its generation, and since when."""

    @contextmanager
    def can_be_called_off(self, work_type: Any) -> Iterator[None]:
        """All that begin in the block can. `work_type`: `torch.distributed.Work`."""
        wait = work_type.wait

        def wait_or_be_called_off(work: Any, *args: Any, **kwargs: Any) -> Any:
            if work.is_completed():
                return wait(work, *args, **kwargs)
            return self._wait(lambda: wait(work, *args, **kwargs))

        work_type.wait = wait_or_be_called_off
        try:
            yield
        finally:
            work_type.wait = wait

    def call_off(self, before_generation: int, since: float) -> None:
        """Those of generations before that one, of which it is known `since` when that they are over
        (`time.monotonic()`), raise `RuntimeError`; but each has `GRACE_S`."""
        now = time.monotonic()
        with self._lock:
            pending = list(self._pending.items())
        for outcome, (generation, begun) in pending:
            if generation < before_generation and now - max(begun, since) >= GRACE_S:
                outcome.put((None, RuntimeError("called off, as what it waits for is over")))

    def _wait(self, wait: Callable[[], Any]) -> Any:
        tasks = self._tasks()
        outcome: _Outcome = SimpleQueue()
        with self._lock:
            self._pending[outcome] = self.generation, time.monotonic()
        try:
            tasks.put((wait, outcome))
            result, error = outcome.get()
        except BaseException:  # Of a signal's handler.
            del self._helpers.helper
            raise
        finally:
            with self._lock:
                del self._pending[outcome]
        if error is None:
            return result
        del self._helpers.helper  # It may still wait.
        try:
            raise error
        finally:
            del error  # Else this frame and the error would keep each other.

    def _tasks(self) -> "_Tasks":
        """Those of this thread's helper."""
        if not hasattr(self._helpers, "helper"):
            self._helpers.helper = _Helper()
        return self._helpers.helper.tasks


class _Helper:
    """A thread that does one task after another, until nobody refers to this object and the last task is done."""

    def __init__(self) -> None:
        self.tasks: _Tasks = SimpleQueue()
        threading.Thread(target=_serve, args=(self.tasks,), name="waits", daemon=True).start()

    def __del__(self) -> None:
        self.tasks.put(None)


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        wait, outcome = task
        try:
            outcome.put((wait(), None))
        except BaseException as error:
            outcome.put((None, error))
        del task, wait, outcome  # They hold buffers.


def release_in_background(groups: list[object]) -> None:
    """Whoever lets go of a process group last waits in its destructor for collectives that do not end: this will be a
    thread of its own, which takes the list over."""
    threading.Thread(target=_release, args=(groups,), name="release", daemon=True).start()


def _release(groups: list[object]) -> None:
    while groups:
        for place in reversed(range(len(groups))):
            if sys.getrefcount(groups[place]) == _OWN_REFERENCES:
                del groups[place]
        time.sleep(_RELEASE_POLL_S)
