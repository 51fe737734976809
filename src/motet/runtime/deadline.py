"""How long a step may take, what this rank waits for in it, and what is said when it takes longer.

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
"""For what is waited for after the deadline; zero would mean no limit."""


class StepFailedError(RuntimeError):
    """A step did not end. Says what this rank was doing, and what it waited for from whom."""


class StepTimeoutError(StepFailedError):
    """It did not end in time."""


class StepOverrunError(StepTimeoutError):
    """It is this rank that took too long."""


class Deadline:
    """One for each step. `start` it, then let it do all waiting for other ranks."""

    def __init__(self, timeout: timedelta, device: torch.device) -> None:
        self._timeout = timeout
        # NCCL orders transfers on the device, and would block the process if it were given a time.
        self._limits_waits = device.type == "cpu"
        self._ends_at = float("inf")
        self.waiting_for: tuple[object, Sequence[int]] | None = None
        """A message or reduction, and the ranks that it takes."""

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
    """Raises `failure()` in the block when it takes longer.

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
