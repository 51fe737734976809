"""A node's training processes as its agent sees them: whether they live, compute or stand still, and what they say.

Limits: Linux (/proc).
"""

import contextlib
import ctypes
import glob
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from motet.resilience.control import FINISH

# Processes that do not outlive the one that started them, in whatever way it ends.
#
# Limits: Linux. Their own children end with them only if they were started in the same way. They end with the thread
# that started them, which must be one that stays: the main thread.


PR_SET_PDEATHSIG = 1


class Children:
    """In a `with` block, at the end of which all are killed."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []

    def start(self, target: Callable[..., object], *args: Any) -> BaseProcess:
        """Forks a process. The terminal's interrupt and SIGTERM are not for it: this process ends it."""
        process = multiprocessing.get_context("fork").Process(target=_run, args=(os.getpid(), target, args))
        # An interrupt that arrives in the functions that Python calls around a fork would be lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
            self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return process

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in self._processes:  # All before the first wait, which may be interrupted.
            process.kill()
        for process in self._processes:
            process.join()


def _run(parent: int, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It had ended before the kernel was asked.
        os._exit(1)
    target(*args)


FINISH_S = 5.0
"""For processes to end by themselves when all is over."""
STOPPED = set("TtZX")
RUNNABLE = "R"
"""A thread's state: it computes, or waits for a processor to do so."""


@dataclass
class WatchedProcess:
    process: BaseProcess
    pipe: Connection
    last_sign: float = field(default_factory=time.monotonic)
    """By `time.monotonic()`."""
    last_cpu_ticks: int = -1
    is_ready: bool = False
    is_done: bool = False

    def is_idle(self) -> bool:
        """Whether it is stopped, or has not computed since the last call and is not about to."""
        states, ticks = _process_state(self.process.pid or 0)
        before, self.last_cpu_ticks = self.last_cpu_ticks, ticks
        return states <= STOPPED or (before == ticks and RUNNABLE not in states)


def tell(processes: Sequence[WatchedProcess], *words: object) -> None:
    """One word to all of them, or to each its own."""
    for place, watched in enumerate(processes):
        with contextlib.suppress(OSError):
            watched.pipe.send(words[place % len(words)])


def hear(processes: Sequence[WatchedProcess]) -> Iterator[tuple[WatchedProcess, str, object]]:
    """What they have said, each a word and more."""
    for watched in processes:
        try:
            while watched.pipe.poll():
                word, more = watched.pipe.recv()
                watched.last_sign = time.monotonic()
                yield watched, word, more
        except (EOFError, OSError):
            continue  # It is dead, which `loss_of` will see.


def loss_of(processes: Sequence[WatchedProcess], silence_s: float, now: float) -> str | None:
    """How one of them was lost, if any was."""
    for place, watched in enumerate(processes):
        process, silent_s = watched.process, now - watched.last_sign
        if process.exitcode is not None:
            return f"process {place} (pid {process.pid}) {how_it_ended(process.exitcode)}"
        if silent_s > silence_s and watched.is_idle():
            return f"process {place} (pid {process.pid}) hung: no sign of life for {silent_s:.1f} s"
    return None


def end(processes: Sequence[WatchedProcess]) -> None:
    for watched in processes:
        if watched.process.exitcode is None:
            watched.process.kill()
    for watched in processes:
        watched.process.join()


def finish(processes: Sequence[WatchedProcess]) -> None:
    """They may end by themselves, for `FINISH_S`."""
    tell(processes, FINISH)
    deadline = time.monotonic() + FINISH_S
    for watched in processes:
        watched.process.join(max(0.0, deadline - time.monotonic()))
    end(processes)


def how_it_ended(exitcode: int) -> str:
    if exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"exited with code {exitcode}"


def _process_state(pid: int) -> tuple[set[str], int]:
    """The state letters of its threads, and the processor ticks that they have used, by /proc."""
    states, ticks = set(), 0
    for path in glob.glob(f"/proc/{pid}/task/*/stat"):
        with contextlib.suppress(OSError), open(path) as file:
            fields = file.read().rpartition(")")[2].split()
            states.add(fields[0])
            ticks += int(fields[11]) + int(fields[12])
    return states, ticks
