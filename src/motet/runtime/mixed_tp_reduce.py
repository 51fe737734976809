"""Sums gradients over holders whose tensor-parallel groups differ in size.

A parameter that every such group cuts evenly, along one dimension, is summed in the pieces of all cuts together: each
piece by those who hold it, in buckets, within the backward, as others are. What is whole somewhere where it is cut
elsewhere, or has gradients that first need a sum inside its group (norms), is put together inside each group after the
backward, summed over the groups' first ranks, and handed back; so all holders get the same bits.
(Thesis, section 2.6.1, sums layer by layer among holders; its holders had one size of group.)

Limits: ZeRO-1 does not shard the state of such layers. Parameters of the second kind travel whole, after the backward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from motet.parallel.mesh import Mesh, ReduceGroup, ReduceGroups
from motet.parallel.tensor_collectives import TensorParallel, gather_full, shard_parameter
from motet.parallel.tensor_plans import Shard, local_ranges
from motet.runtime.gradient_reduction import Copies, Part, Portion
from motet.schedule.action import Reduce

Key = tuple[Reduce, str]
"""A reduction, and a parameter's name in the whole model."""


@dataclass(frozen=True)
class HeldParameter:
    """How one rank holds a parameter."""

    shard: Shard | None
    tp_size: int
    shape: tuple[int, ...]
    """Of the whole."""
    is_partial: bool
    """Its gradient is a share, to be summed inside the group."""


def evenly_cut(mine: Mapping[Key, HeldParameter], mesh: Mesh) -> dict[Key, Shard]:
    """Collective: the parameters that all groups with several ranks cut alike, and how."""
    everyone: list[Mapping[Key, HeldParameter] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    held: dict[Key, list[HeldParameter]] = {}
    for of_rank in everyone:
        for key, parameter in (of_rank or {}).items():
            held.setdefault(key, []).append(parameter)
    result = {}
    for key, holders in held.items():
        shards = {holder.shard for holder in holders if holder.tp_size > 1}
        shard = shards.pop() if len(shards) == 1 else None
        groups = mesh.reduce.get(key[0])
        if groups is None or shard is None or any(holder.is_partial for holder in holders):
            continue
        unit, rest = divmod(holders[0].shape[shard.dim], sum(shard.sections))
        if rest == 0 and all(section * unit % groups.common_size == 0 for section in shard.sections):
            result[key] = shard
    return result


def portions(groups: ReduceGroups, parameters: Sequence[Copies], shards: Sequence[Shard]) -> list[Portion]:
    """Of parameters that are evenly cut: which part of this rank's own is summed in which group."""
    number = len(groups.pieces)
    return [
        Portion(
            group,
            [
                Part(shard.dim, tuple(local_ranges(copies[0].shape[shard.dim], shard, piece, number)))
                for copies, shard in zip(parameters, shards, strict=True)
            ],
        )
        for piece, group in enumerate(groups.pieces)
    ]


@dataclass(frozen=True)
class WholeSum:
    """The parameters of one reduction that are summed whole, on this rank."""

    firsts: ReduceGroup | None
    tp: TensorParallel
    parameters: Sequence[tuple[Copies, Shard | None]]

    @torch.no_grad()
    def run(self) -> None:
        """Collective over all holders; after the sums inside tensor-parallel groups."""
        if not self.parameters:
            return
        wholes = [gather_full(_summed(copies), shard, self.tp) for copies, shard in self.parameters]
        flat = torch.cat([whole.reshape(-1) for whole in wholes])
        if self.firsts is not None and self.firsts.group is not None:
            dist.all_reduce(flat, group=self.firsts.group)
        if self.tp.size > 1:
            dist.broadcast(flat, group_src=0, group=self.tp.group)
        totals = flat.split([whole.numel() for whole in wholes])
        for (copies, shard), whole, total in zip(self.parameters, wholes, totals, strict=True):
            mine = shard_parameter(total.view_as(whole), shard, self.tp.rank, self.tp.size)
            for parameter in copies:
                parameter.grad = mine.clone()


def _summed(copies: Copies) -> Tensor:
    gradients = [parameter.grad for parameter in copies if parameter.grad is not None]
    return torch.stack(gradients).sum(0) if gradients else torch.zeros_like(copies[0])
