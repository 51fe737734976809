"""Copies parameters and optimizer states from those who hold them to those who need them, by torch.distributed.

Frozen parameters are not copied: a stage is built with them. (Thesis, section 2.5: missing layers are copied from other
replicas; here with their optimizer state, which may be held by others than the parameter:
`motet.resilience.optimizer_state`.)
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from motet.parallel.tensor_plans import Shard, local_ranges
from motet.planner.reconfiguration.copies import Copy, Ranges, num_moved_bytes, plan_copies
from motet.runtime.local_model import LocalModel, LocalParameter
from motet.runtime.training.optimizer import Optimizer

MESSAGE_BYTES = 64 * 2**20
"""What is sent at once between two ranks, unless one tensor is larger."""
MOST_MESSAGES = 16
"""Of one rank, at once: each has a buffer."""
MOMENTS = ("exp_avg", "exp_avg_sq")


Kind = Literal["values", "moments"]


NUM_TENSORS: Mapping[Kind, int] = {"values": 1, "moments": len(MOMENTS)}


class Item(NamedTuple):
    """What is held, or not, as a whole."""

    parameter: str
    """Its name."""
    kind: Kind


@dataclass(frozen=True)
class Description:
    """An item as one rank holds it: enough for other ranks to know which part that is."""

    shape: tuple[int, ...]
    """Of the whole."""
    shard: Shard | None
    tp_rank: int
    tp_size: int
    num_bytes: int
    """Of the whole."""
    steps: float
    """Updates so far, by the optimizer; of moments alone."""

    @property
    def share(self) -> float:
        return 1.0 if self.shard is None else 1.0 / self.tp_size

    def ranges(self, dim: int) -> Ranges:
        if self.shard is None:
            return ((0, self.shape[dim]),)
        return tuple(local_ranges(self.shape[dim], self.shard, self.tp_rank, self.tp_size))


Described = Mapping[Item, Description]
"""What one rank holds."""


@dataclass
class Holding:
    """A model and its optimizer's states, all of one step, on this rank."""

    model: LocalModel
    optimizer: Optimizer

    def trained(self) -> dict[str, LocalParameter]:
        result: dict[str, LocalParameter] = {}
        for p in self.model.parameters:
            if p.parameter.requires_grad and p.is_kept:
                result.setdefault(p.name, p)
        return result

    def describe(self) -> dict[Item, Description]:
        """What is here. Parameters whose new values have not come yet are not, nor are the moments that others keep."""
        states, result = self.optimizer.states(), {}
        for name, p in self.trained().items():
            is_here: dict[Kind, bool] = {
                "values": self.optimizer.is_current(p.parameter),
                "moments": self.optimizer.keeps(p.parameter),
            }
            for kind in is_here:
                if is_here[kind]:
                    result[Item(name, kind)] = Description(
                        shape=p.full_shape or (1,),
                        shard=p.shard,
                        tp_rank=p.tp.rank,
                        tp_size=p.tp.size,
                        num_bytes=NUM_TENSORS[kind] * p.parameter.element_size() * torch.Size(p.full_shape).numel(),
                        steps=float(states[p.parameter]["step"]) if p.parameter in states else 0.0,
                    )
        return result

    def values(self) -> dict[Item, list[Tensor]]:
        """The parameters, at least one-dimensional, sharing memory with them."""
        return {Item(name, "values"): [_at_least_1d(p.parameter)] for name, p in self.trained().items()}

    def tensors(self) -> dict[Item, list[Tensor]]:
        """The same, with what there is of moments."""
        if not self.optimizer.states():
            self.optimizer.initialize_states()
        states = self.optimizer.states()
        moments = {
            Item(name, "moments"): [_at_least_1d(states[p.parameter][moment]) for moment in MOMENTS]
            for name, p in self.trained().items()
            if p.parameter in states
        }
        return self.values() | moments


def _at_least_1d(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(tensor.shape or (1,))


def describe(holdings: Sequence[Holding]) -> dict[Item, Description]:
    """Of several, of each item the largest part."""
    return {item: description for item, (description, _) in _largest(holdings).items()}


def tensors_of(holdings: Sequence[Holding]) -> dict[Item, list[Tensor]]:
    """The tensors of the parts that `describe` tells of."""
    tensors = {id(holding): holding.tensors() for holding in holdings}
    return {item: tensors[id(holding)][item] for item, (_, holding) in _largest(holdings).items()}


def _largest(holdings: Sequence[Holding]) -> dict[Item, tuple[Description, Holding]]:
    result: dict[Item, tuple[Description, Holding]] = {}
    for holding in holdings:
        for item, description in holding.describe().items():
            if item not in result or description.share > result[item][0].share:
                result[item] = (description, holding)
    return result


@dataclass(frozen=True)
class Handover:
    """What has to be done; the same on every rank."""

    copies: Sequence[Copy[Item]]
    missing: Sequence[Item]
    """Of which some part is nowhere."""
    moved_bytes: int
    dims: Mapping[Item, int]
    steps: Mapping[str, float]
    """By parameter: its updates so far."""

    @property
    def told_missing(self) -> tuple[str, ...]:
        """What is missing, in words: parameters, or the states of those whose values are there."""
        without_values = [item.parameter for item in self.missing if item.kind == "values"]
        states = [item.parameter for item in self.missing if item.parameter not in without_values]
        return (*without_values, *(f"the optimizer's state of {parameter}" for parameter in states))


def plan_handover(held: Sequence[Described], needed: Sequence[Described], *, devices_per_node: int) -> Handover:
    """`held`, `needed`: by rank of the present world, whose nodes have so many consecutive ranks each."""
    everything = [(item, d) for rank in (*held, *needed) for item, d in rank.items()]
    dims = {item: 0 for item, _ in everything} | {item: d.shard.dim for item, d in everything if d.shard is not None}
    unit_bytes = {item: d.num_bytes // d.shape[dims[item]] for item, d in everything}
    made, missing = plan_copies(
        {rank: {item: d.ranges(dims[item]) for item, d in parts.items()} for rank, parts in enumerate(held)},
        {rank: {item: d.ranges(dims[item]) for item, d in parts.items()} for rank, parts in enumerate(needed)},
        unit_bytes,
        devices_per_node=devices_per_node,
    )
    steps = {item.parameter: d.steps for rank in held for item, d in rank.items() if item.kind == "moments"}
    return Handover(made, missing, round(num_moved_bytes(made)), dims, steps)


@torch.no_grad()
def hand_over(handover: Handover, held: Mapping[Item, Sequence[Tensor]], new: Holding) -> None:
    """Collective. Fills the new model and its optimizer. `held`: this rank's tensors, as `Holding.tensors`."""
    new.optimizer.initialize_states()
    carry_out(handover, held, new.tensors())
    states = new.optimizer.states()
    for name, p in new.trained().items():
        if p.parameter in states:
            states[p.parameter]["step"].fill_(handover.steps[name])
    new.optimizer.renew_copies()


def wait_for(work: dist.Work, peer: int) -> None:
    """Without a limit but that of its group."""
    work.wait()


@torch.no_grad()
def carry_out(
    handover: Handover,
    held: Mapping[Item, Sequence[Tensor]],
    filled: Mapping[Item, Sequence[Tensor]],
    wait: Callable[[dist.Work, int], None] = wait_for,
) -> None:
    """Collective: copies from `held` into `filled`, of every rank. `wait`: for what is under way to or from a peer.

    Each rank takes its messages in one order that is the same for all, so the first that is not over is under way on
    both sides, however few a rank has at once."""
    rank = dist.get_rank()
    under_way: deque[_Transfer] = deque()
    for number, group in enumerate(_messages(handover)):
        source, target = group[0].source, group[0].target
        if source == target == rank:
            for copy in group:
                for there, here in zip(
                    _parts(filled, copy, handover, False), _parts(held, copy, handover, True), strict=True
                ):
                    there.copy_(here)
        elif rank == source:
            flat = torch.cat([part.reshape(-1) for copy in group for part in _parts(held, copy, handover, True)])
            under_way.append(_Transfer(dist.isend(flat, target, tag=number), target, flat, ()))
        elif rank == target:
            parts = [part for copy in group for part in _parts(filled, copy, handover, False)]
            flat = parts[0].new_empty(sum(part.numel() for part in parts))
            under_way.append(_Transfer(dist.irecv(flat, source, tag=number), source, flat, parts))
        if len(under_way) > MOST_MESSAGES:
            under_way.popleft().finish(wait)
    while under_way:
        under_way.popleft().finish(wait)


@dataclass(frozen=True)
class _Transfer:
    work: dist.Work | None
    peer: int
    flat: Tensor
    parts: Sequence[Tensor]
    """What is received, piece by piece; of what is sent none."""

    def finish(self, wait: Callable[[dist.Work, int], None]) -> None:
        assert self.work is not None
        wait(self.work, self.peer)
        if not self.parts:
            return
        for part, values in zip(self.parts, self.flat.split([part.numel() for part in self.parts]), strict=True):
            part.copy_(values.view_as(part))


def _parts(
    tensors: Mapping[Item, Sequence[Tensor]], copy: Copy[Item], handover: Handover, is_source: bool
) -> list[Tensor]:
    start = copy.source_start if is_source else copy.target_start
    return [tensor.narrow(handover.dims[copy.name], start, copy.length) for tensor in tensors[copy.name]]


def _messages(handover: Handover) -> list[list[Copy[Item]]]:
    """Copies that travel together, in an order that all ranks agree on."""
    result: list[list[Copy[Item]]] = []
    pairs: dict[tuple[int, int], list[Copy[Item]]] = {}
    sizes: dict[tuple[int, int], float] = {}
    for copy in handover.copies:
        pair = (copy.source, copy.target)
        if pair not in pairs or sizes[pair] + copy.num_bytes > MESSAGE_BYTES:
            pairs[pair] = []
            sizes[pair] = 0
            result.append(pairs[pair])
        pairs[pair].append(copy)
        sizes[pair] += copy.num_bytes
    return result
