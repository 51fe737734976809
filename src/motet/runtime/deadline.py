"""Time limits of a step: waits that end at a deadline, and errors that say what a rank was waiting for.

Waits for other ranks end at the deadline by themselves; computation of this rank's own is interrupted by a timer of the
operating system. So when one rank hangs, all say what they were doing, and that one says it first.

Limits: on CUDA, waits end by NCCL's watchdog at the groups' timeout. A computation that hangs outside of Python cannot
be interrupted: the ranks that wait for it name it.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

SHORTEST_WAIT = timedelta(milliseconds=1)
"""Time limit of waits that begin after the deadline; zero would mean no limit."""


class StepFailedError(RuntimeError):
    """A step failed. The message says what this rank was doing, and for what and whom it waited."""


class StepTimeoutError(StepFailedError):
    """A step did not end in time."""


class StepOverrunError(StepTimeoutError):
    """This rank's own computation took too long."""


class Deadline:
    """The time limit of one step: after `start`, all waits for other ranks go through `wait`."""

    def __init__(self, timeout: timedelta, device: torch.device) -> None:
        self._timeout = timeout
        # NCCL orders transfers on the device, and would block the process if it were given a time.
        self._limits_waits = device.type == "cpu"
        self._ends_at = float("inf")
        self.waiting_for: tuple[object, Sequence[int]] | None = None
        """The message or reduction that is waited for, and the ranks that take part in it."""

    def start(self) -> None:
        self._ends_at = time.monotonic() + self._timeout.total_seconds()
        self.waiting_for = None

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._ends_at

    def wait(self, work: dist.Work, what: object, peers: Sequence[int]) -> None:
        """Raises `RuntimeError` at the deadline, or if a peer has died; then `waiting_for` still tells for what.

        A work is waited for once only: gloo blocks on the second wait until the timeout."""
        self.waiting_for = (what, peers)
        if self._limits_waits:
            work.wait(max(SHORTEST_WAIT, timedelta(seconds=self._ends_at - time.monotonic())))
        else:
            work.wait()
        self.waiting_for = None


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
