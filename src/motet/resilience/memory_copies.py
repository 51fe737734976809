"""Copies of a node's state in its neighbour's memory, for layers that one pipeline alone holds.

Every `train.failures.copy_every` steps each rank keeps its parameters and optimizer states as they are, and sends them
to the rank of the same place on the next node, in a ring. When a node is lost that held a layer alone, all ranks go
back to that step: from their own memory, and the lost node's part from its neighbour's. If the last checkpoint is
newer, or both neighbours are lost, the checkpoint is read.

The two newest steps are kept, as a loss may interrupt an exchange that some ranks have finished and others have not.

Memory on the host, by rank: four times its parameters and optimizer states (12 bytes a parameter in float32), its own
and its neighbour's at two steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from motet.resilience.state_transfer import Item, ItemDescription, LocalState, TransferPlan, plan_transfer
from motet.runtime.communication.agreement import gather_values
from motet.runtime.training.trainer import TrainingSummary

KEPT_STEPS = 2


@dataclass(frozen=True)
class _Part:
    """A part of an item that a rank holds, and the form of its tensors."""

    item: Item
    description: ItemDescription
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def empty(self) -> list[Tensor]:
        forms = zip(self.shapes, self.dtypes, strict=True)
        return [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in forms]


@dataclass(frozen=True)
class Copies:
    """What a rank keeps of one step: its own, and its neighbour's where it has nothing of its own."""

    summary: TrainingSummary
    descriptions: Mapping[Item, ItemDescription]
    tensors: Mapping[Item, Sequence[Tensor]]


def exchange_copies(
    local: LocalState, summary: TrainingSummary, node_size: int, hosts: dist.ProcessGroup | None
) -> Copies:
    """Collective over all ranks. `hosts`: the group in which hosts talk."""
    described, tensors = local.describe(), local.tensors()
    own = {item: [tensor.detach().to("cpu", copy=True) for tensor in tensors[item]] for item in described}
    parts = [
        _Part(
            item,
            described[item],
            tuple(tuple(tensor.shape) for tensor in own[item]),
            tuple(str(tensor.dtype).removeprefix("torch.") for tensor in own[item]),
        )
        for item in sorted(own)
    ]
    rank, size = dist.get_rank(), dist.get_world_size()
    following, before = (rank + node_size) % size, (rank - node_size) % size
    of_neighbour = gather_values(list[_Part], parts, hosts)[before]
    received = {part.item: part.empty() for part in of_neighbour}
    works = [
        work
        for peer, act, of in ((following, dist.isend, own), (before, dist.irecv, received))
        for tag, tensor in enumerate(_in_order(of))
        if peer != rank and (work := act(tensor, peer, group=hosts, tag=tag)) is not None
    ]
    for work in works:
        work.wait()
    return Copies(
        deepcopy(summary),
        {part.item: part.description for part in of_neighbour} | described,
        received | own,
    )


def _in_order(tensors: Mapping[Item, Sequence[Tensor]]) -> Iterator[Tensor]:
    return (tensor for item in sorted(tensors) for tensor in tensors[item])


def newest_whole(
    kept: Mapping[int, Copies],
    needed: Sequence[Mapping[Item, ItemDescription]],
    node_size: int,
    hosts: dist.ProcessGroup | None,
) -> tuple[int, TransferPlan, TrainingSummary] | None:
    """The newest step of which the ranks' copies hold all that is needed, the plan that distributes it, and the
    progress then. Collective. `kept`: by step; `needed`: by rank."""
    steps = {step for of_rank in gather_values(list[int], list(kept), hosts) for step in of_rank}
    for step in sorted(steps, reverse=True):
        mine = list(kept[step].descriptions.items()) if step in kept else []
        held = [dict(items) for items in gather_values(list[tuple[Item, ItemDescription]], mine, hosts)]
        transfer = plan_transfer(held, needed, devices_per_node=node_size)
        summaries = gather_values(TrainingSummary | None, kept[step].summary if step in kept else None, hosts)
        if not transfer.missing:
            return step, transfer, next(summary for summary in summaries if summary is not None)
    return None
