"""Processes that do not outlive the one that started them, in whatever way it ends.

Limits: Linux. Their own children end with them only if they were started in the same way. They end with the thread that
started them, which must be one that stays: the main thread.
"""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

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
