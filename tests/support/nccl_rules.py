"""NCCL's rules on gloo: a backend of torch.distributed on which programs that would hang or mix up under NCCL fail.

* A communicator's first operation waits on the host for all members (`_Communicator._open`). After `PATIENCE_S` that is
  an error, which names who has not come.
* A pair has a communicator of its own for sends and receives outside of batches; batches use the group's.
* Operations of one communicator are issued in one order on all ranks. When one is issued, the orders of each pair of
  ranks are compared; the error names both ranks and operations. Tags are not compared: to NCCL they mean nothing.
* Operations run in that order: none begins before the one before it has ended on this rank. A thread for each
  communicator runs them.
* An operation with a lost peer does not return. Its wait ends by `abort`, or after `PATIENCE_S` with an error that
  tells what was queued.

Limits: a wait blocks the host, where NCCL's would block a stream; nothing runs on streams, so no race between them
shows. What a rank would do while its device is behind does not happen. Memory and channels of communicators are not
there, nor is the limit on kernels that run at once.
"""

import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from wrapped_group import Run, WrappedGroup, register, tensors_of

from motet.resilience import recover

PATIENCE_S = 60.0
"""Seconds after which something that does not come is an error, so that a test ends."""


class RulesBrokenError(AssertionError):
    """Under NCCL this program would hang, or take one message for another."""


class _Folder:
    """Where the ranks of a test write down what they issue."""

    path = Path()


class RuledWork(dist._Work):
    """An operation in the queue of its communicator."""

    def __init__(self, what: str, communicator: "_Communicator") -> None:
        super().__init__()
        self.what, self._communicator = what, communicator
        self.ended = threading.Event()
        self.failure: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended.wait(PATIENCE_S):
            raise RulesBrokenError(
                f"{self._communicator}: waits in vain for {self.what!r}; {self._communicator.first_pending()}"
            )
        if self.failure is not None:
            raise self.failure
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class _Communicator:
    """Operations of some ranks, in order. `members`: as the group of all ranks numbers them."""

    def __init__(self, name: str, members: Sequence[int], rank: int, store: dist.Store, world: str = "") -> None:
        self._name, self._members, self._rank, self._store, self._world = name, members, rank, store, world
        self._queue: SimpleQueue[tuple[RuledWork, Callable[[], list[dist.Work]]]] = SimpleQueue()
        self._is_open = self._is_aborted = False
        self.ends_silently = False
        self._written: dict[int, list[str]] = defaultdict(list)
        """What this rank has issued, by the other rank that takes part."""
        self._read: dict[int, tuple[BinaryIO, list[str], bytes]] = {}
        """By other rank: its open file, what it has issued, and the beginning of a line."""
        self._pending: list[RuledWork] = []
        self.lost = ""
        """What gloo said when the peer was lost."""

    def __str__(self) -> str:
        return f"rank {self._rank}, {self._name} of ranks {', '.join(map(str, self._members))}"

    def issue(self, whats: Mapping[int, str], run: Callable[[], list[dist.Work]]) -> RuledWork:
        """`whats`: what the operation is to each member that takes part in it with this rank."""
        if self._is_aborted:
            raise RuntimeError(f"{self}: was aborted before {', '.join(whats.values())}")
        if not self._is_open:
            self._open()
        for other, what in whats.items():
            self._compare(other, what)
        work = RuledWork(", ".join(sorted(set(whats.values()))), self)
        self._pending.append(work)
        self._queue.put((work, run))
        return work

    def abort(self) -> None:
        """Ends what waits, with an error; or silently, as on a device, with anything as result."""
        self._is_aborted = True
        for work in list(self._pending):
            if not self.ends_silently:
                work.failure = RuntimeError(f"{self}: was aborted during {work.what}")
            work.ended.set()

    def first_pending(self) -> str:
        pending = [work.what for work in list(self._pending)]
        return f"{pending[0]!r} stands first in its queue {self.lost}" if pending else "its queue is empty"

    def _open(self) -> None:
        keys = {rank: f"open/{self._name}/{rank}" for rank in self._members}
        self._store.set(keys[self._rank], "here")
        for other in self._members:
            try:
                self._store.wait([keys[other]], timedelta(seconds=PATIENCE_S))
            except RuntimeError as error:
                raise RulesBrokenError(
                    f"{self}: its first operation waits on the host for rank {other}, which does not come"
                ) from error
        self._is_open = True
        threading.Thread(target=self._run, daemon=True).start()

    def _file(self, writer: int, reader: int) -> Path:
        return _Folder.path / f"{self._world}.{self._name.replace('/', '.')}.{writer}-{reader}"

    def _compare(self, other: int, what: str) -> None:
        """Writes the operation down, then reads how far the other is: who comes second sees both."""
        own = self._written[other]
        own.append(what)
        with self._file(self._rank, other).open("ab") as written:
            written.write(f"{what}\n".encode())
        if other not in self._read:
            path = self._file(other, self._rank)
            if not path.exists():
                return
            self._read[other] = (path.open("rb"), [], b"")
        file, issued, rest = self._read[other]
        first_new = min(len(own) - 1, len(issued))
        *lines, rest = (rest + file.read()).split(b"\n")
        issued += [line.decode() for line in lines]
        self._read[other] = (file, issued, rest)
        for place in range(first_new, min(len(own), len(issued))):
            if own[place] != issued[place]:
                raise RulesBrokenError(
                    f"{self}: operation {place} with rank {other} is {own[place]!r} on rank {self._rank} and "
                    f"{issued[place]!r} on rank {other}"
                )

    def _run(self) -> None:
        while True:
            work, run = self._queue.get()
            try:
                for inner in run():
                    inner.wait()
            except RuntimeError as error:
                self.lost = f"({error})"
                return  # Neither this operation nor what stands behind it ever ends.
            if not self._is_aborted:
                self._pending.remove(work)
                work.ended.set()


class RuledGroup(WrappedGroup):
    """A group under NCCL's rules. See the table above."""

    backend_name = "nccl_rules"
    ends_silently = False
    """Whether aborted operations end without an error."""

    def __init__(self, options: Any, _: object) -> None:
        super().__init__(options, _)
        self._communicators: dict[tuple[bool, tuple[int, ...]], _Communicator] = {}
        # Groups of a later world have the names of those before.
        self._world = self.store.compare_set("world", "", os.urandom(4).hex()).decode()
        self._batch: list[tuple[int, str, Callable[[], dist.Work]]] | None = None

    def issue(self, name: str, run: Run, args: tuple[Any, ...]) -> dist.Work:
        if name not in ("send", "recv"):
            what = _description(name, args)
            whats = {rank: what for rank in self.ranks if rank != self.ranks[self.place]}
            return self._communicator(self.ranks, is_pair=False).issue(whats, lambda: [self.start(name, run, args)])
        tensors, peer, _ = args
        other, here = self.ranks[peer], self.ranks[self.place]
        ends = f"{here}>{other}" if name == "send" else f"{other}>{here}"
        what = f"{ends} {_shape(tensors[0])}"
        if self._batch is not None:
            self._batch.append((other, what, lambda: self.start(name, run, args)))
            return _Batched()
        # Without its tag no message overtakes another.
        pair = tuple(sorted((here, other)))
        return self._communicator(pair, is_pair=True).issue(
            {other: what}, lambda: [self.start(name, run, (tensors, peer, 0))]
        )

    def run_batch(self, add: Callable[[], object]) -> list[dist.Work]:
        """What `add` sends and receives is one operation of the whole group's communicator."""
        self._batch = []
        add()
        batch, self._batch = self._batch, None
        whats: dict[int, list[str]] = defaultdict(list)
        for other, what, _ in batch:
            whats[other].append(what)
        # What a pair exchanges in a batch is matched by order in each direction.
        by_direction = {other: "; ".join(sorted(found, key=_direction)) for other, found in whats.items()}
        communicator = self._communicator(self.ranks, is_pair=False)
        return [communicator.issue(by_direction, lambda: [run() for _, _, run in batch])]

    def abort(self) -> None:
        for communicator in self._communicators.values():
            communicator.abort()

    def _communicator(self, ranks: tuple[int, ...], *, is_pair: bool) -> _Communicator:
        if (is_pair, ranks) not in self._communicators:
            name = f"communicator {self.name}{'.pair' + '-'.join(map(str, ranks)) if is_pair else ''}"
            communicator = _Communicator(name, ranks, self.ranks[self.place], self.store, self._world)
            communicator.ends_silently = self.ends_silently
            self._communicators[is_pair, ranks] = communicator
        return self._communicators[is_pair, ranks]


class SilentGroup(RuledGroup):
    """Aborts as on a device: who waits is not told."""

    backend_name = "nccl_silent"
    ends_silently = True

    def __init__(self, options: Any, backend_options: object) -> None:
        super().__init__(options, backend_options)
        self._issued: list[tuple[dist.Work, tuple[Any, ...]]] = []

    def issue(self, name: str, run: Run, args: tuple[Any, ...]) -> dist.Work:
        work = super().issue(name, run, args)
        self._issued = [(each, of) for each, of in self._issued if not each.is_completed()]
        self._issued.append((work, args if name != "send" else ()))
        return work

    def abort(self) -> None:
        pending = [args for work, args in self._issued if not work.is_completed()]
        super().abort()
        for tensor in tensors_of([args[0] for args in pending if args]):
            tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 113)


class _Batched(dist._Work):
    """Stands for an operation of a batch, which ends as a whole."""


def _direction(what: str) -> str:
    return what.split(" ", 1)[0]


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} x {tensor.numel()}"


def _description(name: str, args: tuple[Any, ...]) -> str:
    """What all members must agree on: sizes too, where all members' are equal."""
    if name in ("barrier", "all_to_all_single", "alltoall_base", "alltoall", "gather", "scatter"):
        return name
    first = args[0]
    while isinstance(first, list):
        first = first[0]
    options = args[-1]
    root = f" root {options.rootRank}" if hasattr(options, "rootRank") else ""
    return f"{name}{root} {_shape(first)}"


_batch_isend_irecv = dist.batch_isend_irecv


def _ruled_batch(operations: list[dist.P2POp]) -> list[dist.Work]:
    group = operations[0].group or dist.group.WORLD
    if not isinstance(group, RuledGroup):
        return _batch_isend_irecv(operations)
    return group.run_batch(lambda: _batch_isend_irecv(operations))


@contextmanager
def ruled(kind: type[RuledGroup] = RuledGroup) -> Iterator[None]:
    """Processes that are forked in this block can use the backend."""
    register(kind)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patches:
        patches.setattr(_Folder, "path", Path(folder))
        patches.setattr(dist, "batch_isend_irecv", _ruled_batch)
        yield


@contextmanager
def under_rules(kind: type[RuledGroup]) -> Iterator[None]:
    """Trainings that survive failures use this backend."""
    with ruled(kind), mock.patch.object(recover, "backend_for", return_value=kind.backend_name):
        yield


def run_under_nccl_rules(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """As `run_distributed`, on the backend of this file."""
    with ruled():
        return run_distributed(fn, world_size, *args, backend=RuledGroup.backend_name, **options)
