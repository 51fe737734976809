"""Process groups of a plan (`motet.schedule.communicators`), as one rank sees them.

Every rank creates every group, in the same order (a rule of torch.distributed).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from math import lcm

import torch.distributed as dist

from motet.devices import barrier
from motet.errors import UserError
from motet.parallel.context.context_attention import ContextParallel
from motet.parallel.tensor.tensor_parallel import TensorParallel
from motet.plan import ContextOptions, ModulePlan, Plan, Stage, expert_groups, places, tensor_parallel_groups
from motet.schedule.action import Reduce
from motet.schedule.communicators import (
    Link,
    communicators,
    context_parallel_groups,
    groups_sharing_experts,
    in_rounds,
)


@dataclass(frozen=True)
class ReduceGroup:
    """The ranks that sum one shard of a run of layers, or one piece of it."""

    group: dist.ProcessGroup | None
    """The process group; None: this rank alone."""
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ReduceGroups:
    """All groups of one reduction that this rank belongs to.

    Holders with different tp_size cut the layers into shards of different sizes: a rank's shard is then summed in
    several pieces, each by those who hold it."""

    pieces: tuple[ReduceGroup, ...]
    """The pieces of this rank's shard, in order; one if all holders have the same tp_size."""
    first: tuple[int, ...]
    """The first of the tensor-parallel groups that hold the layers."""
    tp_sizes: tuple[int, ...]
    """The different sizes of the holders' groups."""
    experts: ReduceGroup | None = None
    """The ranks that hold the same experts as this one, where replicas share the experts; None: as all parameters."""
    first_experts: tuple[int, ...] = ()
    """The first of the groups that share experts."""
    firsts: ReduceGroup | None = None
    """The first ranks of all tensor-parallel groups, if tp_sizes differ and this rank is one of them."""

    @property
    def all(self) -> tuple[ReduceGroup, ...]:
        return (*self.pieces, *(group for group in (self.experts, self.firsts) if group is not None))

    @property
    def common_size(self) -> int:
        """Number of pieces into which the layers are cut."""
        return lcm(*self.tp_sizes)


@dataclass(frozen=True)
class SharingGroup:
    """This rank's place among the ranks of several replicas that share a stage's parameters."""

    group: dist.ProcessGroup | None
    rank: int
    size: int


@dataclass(frozen=True)
class Mesh:
    """This rank's view of the plan's groups."""

    rank: int
    world_size: int
    stage_groups: dict[tuple[int, ...], dist.ProcessGroup | None]
    """Process groups of the tensor- and context-parallel groups that this rank belongs to, and of replicas that share
    parameters, by their ranks."""
    reduce: dict[Reduce, ReduceGroups]
    """The reductions that this rank takes part in."""
    has_mixed_tp_sizes: bool
    """Whether some layer is held by tensor-parallel groups of different sizes."""
    timeout: timedelta
    links: Mapping[Link, dist.ProcessGroup | None]
    """This rank's links, in the order in which they are opened, with their process groups; None: that of all ranks,
    whose transport pairs messages by tags."""

    def tensor_parallel(self, module: ModulePlan, stage: Stage) -> TensorParallel:
        """Returns the tensor-parallel group of one of this rank's stages, and that of its experts, seen from here."""
        experts = None
        if module.ep > 1:
            experts = self._member(next(ranks for ranks in expert_groups(module, stage.layers) if self.rank in ranks))
        ranks = next(ranks for ranks in tensor_parallel_groups(stage) if self.rank in ranks)
        return replace(self._member(ranks), sequence_parallel=module.sequence_parallel, experts=experts)

    def _member(self, ranks: tuple[int, ...]) -> TensorParallel:
        return TensorParallel(group=self.stage_groups[ranks], rank=places(ranks).index(self.rank), size=len(ranks))

    def context_parallel(self, stage: Stage, options: ContextOptions) -> ContextParallel:
        """Returns the context-parallel group of one of this rank's stages, seen from this rank."""
        ranks = next(ranks for ranks in context_parallel_groups(stage) if self.rank in ranks)
        return ContextParallel(
            group=self.stage_groups[ranks],
            rank=ranks.index(self.rank),
            size=stage.cp_size,
            options=options,
            tp_size=stage.tp_size,
        )

    def sharing(self, module: ModulePlan, replica: int, stage: int) -> SharingGroup:
        """This rank's place among those that share the stage's parameters over replicas."""
        ranks = next(ranks for ranks in module.sharing_groups(replica, stage) if self.rank in ranks)
        return SharingGroup(self.stage_groups[ranks], ranks.index(self.rank), len(ranks))


def check_world_size(plan: Plan, world_size: int) -> None:
    """Raises `UserError` unless there is a process for every rank."""
    if plan.num_ranks != world_size:
        raise UserError(
            f"parallel: the plan uses {plan.num_ranks} ranks, but {world_size} processes run; start {plan.num_ranks}"
        )


def build_mesh(plan: Plan, timeout: timedelta, *, num_spare_ranks: int = 0) -> Mesh:
    """Collective: every rank of the default group calls it with the same plan.

    `num_spare_ranks`: processes, after those of the plan, that have no part in it.

    Raises `UserError` if the world is not as large as the plan."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check_world_size(plan, world_size - num_spare_ranks)
    barrier()  # The groups' own timeout is a step's; a rank may come later than that from reading its data.
    planned = communicators(plan)
    stage_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for ranks in planned.stage_groups:
        group = _new_group(ranks, timeout)
        if rank in ranks:
            stage_groups[ranks] = group
    reduce: dict[Reduce, ReduceGroups] = {}
    has_mixed_tp_sizes = False
    for reduction, shares in planned.reductions.items():
        for share in shares:
            has_mixed_tp_sizes |= bool(share.firsts)
            made = [ReduceGroup(_new_group(ranks, timeout), ranks) for ranks in share.pieces]
            firsts = ReduceGroup(_new_group(share.firsts, timeout), share.firsts)
            pieces = tuple(group for group in made if rank in group.ranks)
            if pieces:
                reduce[reduction] = ReduceGroups(
                    pieces, min(share.members), share.tp_sizes, firsts=firsts if rank in share.firsts else None
                )
        for ranks in planned.experts.get(reduction, ()):
            group = _new_group(ranks, timeout)
            if rank in ranks:
                first = min(groups_sharing_experts(plan, reduction))
                reduce[reduction] = replace(reduce[reduction], experts=ReduceGroup(group, ranks), first_experts=first)
    links: dict[Link, dist.ProcessGroup | None] = {}
    is_shared = pairs_by_tag()
    for link in in_rounds(planned.links):
        group = None if is_shared else _new_group(tuple(sorted(link[:2])), timeout)
        if rank in link[:2]:
            links[link] = group
    return Mesh(rank, world_size, stage_groups, reduce, has_mixed_tp_sizes, timeout, links)


def pairs_by_tag() -> bool:
    """Whether the transport pairs sends with receives by their tags, as gloo does. Others (NCCL) pair those of one
    communicator in the order in which they were posted, and open a communicator when its first operation waits for all
    its members."""
    return dist.get_backend() == "gloo"


def _new_group(ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup | None:
    return dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
