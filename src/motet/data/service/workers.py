"""Processes that answer tickets. One that dies is replaced, and its tickets are answered by others.

The standard library's process pool, forked: workers have the data sets as they were opened, without reading them again.

Through the pool's pipe go notes of at most `select.PIPE_BUF` bytes, which the kernel writes whole or not at all:
a worker that is killed in the middle of a longer message would leave whoever reads it waiting for ever. What a note
speaks of lies in memory that is shared: small answers in slots that all workers have from the start, large tensors in
memory of their own (torch's, which vanishes with its last user).

Limits: a pool that loses one worker restarts all of them; torch's shared memory is /dev/shm, which containers often
make small.
"""

import mmap
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motet.assignment.sample import Sample
from motet.data.service.preparer import Answer, Preparer
from motet.data.service.tensor_buffer import Header, TensorBuffer, in_own_memory, in_shared_memory, unpack
from motet.data.service.tickets import Corrupt, Split, Ticket
from motet.errors import UserError

MAX_ATTEMPTS = 5
"""At one ticket, each of which cost a worker its life."""

LARGE_BYTES = 256 * 2**10
"""From here on, setting up shared memory costs less than two copies."""

SLOT_BYTES = 2 * LARGE_BYTES
SLOTS_PER_WORKER = 8
"""Pages that nobody writes to cost nothing."""


class WorkersDiedError(RuntimeError):
    """The workers die of a ticket again and again."""


class PreparationError(RuntimeError):
    """A worker failed at a ticket, in a way that is no fault of the sample's."""


class Workers:
    """`num`: processes; 0: tickets are answered by the caller itself."""

    def __init__(self, preparer: Preparer, num: int) -> None:
        self.preparer, self.num = preparer, num
        self._lock = threading.Lock()
        self.num_restarts = 0
        self._pool = self._start() if num else None

    def _start(self) -> "_Pool":
        return _Pool(self.preparer, self.num)

    def answers(self, tickets: Iterable[Ticket]) -> Iterator[Answer]:
        """In the tickets' order; of those that follow, only a bounded number is begun before an answer is taken."""
        if self._pool is None:
            yield from map(self.preparer.answer, tickets)
            return
        remaining, begun = iter(tickets), deque[_Begun]()
        try:
            while True:
                while len(begun) < 2 * self.num and (ticket := next(remaining, None)) is not None:
                    begun.append(self._begin(ticket, 1))
                if not begun:
                    return
                yield self._finish(begun.popleft())
        finally:  # Nobody wants the rest.
            for left in begun:
                left.note.add_done_callback(left.give_back)

    def _begin(self, ticket: Ticket, attempt: int) -> "_Begun":
        while True:
            pool = self._pool
            assert pool is not None
            slot = pool.take_slot()
            try:
                return _Begun(ticket, attempt, pool, slot, pool.executor.submit(_answer, ticket, slot))
            except BrokenProcessPool:
                self._replace(pool)

    def _finish(self, begun: "_Begun") -> Answer:
        while True:
            try:
                return begun.pool.read(begun.note.result(), begun.slot)
            except BrokenProcessPool:
                if begun.attempt == MAX_ATTEMPTS:
                    raise WorkersDiedError(
                        f"worker processes died {MAX_ATTEMPTS} times over {begun.ticket.split} samples "
                        f"{list(begun.ticket.indices)}; is one of them too large for the memory?"
                    ) from None
                self._replace(begun.pool)
                begun = self._begin(begun.ticket, begun.attempt + 1)

    def _replace(self, broken: "_Pool") -> None:
        with self._lock:
            if self._pool is broken:
                broken.executor.shutdown(wait=False)
                self.num_restarts += 1
                self._pool = self._start()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.executor.shutdown(cancel_futures=True)


class _Pool:
    """Processes that die together, and the slots that they write to. A worker of a broken pool may still be writing, so
    another pool has other slots."""

    def __init__(self, preparer: Preparer, num: int) -> None:
        num_slots = SLOTS_PER_WORKER * num
        self._slots = mmap.mmap(-1, num_slots * SLOT_BYTES)
        self._free = deque(range(num_slots))
        self.executor = ProcessPoolExecutor(
            num, multiprocessing.get_context("fork"), initializer=_begin, initargs=(preparer, self._slots)
        )
        self.executor.submit(os.getpid)  # Forks now, as long as this process has few threads.

    def take_slot(self) -> int | None:
        """None if all are taken."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def give_back(self, slot: int | None) -> None:
        if slot is not None:
            self._free.append(slot)

    def read(self, note: "_Note", slot: int | None) -> Answer:
        """What a worker has written; its slot is free again. Raises `PreparationError`."""
        if note.shared is not None:
            written = pickle.loads(note.shared.numpy().data)
        else:
            assert slot is not None
            first = slot * SLOT_BYTES
            written = pickle.loads(self._slots[first : first + note.num_bytes])
        self.give_back(slot)
        if isinstance(written, _Failed):
            raise PreparationError(f"{written.message}\n\n{written.traceback}")
        if isinstance(written, _Tensors):
            return TensorBuffer(written.header, torch.from_numpy(written.data) if note.data is None else note.data)
        return written


@dataclass(frozen=True)
class _Begun:
    ticket: Ticket
    attempt: int
    pool: _Pool
    slot: int | None
    note: "Future[_Note]"

    def give_back(self, _: "Future[_Note]") -> None:
        self.pool.give_back(self.slot)


@dataclass(frozen=True)
class _Note:
    """What goes through the pipe."""

    num_bytes: int
    """Of the answer, pickled, without large tensors."""
    shared: Tensor | None
    """uint8 [bytes], where the answer is; None: in the slot."""
    data: Tensor | None
    """uint8 [bytes] in shared memory, if the tensors are large."""


@dataclass(frozen=True)
class _Tensors:
    """A `TensorBuffer` as it is written."""

    header: Header
    data: np.ndarray
    """uint8 [bytes]; none, if they have memory of their own."""


@dataclass(frozen=True)
class _Failed:
    message: str
    traceback: str


# What follows runs in the workers.

_preparer: Preparer | None = None
_slots: mmap.mmap | None = None


def _begin(preparer: Preparer, slots: mmap.mmap) -> None:
    global _preparer, _slots
    _preparer, _slots = preparer, slots
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The terminal's interrupt is for who asks.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # By which a broken pool ends; whoever forked may have caught it.
    torch.set_num_threads(1)  # A pool of threads does not survive the fork.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _memory_for(num_bytes: int) -> Tensor:
    return in_own_memory(num_bytes) if num_bytes < LARGE_BYTES else in_shared_memory(num_bytes)


def _answer(ticket: Ticket, slot: int | None) -> _Note:
    assert _preparer is not None
    assert _slots is not None
    written: object
    data = None
    try:
        written = _preparer.answer(ticket, _memory_for)
    except Exception as error:
        written = _Failed(f"{type(error).__name__}: {error}", traceback.format_exc())
    if isinstance(written, TensorBuffer):
        data = written.data if written.data.nbytes >= LARGE_BYTES else None
        written = _Tensors(written.header, (in_own_memory(0) if data is not None else written.data).numpy())
    content = pickle.dumps(written)
    if slot is not None and len(content) <= SLOT_BYTES:
        _slots[slot * SLOT_BYTES : slot * SLOT_BYTES + len(content)] = content
        return _Note(len(content), None, data)
    shared = in_shared_memory(len(content))
    shared.numpy()[:] = np.frombuffer(content, dtype=np.uint8)
    return _Note(len(content), shared, data)


# The producer that needs nothing to be started: worker processes of the training process itself.


LARGEST_SHARE = 16
"""Samples that are prepared, and travel, at a time."""


class LocalProducer:
    """One data set, prepared by workers, which several data sets may share.

    `may_skip`: the workers check all samples. Each training process then decodes all of them, whatever it needs."""

    def __init__(self, workers: Workers, split: Split, num_samples: int, *, may_skip: bool = False) -> None:
        self._workers, self._split, self._num_samples, self.may_skip = workers, split, num_samples, may_skip
        self._lock = threading.Lock()
        self.received_bytes: Counter[str] = Counter()

    @property
    def fingerprint(self) -> str:
        return self._workers.preparer.datasets[self._split].fingerprint

    def __len__(self) -> int:
        return self._num_samples

    def samples(self, indices: Sequence[int]) -> list[Sample | Corrupt]:
        samples: list[Sample | Corrupt] = []
        for answer in self._workers.answers(shares(Ticket(self._split, tuple(indices)), self._workers.num)):
            assert isinstance(answer, list)
            samples += answer
        if not self.may_skip:
            for sample in samples:
                if isinstance(sample, Corrupt):
                    raise UserError(sample.message)
        return samples

    def features(self, module: str, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        features: list[dict[str, Tensor]] = []
        for answer in self._workers.answers(shares(Ticket(self._split, tuple(indices), module), self._workers.num)):
            if isinstance(answer, Corrupt):
                raise UserError(answer.message)
            assert isinstance(answer, TensorBuffer)
            with self._lock:
                self.received_bytes[module] += answer.data.nbytes
            features += unpack(answer.header, answer.data)
        return features

    def close(self) -> None:
        self._workers.close()


def shares(ticket: Ticket, num_workers: int) -> Iterator[Ticket]:
    """The same ticket in parts, enough of them to keep all workers busy, and none so large that it is a burden."""
    size = min(LARGEST_SHARE, max(1, -(-len(ticket.indices) // (2 * num_workers or 1))))
    for first in range(0, len(ticket.indices), size):
        yield Ticket(ticket.split, ticket.indices[first : first + size], ticket.module)
