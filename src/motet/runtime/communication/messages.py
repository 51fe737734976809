"""Messages between stages, on this rank: its part of a program, the rows of each route, and the mailbox.

Buffers have the shapes that the samples' metadata gives, so nothing is negotiated. Receives are posted when the
program reaches them, or before, and waited for when their value is read. Each message has a tag of its own, which gloo
honours, so its receives may be posted ahead of the program. NCCL does not: there each link has a communicator of its
own, on which both ends post in the program's total order.
"""

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from motet.assignment.sample import Sample
from motet.errors import UserError
from motet.parallel.mesh import pairs_by_tag
from motet.runtime.communication.deadline import Deadline
from motet.schedule.action import Compute, Kind
from motet.schedule.communicators import Link
from motet.schedule.dependencies import Activation, Gradient
from motet.schedule.lower import Message, Program, Step, is_resharded
from motet.schedule.routes import Cell, Routes
from motet.schedule.shared_gathers import gathered_by_block

Carried = Activation | Gradient
"""A value that goes between stages."""


@dataclass(frozen=True, eq=False)
class LocalProgram:
    """One rank's part of a program. Iterations with equal cells and routes share it, whichever samples they hold."""

    rank: int
    steps: tuple[Step, ...]
    """The rank's steps, in order."""
    tags: Mapping[Message, int]
    """A tag for each of this rank's messages, unique in the whole program."""
    uses: Mapping[Carried, int]
    """How often a value computed here is used here: once for each send, and once if it is read here."""
    final_backwards: Mapping[tuple[str, int, int], Compute]
    """The last backward, or half of one, that gives weights of a stage a gradient, by (module, replica, stage)."""
    split: frozenset[Cell]
    """Cells whose backward runs in two halves."""
    gathered_by_block: frozenset[tuple[str, int, int]]
    """Fully sharded stages, by (module, replica, stage), that gather their parameters block by block."""


def local_program(program: Program, rank: int) -> LocalProgram:
    """The rank's projection of the program. Tags are positions in the whole program, so all ranks agree on them."""
    steps = program.projections[rank]
    routes = program.dependencies.routes
    messages = [step for step in steps if isinstance(step, Message)]
    received = {message.value for message in messages if message.receiver == rank}
    uses: Counter[Carried] = Counter(message.value for message in messages if message.sender == rank)
    final_backwards = {}
    split = set()
    for step in steps:
        if not isinstance(step, Compute):
            continue
        for value in program.dependencies.reads_on(step, rank):
            if isinstance(value, Carried) and (value not in received or _has_own_piece(routes, value, rank)):
                uses[value] += 1
        if step.kind is not Kind.FORWARD and step.cell in routes.with_weight_gradient:
            final_backwards[step.cell[:3]] = step
        if step.kind is Kind.INPUT:
            split.add(step.cell)
    mine = set(messages)
    tags = {step: tag for tag, step in enumerate(program.steps) if isinstance(step, Message) and step in mine}
    return LocalProgram(rank, steps, tags, uses, final_backwards, frozenset(split), gathered_by_block(program))


def _has_own_piece(routes: Routes, value: Carried, rank: int) -> bool:
    """Whether the value is resharded and this rank makes a piece of what it reads."""
    if value.source.module != value.target.module:
        return False
    source, target = routes.stage(value.source), routes.stage(value.target)
    makers = target if isinstance(value, Gradient) else source
    return is_resharded(source, target) and rank in makers.ranks


def rows_of(
    wanted: Sequence[int], present: Sequence[int], samples: Sequence[Sample], module: str, target: str
) -> Tensor | None:
    """The rows that go to `target`, of the samples `wanted`, in a module's output [sum of num_outputs, width] of the
    samples `present`.

    None if that is the whole output as it stands."""
    sizes = [samples[i].num_outputs(module) for i in present]
    if tuple(wanted) == tuple(present) and sizes == [samples[i].num_outputs(module, target) for i in present]:
        return None
    starts = dict(zip(present, accumulate(sizes, initial=0), strict=False))
    rows = [starts[i] + place for i in wanted for place in samples[i].output_places(module, target)]
    return torch.tensor(rows, dtype=torch.long)


def merge_order(
    parts: Sequence[Sequence[int]], whole: Sequence[int], samples: Sequence[Sample], module: str, target: str
) -> Tensor | None:
    """The index that sorts the concatenation of `parts` (samples of each route from `module` to `target`) into the
    order of `whole`.

    Samples of `whole` that no part brings have no tokens of the module. None if nothing has to move."""
    present = [i for part in parts for i in part]
    brought = set(present)
    wanted = [i for i in whole if i in brought]
    if wanted == present:
        return None
    sizes = [samples[i].num_outputs(module, target) for i in present]
    starts = dict(zip(present, accumulate(sizes, initial=0), strict=False))
    lengths = dict(zip(present, sizes, strict=True))
    return torch.tensor([row for i in wanted for row in range(starts[i], starts[i] + lengths[i])], dtype=torch.long)


MAX_UNANSWERED_SENDS = 16
"""Sends that no gradient will answer; beyond this number the oldest is waited for, to free its buffer."""


class Address(NamedTuple):
    """Where a message of this rank's is sent, or received from."""

    peers: tuple[int]
    """The rank at the other end."""
    group: dist.ProcessGroup | None
    tag: int


def addresses_of(
    rank: int, tags: Mapping[Message, int], links: Mapping[Link, dist.ProcessGroup | None]
) -> dict[Message, Address]:
    """The address of each message of a rank. `tags`: of these messages; `links`: the rank's communicators.

    Raises `UserError` for a message between replicas that the plan keeps apart, where the transport needs a
    communicator opened before the first step."""
    addresses = {}
    for message, tag in tags.items():
        link = Link(message.sender, message.receiver, message.gradient)
        if link not in links and not pairs_by_tag():
            raise UserError(
                f"parallel.assignment: rank {link.sender} would send to rank {link.receiver}, which have different "
                "shares of the batch; an assignment keeps each share's samples in the replicas of the share"
            )
        peer = message.receiver if message.sender == rank else message.sender
        addresses[message] = Address((peer,), links.get(link), tag)
    return addresses


class _Transfer(NamedTuple):
    """A send from, or a receive into, `buffer` that has not been waited for."""

    buffer: Tensor
    work: dist.Work
    message: Message
    peers: tuple[int]


class Mailbox:
    """The values of one iteration on one rank. Waiting raises `RuntimeError` at the deadline or if a peer died."""

    def __init__(self, addresses: Mapping[Message, Address], uses: Mapping[Any, int], deadline: Deadline) -> None:
        """`uses`: how often each value that is made here is used here. Values are named by anything."""
        self._addresses, self._deadline = addresses, deadline
        self._uses: dict[Hashable, int] = dict(uses)
        self._here: dict[Hashable, Tensor] = {}
        self._receives: dict[Hashable, list[_Transfer]] = {}
        self._answered: dict[Cell, list[_Transfer]] = {}
        """Sends by the cell that made them."""
        self._unanswered: deque[_Transfer] = deque()

    def is_needed(self, value: Hashable) -> bool:
        """Whether a value that is made here is sent or read by this rank."""
        return self._uses.get(value, 0) > 0

    def put(self, value: Hashable, tensor: Tensor) -> None:
        """Keeps a value that was made here, if it is needed."""
        if self._uses.get(value, 0) > 0:
            self._here[value] = tensor

    def awaited(self, value: Hashable) -> list[Message]:
        """The messages that bring a value, or pieces of it, from other ranks, unless they have been taken."""
        return [receive.message for receive in self._receives.get(value, ())]

    def take(self, value: Hashable) -> list[Tensor]:
        """Waits for these messages and returns their content."""
        buffers = []
        for buffer, work, message, peers in self._receives.pop(value, ()):
            self._deadline.wait(work, message, peers)
            buffers.append(buffer)
        return buffers

    def use(self, value: Hashable) -> Tensor:
        """A value that was made here, for one of those that need it."""
        self._uses[value] = left = self._uses[value] - 1
        return self._here[value] if left else self._here.pop(value)

    def send(self, message: Message, tensor: Tensor, *, answered: bool) -> None:
        """`answered`: a gradient will come back for it, which shows that it arrived."""
        peers, group, tag = self._addresses[message]
        work = dist.isend(tensor, peers[0], group, tag)
        assert work is not None
        send = _Transfer(tensor, work, message, peers)
        if answered:
            self._answered.setdefault(message.source, []).append(send)
            return
        self._unanswered.append(send)
        if len(self._unanswered) > MAX_UNANSWERED_SENDS:
            self._wait(self._unanswered.popleft())

    def receive(
        self, message: Message, value: Hashable, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`value`: that the message carries, or a piece of it."""
        buffer = torch.empty(shape, dtype=dtype, device=device)
        peers, group, tag = self._addresses[message]
        work = dist.irecv(buffer, peers[0], group, tag)
        assert work is not None
        self._receives.setdefault(value, []).append(_Transfer(buffer, work, message, peers))

    def release(self, cell: Cell) -> None:
        """Called after a cell's backward: what it sent forward has been answered, so it has arrived."""
        for send in self._answered.pop(cell, ()):
            self._wait(send)

    def finish(self) -> None:
        """Waits for all sends."""
        for cell in list(self._answered):
            self.release(cell)
        while self._unanswered:
            self._wait(self._unanswered.popleft())
        assert not self._receives, f"received but never read: {list(self._receives)}"
        assert not self._here, f"made but never used: {list(self._here)}"

    def _wait(self, transfer: _Transfer) -> None:
        self._deadline.wait(transfer.work, transfer.message, transfer.peers)
