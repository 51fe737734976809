"""Processes that answer tickets. One that dies is replaced, and its tickets are answered by others.

The standard library's process pool, forked: workers have the data sets as they were opened, without reading them again.
Large answers come through shared memory (torch's, which vanishes with its last user), small ones through the pipe.

Limits: a pool that loses one worker restarts all of them; torch's shared memory is /dev/shm, which containers often
make small.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.data.preprocessing.preparer import Answer, Preparer
from motet.data.preprocessing.tensor_buffer import Header, TensorBuffer, in_own_memory, in_shared_memory
from motet.data.preprocessing.tickets import Ticket

MAX_ATTEMPTS = 5
"""At one ticket, each of which cost a worker its life."""

LARGE_BYTES = 256 * 2**10
"""From here on, setting up shared memory costs less than copying through a pipe."""


class WorkersDiedError(RuntimeError):
    """The workers die of a ticket again and again."""


class Workers:
    """`num`: processes; 0: tickets are answered by the caller itself."""

    def __init__(self, preparer: Preparer, num: int) -> None:
        self.preparer, self.num = preparer, num
        self._lock = threading.Lock()
        self.num_restarts = 0
        self._pool = self._start() if num else None

    def _start(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(
            self.num, multiprocessing.get_context("fork"), initializer=_begin, initargs=(self.preparer,)
        )
        pool.submit(os.getpid)  # Forks now, as long as this process has few threads.
        return pool

    def answers(self, tickets: Iterable[Ticket]) -> Iterator[Answer]:
        """In the tickets' order; of those that follow, only a bounded number is begun before an answer is taken."""
        if self._pool is None:
            yield from map(self.preparer.answer, tickets)
            return
        remaining, begun = iter(tickets), deque[_Begun]()
        while True:
            while len(begun) < 2 * self.num and (ticket := next(remaining, None)) is not None:
                begun.append(self._begin(ticket, 1))
            if not begun:
                return
            yield self._finish(begun.popleft())

    def _begin(self, ticket: Ticket, attempt: int) -> "_Begun":
        while True:
            pool = self._pool
            assert pool is not None
            try:
                return _Begun(ticket, attempt, pool, pool.submit(_answer, ticket))
            except BrokenProcessPool:
                self._replace(pool)

    def _finish(self, begun: "_Begun") -> Answer:
        while True:
            try:
                answer = begun.answer.result()
            except BrokenProcessPool:
                if begun.attempt == MAX_ATTEMPTS:
                    raise WorkersDiedError(
                        f"worker processes died {MAX_ATTEMPTS} times over {begun.ticket.split} samples "
                        f"{list(begun.ticket.indices)}; is one of them too large for the memory?"
                    ) from None
                self._replace(begun.pool)
                begun = self._begin(begun.ticket, begun.attempt + 1)
                continue
            if isinstance(answer, _Small):
                data = torch.frombuffer(answer.data, dtype=torch.uint8) if answer.data else in_own_memory(0)
                return TensorBuffer(answer.header, data)
            return answer

    def _replace(self, broken: ProcessPoolExecutor) -> None:
        with self._lock:
            if self._pool is broken:
                broken.shutdown(wait=False)
                self.num_restarts += 1
                self._pool = self._start()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Begun:
    ticket: Ticket
    attempt: int
    pool: ProcessPoolExecutor
    answer: "Future[Answer | _Small]"


@dataclass(frozen=True)
class _Small:
    """A `TensorBuffer` that goes through the pipe."""

    header: Header
    data: bytearray


# What follows runs in the workers.

_preparer: Preparer | None = None


def _begin(preparer: Preparer) -> None:
    global _preparer
    _preparer = preparer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The terminal's interrupt is for who asks.
    torch.set_num_threads(1)  # A pool of threads does not survive the fork.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _memory_for(num_bytes: int) -> Tensor:
    return in_own_memory(num_bytes) if num_bytes < LARGE_BYTES else in_shared_memory(num_bytes)


def _answer(ticket: Ticket) -> Answer | _Small:
    assert _preparer is not None
    answer = _preparer.answer(ticket, _memory_for)
    if isinstance(answer, TensorBuffer) and answer.data.nbytes < LARGE_BYTES:
        return _Small(answer.header, bytearray(answer.data.numpy()))
    return answer
