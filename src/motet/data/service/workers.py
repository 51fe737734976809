"""Preparation of samples in worker processes. A worker that dies is replaced, and its tickets are answered by others.

The standard library's process pool is forked, so workers have the data sets as they were opened, without reading them
again. Messages through the pool's pipe have at most `select.PIPE_BUF` bytes, which the kernel writes atomically: a
worker that is killed in the middle of a longer message would block its reader forever. The answers themselves are in
shared memory: small ones in slots that all workers have from the start, large tensors in segments of their own, which
are freed with their last user (`motet.data.service.shared_segments`).

Limits: a pool that loses one worker restarts all of them.
"""

import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from motet.assignment.sample import Sample
from motet.data.preparation import NUM_SAMPLES_KEPT, Dataset
from motet.data.service.shared_segments import Segment, SegmentName, SegmentReceiver, new_segment, send_segment
from motet.data.service.tensor_buffer import Allocate, Header, TensorBuffer, in_own_memory, pack, unpack
from motet.data.service.tickets import Corrupt, Split, Ticket, stop_at_corrupt
from motet.errors import UserError

MAX_ATTEMPTS = 5
"""Attempts at one ticket, each of which ended with the death of a worker."""

LARGE_BYTES = 256 * 2**10
"""From this size on, setting up shared memory costs less than two copies."""

SLOT_BYTES = 2 * LARGE_BYTES
SLOTS_PER_WORKER = 8
"""Slots that are never written to take no memory."""


Answer = list[Sample | Corrupt] | TensorBuffer | Corrupt
"""The answer to a ticket for metadata; for tensors; and for tensors of a sample that cannot be prepared."""


@dataclass(frozen=True)
class Preparer:
    """Answers tickets from data sets.

    `checks_all`: a sample's tensors are prepared before its metadata is returned, so that samples that cannot be
    prepared are known before the batch is cut. Every process then decodes all samples that it is asked about."""

    datasets: Mapping[Split, Dataset]
    checks_all: bool = False
    _good: set[tuple[Split, int]] = field(default_factory=set, init=False, repr=False)

    def answer(self, ticket: Ticket, allocate: Allocate = in_own_memory) -> Answer:
        """The answer, a function of the ticket and the data alone. `allocate`: allocates the memory for tensors."""
        if ticket.module is None:
            return [self._sample(ticket.split, index) for index in ticket.indices]
        features: list[dict[str, Tensor]] = []
        for index in ticket.indices:
            try:
                features.append(self.datasets[ticket.split].features(index, ticket.module))
            except UserError as error:
                return Corrupt(index, str(error))
        return pack(features, allocate)

    def _sample(self, split: Split, index: int) -> Sample | Corrupt:
        dataset = self.datasets[split]
        try:
            sample = dataset.sample(index)
            if self.checks_all and (split, index) not in self._good:
                for module in sample.layouts:
                    if sample.has(module):
                        dataset.features(index, module)
                self._good.add((split, index))
            return sample
        except UserError as error:
            return Corrupt(index, str(error))


class WorkersDiedError(RuntimeError):
    """Raised when workers die repeatedly over one ticket."""


class PreparationError(RuntimeError):
    """Raised when a worker fails for another reason than the sample."""


class Workers:
    """Answers tickets by `num` worker processes; 0: in the calling thread."""

    def __init__(self, preparer: Preparer, num: int) -> None:
        self.preparer, self.num = preparer, num
        self._lock = threading.Lock()
        self.num_restarts = 0
        self._pool = self._start() if num else None

    def _start(self) -> "_Pool":
        return _Pool(self.preparer, self.num)

    def answers(self, tickets: Iterable[Ticket]) -> Iterator[Answer]:
        """The answers in the order of the tickets. A bounded number of further tickets is prepared ahead."""
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
        finally:  # The caller does not take the other answers.
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
    """Worker processes and the slots that they write to. A worker of a broken pool may still be writing, so a new pool
    has new slots."""

    def __init__(self, preparer: Preparer, num: int) -> None:
        num_slots = SLOTS_PER_WORKER * num
        self._slots = mmap.mmap(-1, num_slots * SLOT_BYTES)
        self._free = deque(range(num_slots))
        self._segments = SegmentReceiver()
        self.executor = ProcessPoolExecutor(
            num,
            multiprocessing.get_context("fork"),
            initializer=_begin,
            initargs=(preparer, self._slots, self._segments),
        )
        self.executor.submit(os.getpid)  # Forks now, while this process has few threads.
        self._segments.begin()

    def take_slot(self) -> int | None:
        """Returns a free slot, or None if there is none."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def give_back(self, slot: int | None) -> None:
        if slot is not None:
            self._free.append(slot)

    def read(self, note: "_Note", slot: int | None) -> Answer:
        """Reads what a worker has written and frees its slot. Raises `PreparationError`."""
        if note.shared is not None:
            written = pickle.loads(self._segments.take(note.shared).numpy().data)
        else:
            assert slot is not None
            first = slot * SLOT_BYTES
            written = pickle.loads(self._slots[first : first + note.num_bytes])
        self.give_back(slot)
        if isinstance(written, _Failed):
            raise PreparationError(f"{written.message}\n\n{written.traceback}")
        if isinstance(written, _Tensors):
            data = torch.from_numpy(written.data) if note.data is None else self._segments.take(note.data)
            return TensorBuffer(written.header, data)
        return written

    def discard(self, note: "_Note") -> None:
        """Frees the memory of an answer that nobody reads."""
        for name in (note.shared, note.data):
            if name is not None:
                self._segments.take(name)


@dataclass(frozen=True)
class _Begun:
    ticket: Ticket
    attempt: int
    pool: _Pool
    slot: int | None
    note: "Future[_Note]"

    def give_back(self, done: "Future[_Note]") -> None:
        self.pool.give_back(self.slot)
        if not done.cancelled() and done.exception() is None:
            self.pool.discard(done.result())


@dataclass(frozen=True)
class _Note:
    """The message through the pipe."""

    num_bytes: int
    """Size of the pickled answer, without large tensors."""
    shared: SegmentName | None
    """The segment that holds the answer; None: it is in the slot."""
    data: SegmentName | None
    """The segment of the tensors, if they are large."""


@dataclass(frozen=True)
class _Tensors:
    """The form in which a `TensorBuffer` is pickled."""

    header: Header
    data: np.ndarray
    """uint8 [bytes]; empty if the tensors have memory of their own."""


@dataclass(frozen=True)
class _Failed:
    message: str
    traceback: str


# The functions from here to `_answer` run in the workers.

_preparer: Preparer | None = None
_slots: mmap.mmap | None = None
_sender: socket.socket | None = None


def _begin(preparer: Preparer, slots: mmap.mmap, segments: SegmentReceiver) -> None:
    global _preparer, _slots, _sender
    _preparer, _slots, _sender = preparer, slots, segments.sender()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The main process handles the terminal's interrupt.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ends a broken pool; the main process may have a handler.
    torch.set_num_threads(1)  # A pool of threads does not survive the fork.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(ticket: Ticket, slot: int | None) -> _Note:
    assert _preparer is not None
    assert _slots is not None
    assert _sender is not None
    written: object
    segments: list[Segment] = []

    def allocate(num_bytes: int) -> Tensor:
        if num_bytes < LARGE_BYTES:
            return in_own_memory(num_bytes)
        segments.append(new_segment(num_bytes))
        return segments[-1].data

    data = None
    try:
        written = _preparer.answer(ticket, allocate)
    except Exception as error:
        written = _Failed(f"{type(error).__name__}: {error}", traceback.format_exc())
        for segment in segments:
            os.close(segment.descriptor)
    if isinstance(written, TensorBuffer):
        data = send_segment(_sender, segments.pop()) if segments else None
        written = _Tensors(written.header, (in_own_memory(0) if data is not None else written.data).numpy())
    content = pickle.dumps(written)
    if slot is not None and len(content) <= SLOT_BYTES:
        _slots[slot * SLOT_BYTES : slot * SLOT_BYTES + len(content)] = content
        return _Note(len(content), None, data)
    shared = new_segment(len(content))
    shared.data.numpy()[:] = np.frombuffer(content, dtype=np.uint8)
    return _Note(len(content), send_segment(_sender, shared), data)


LARGEST_SHARE = 16
"""Most samples that are prepared and sent at a time."""


class LocalProducer:
    """The producer of one data set, whose workers may be shared by several data sets.

    `may_skip`: the workers check all samples, so each training process decodes all of them."""

    def __init__(self, workers: Workers, split: Split, num_samples: int, *, may_skip: bool = False) -> None:
        self._workers, self._split, self._num_samples, self.may_skip = workers, split, num_samples, may_skip
        self._lock = threading.Lock()
        self._known: dict[int, Sample] = {}
        """Metadata of a small set, so that later epochs do not ask the workers again."""
        self.received_bytes: Counter[str] = Counter()

    @property
    def fingerprint(self) -> str:
        return self._workers.preparer.datasets[self._split].fingerprint

    def __len__(self) -> int:
        return self._num_samples

    def samples(self, indices: Sequence[int]) -> list[Sample | Corrupt]:
        missing = tuple(index for index in indices if index not in self._known)
        asked: list[Sample | Corrupt] = []
        for answer in self._workers.answers(shares(Ticket(self._split, missing), self._workers.num)):
            assert isinstance(answer, list)
            asked += answer
        found = dict(zip(missing, asked, strict=True))
        samples = [found[index] if index in found else self._known[index] for index in indices]
        if self._num_samples <= NUM_SAMPLES_KEPT:
            self._known |= {index: sample for index, sample in found.items() if isinstance(sample, Sample)}
        if not self.may_skip:
            stop_at_corrupt(samples)
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
    """Splits a ticket into parts: enough to keep all workers busy, and of at most `LARGEST_SHARE` samples."""
    size = min(LARGEST_SHARE, max(1, -(-len(ticket.indices) // (2 * num_workers or 1))))
    for first in range(0, len(ticket.indices), size):
        yield Ticket(ticket.split, ticket.indices[first : first + size], ticket.module)
