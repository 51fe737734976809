"""Time limits of a step: waits that end at a deadline, and errors that say what a rank was waiting for.

On gloo, waits for other ranks end at the deadline by themselves. Elsewhere (NCCL) a wait only puts the device's work in
order, and the process blocks where it reads a number of the device's: there a `Watchdog`, a thread, says at the
deadline what this rank was doing and for whom its first unfinished operation waits, and aborts the communicators, upon
which whatever blocks returns. Computation of this rank's own is interrupted by a timer of the operating system. So when
one rank hangs, all say what they were doing, and that one says it first.

Limits: a computation that hangs outside of Python cannot be interrupted: the ranks that wait for it name it. After an
abort the process has no process groups and has to end.
"""

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from motet.parallel.mesh import pairs_by_tag

SHORTEST_WAIT = timedelta(milliseconds=1)
"""Time limit of waits that begin after the deadline; zero would mean no limit."""
SHORTEST_WAIT_S = SHORTEST_WAIT.total_seconds()

Awaited = tuple[object, Sequence[int]]
"""A message or reduction, and the ranks that take part in it."""


class StepFailedError(RuntimeError):
    """A step failed. The message says what this rank was doing, and for what and whom it waited."""


class StepTimeoutError(StepFailedError):
    """A step did not end in time."""


class StepOverrunError(StepTimeoutError):
    """This rank's own computation took too long."""


class Deadline:
    """The time limit of one step: after `start`, all waits for other ranks go through `wait`."""

    def __init__(self, timeout: timedelta, describe: Callable[[], str] = lambda: "") -> None:
        """`describe`: what this rank is doing, for the watchdog to say."""
        self._timeout = timeout
        self._ends_at = float("inf")
        self._waiting_for: Awaited | None = None
        self._launched: deque[tuple[dist.Work, Awaited]] = deque()
        """Operations that the device has not finished, where waits do not block the process."""
        self._watchdog = None if not dist.is_initialized() or pairs_by_tag() else Watchdog(describe)
        self._depth = 0

    def start(self) -> None:
        self._ends_at = time.monotonic() + self._timeout.total_seconds()
        self._waiting_for = None
        self._drop_completed()
        if self._watchdog is not None and self._depth:
            self._watchdog.watch_until(self._ends_at)

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._ends_at

    @property
    def waiting_for(self) -> Awaited | None:
        """What is waited for: the operation whose wait blocks, or the first that the device has not finished."""
        if self._waiting_for is not None:
            return self._waiting_for
        return next((awaited for work, awaited in list(self._launched) if not work.is_completed()), None)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A step, or a part of one. While the outermost of these blocks runs, the watchdog watches.

        Raises `StepTimeoutError` at its end if the watchdog had to abort: what was read since then means nothing."""
        if self._watchdog is None:
            yield
            return
        self._depth += 1
        if self._depth == 1:
            self.start()
        try:
            yield
            if self._watchdog.said is not None:
                raise StepTimeoutError(self._watchdog.said)
        finally:
            self._depth -= 1
            if not self._depth:
                self._watchdog.watch_until(float("inf"))

    def wait(self, work: dist.Work, what: object, peers: Sequence[int]) -> None:
        """Raises `RuntimeError` at the deadline, or if a peer has died; then `waiting_for` still tells for what.

        A work is waited for once only: gloo blocks on the second wait until the timeout."""
        self._waiting_for = (what, peers)
        if self._watchdog is None:
            left_s = self._ends_at - time.monotonic()
            work.wait(timedelta(0, left_s) if left_s > SHORTEST_WAIT_S else SHORTEST_WAIT)
        else:
            # Given a time, NCCL's wait would block the process.
            work.wait()
            self._drop_completed()
            self._launched.append((work, self._waiting_for))
        self._waiting_for = None

    def _drop_completed(self) -> None:
        while self._launched and self._launched[0][0].is_completed():
            self._launched.popleft()


class Watchdog:
    """A thread that speaks up and aborts all communicators when a time has come.

    It runs only while there is a time, so that it keeps nothing alive of a training that has ended."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._changed = threading.Condition()
        self._ends_at = float("inf")
        self._thread: threading.Thread | None = None
        self.said: str | None = None
        """What this rank was doing when the communicators were aborted; None: they were not."""

    def watch_until(self, ends_at: float) -> None:
        """Sets the time, by `time.monotonic`; infinity: none."""
        with self._changed:
            self._ends_at = ends_at
            self._changed.notify()
            if self._thread is None and ends_at != float("inf"):
                self._thread = threading.Thread(target=self._watch, name="motet-watchdog", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        with self._changed:
            while (left_s := self._ends_at - time.monotonic()) > 0:
                if left_s == float("inf"):
                    self._thread = None
                    return
                self._changed.wait(left_s)
        self.said = f"{self._describe()}; the time of the step is over (train.step_timeout_s)"
        print(f"motet: {self.said}; aborting its communicators", file=sys.stderr, flush=True)
        abort_communicators()


def abort_communicators() -> None:
    """Aborts all process groups, upon which operations of theirs end, with an error or with anything as result."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


@contextmanager
def interrupted_after(seconds: float, failure: Callable[[], Exception]) -> Iterator[None]:
    """Raises `failure()` inside the block when it takes longer than `seconds`.

    Does nothing outside of the main thread, where signals cannot be handled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def overrun(*_: object) -> None:
        raise failure()

    previous = signal.signal(signal.SIGALRM, overrun)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
