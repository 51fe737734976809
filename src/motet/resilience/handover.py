"""Copies parameters and optimizer states from those who hold them to those who need them, by torch.distributed.

Frozen parameters are not copied: a stage is built with them. (Thesis, section 2.5: missing layers are copied from other
replicas; here with their optimizer state.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from motet.models.shards import Shard, local_ranges
from motet.resilience.copies import Copy, Ranges, copies, moved_bytes
from motet.runtime.local_model import LocalModel, LocalParameter
from motet.runtime.optimizer import Optimizer

MESSAGE_BYTES = 64 * 2**20
"""What is sent at once between two ranks, unless one tensor is larger."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Description:
    """A parameter as one rank holds it: enough for other ranks to know which part that is."""

    shape: tuple[int, ...]
    """Of the whole."""
    shard: Shard | None
    tp_rank: int
    tp_size: int
    num_bytes: int
    """Of the whole, parameter and state."""
    steps: float
    """Updates so far, by the optimizer."""

    @property
    def share(self) -> float:
        return 1.0 if self.shard is None else 1.0 / self.tp_size

    def ranges(self, dim: int) -> Ranges:
        if self.shard is None:
            return ((0, self.shape[dim]),)
        return tuple(local_ranges(self.shape[dim], self.shard, self.tp_rank, self.tp_size))


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

    def describe(self) -> dict[str, Description]:
        """By name."""
        states = self.optimizer.states()
        return {
            name: Description(
                shape=p.full_shape or (1,),
                shard=p.shard,
                tp_rank=p.tp.rank,
                tp_size=p.tp.size,
                num_bytes=3 * p.parameter.element_size() * torch.Size(p.full_shape).numel(),
                steps=float(states[p.parameter]["step"]) if p.parameter in states else 0.0,
            )
            for name, p in self.trained().items()
        }

    def tensors(self) -> dict[str, list[Tensor]]:
        """By name: the parameter and its moments, at least one-dimensional, sharing memory with them."""
        if not self.optimizer.states():
            self.optimizer.initialize_states()
        states = self.optimizer.states()
        return {
            name: [
                tensor.detach().reshape(tensor.shape or (1,))
                for tensor in (p.parameter, *(states[p.parameter][moment] for moment in MOMENTS))
            ]
            for name, p in self.trained().items()
        }


def describe(holdings: Sequence[Holding]) -> dict[str, Description]:
    """Of several, of each parameter the largest part."""
    return {name: description for name, (description, _) in _largest(holdings).items()}


def tensors_of(holdings: Sequence[Holding]) -> dict[str, list[Tensor]]:
    """The tensors of the parts that `describe` tells of."""
    tensors = {id(holding): holding.tensors() for holding in holdings}
    return {name: tensors[id(holding)][name] for name, (_, holding) in _largest(holdings).items()}


def _largest(holdings: Sequence[Holding]) -> dict[str, tuple[Description, Holding]]:
    result: dict[str, tuple[Description, Holding]] = {}
    for holding in holdings:
        for name, description in holding.describe().items():
            if name not in result or description.share > result[name][0].share:
                result[name] = (description, holding)
    return result


@dataclass(frozen=True)
class Handover:
    """What has to be done; the same on every rank."""

    copies: Sequence[Copy[str]]
    missing: Sequence[str]
    """Parameters of which some part is nowhere."""
    moved_bytes: int
    dims: Mapping[str, int]
    steps: Mapping[str, float]


def plan_handover(
    held: Sequence[Mapping[str, Description]], needed: Sequence[Mapping[str, Description]], *, devices_per_node: int
) -> Handover:
    """`held`, `needed`: by rank of the present world, whose nodes have so many consecutive ranks each."""
    everything = [(name, d) for rank in (*held, *needed) for name, d in rank.items()]
    dims = {name: 0 for name, _ in everything} | {name: d.shard.dim for name, d in everything if d.shard is not None}
    unit_bytes = {name: d.num_bytes // d.shape[dims[name]] for name, d in everything}
    made, missing = copies(
        {rank: {name: d.ranges(dims[name]) for name, d in parts.items()} for rank, parts in enumerate(held)},
        {rank: {name: d.ranges(dims[name]) for name, d in parts.items()} for rank, parts in enumerate(needed)},
        unit_bytes,
        devices_per_node=devices_per_node,
    )
    steps = {name: d.steps for rank in held for name, d in rank.items()}
    return Handover(made, missing, round(moved_bytes(made)), dims, steps)


@torch.no_grad()
def hand_over(handover: Handover, held: Mapping[str, Sequence[Tensor]], new: Holding) -> None:
    """Collective. Fills the new model and its optimizer. `held`: this rank's tensors by name, as `Holding.tensors`."""
    rank = dist.get_rank()
    new.optimizer.initialize_states()
    filled = new.tensors()
    transfers: list[tuple[dist.Work, list[Tensor], Tensor]] = []
    sent = []
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
            sent.append((dist.isend(flat, target, tag=number), flat))
        elif rank == target:
            parts = [part for copy in group for part in _parts(filled, copy, handover, False)]
            flat = parts[0].new_empty(sum(part.numel() for part in parts))
            work = dist.irecv(flat, source, tag=number)
            assert work is not None
            transfers.append((work, parts, flat))
    for work, parts, flat in transfers:
        work.wait()
        for part, values in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.view_as(part))
    for send, _ in sent:
        assert send is not None
        send.wait()
    states = new.optimizer.states()
    for name, p in new.trained().items():
        states[p.parameter]["step"].fill_(handover.steps[name])
    for p in new.model.parameters:
        first = new.trained().get(p.name) if p.is_kept else None
        if first is not None and first is not p:
            p.parameter.copy_(first.parameter)


def _parts(
    tensors: Mapping[str, Sequence[Tensor]], copy: Copy[str], handover: Handover, is_source: bool
) -> list[Tensor]:
    start = copy.source_start if is_source else copy.target_start
    return [tensor.narrow(handover.dims[copy.name], start, copy.length) for tensor in tensors[copy.name]]


def _messages(handover: Handover) -> list[list[Copy[str]]]:
    """Copies that travel together, in an order that all ranks agree on."""
    result: list[list[Copy[str]]] = []
    pairs: dict[tuple[int, int], list[Copy[str]]] = {}
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
