"""Process groups of a plan: tensor- and context-parallel groups of stages, groups that share parameters, and groups
that sum gradients.

Every rank creates every group, in the same order (a rule of torch.distributed). Each reduction has a group of its own:
its buckets start when the rank's own backward reaches them, so two reductions over the same ranks may start in
different orders on different ranks, and must not meet in one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import lcm

import torch.distributed as dist

from motet.errors import UserError
from motet.parallel.context_attention import ContextParallel
from motet.parallel.tensor_parallel import TensorParallel
from motet.plan import ContextOptions, ModulePlan, Plan, Stage, expert_groups, tensor_parallel_groups
from motet.schedule.action import Reduce
from motet.schedule.dependencies import Holder, reductions


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

    def tensor_parallel(self, module: ModulePlan, stage: Stage) -> TensorParallel:
        """Returns the tensor-parallel group of one of this rank's stages, and that of its experts, seen from here."""
        experts = None
        if module.ep > 1:
            experts = self._member(next(ranks for ranks in expert_groups(module, stage.layers) if self.rank in ranks))
        ranks = next(ranks for ranks in tensor_parallel_groups(stage) if self.rank in ranks)
        return replace(self._member(ranks), sequence_parallel=module.sequence_parallel, experts=experts)

    def _member(self, ranks: tuple[int, ...]) -> TensorParallel:
        return TensorParallel(group=self.stage_groups[ranks], rank=_places(ranks).index(self.rank), size=len(ranks))

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


def context_parallel_groups(stage: Stage) -> list[tuple[int, ...]]:
    """Returns the context-parallel groups of a stage, one for each position in the tensor-parallel groups."""
    return list(zip(*(_places(ranks) for ranks in tensor_parallel_groups(stage)), strict=True))


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
    dist.barrier()  # The groups' own timeout is a step's; a rank may come later than that from reading its data.
    stage_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    shared = [
        ranks
        for *_, stage in plan.stages()
        for ranks in [*tensor_parallel_groups(stage), *(context_parallel_groups(stage) if stage.cp_size > 1 else [])]
    ]
    for module in plan.modules.values():
        if module.shares_over_replicas:
            for r in range(0, len(module.replicas), module.sharded_replicas):
                for s in range(len(module.replicas[r].stages)):
                    shared += module.sharing_groups(r, s)
        if module.ep > 1:
            shared += [ranks for stage in module.replicas[0].stages for ranks in expert_groups(module, stage.layers)]
    for ranks in dict.fromkeys(shared):
        group = _new_group(ranks, timeout)
        if rank in ranks:
            stage_groups[ranks] = group
    reduce: dict[Reduce, ReduceGroups] = {}
    has_mixed_tp_sizes = False
    for reduction, holders in reductions(plan).items():
        for members in _members_by_share(plan, holders):
            _check_members(reduction, members)
            sizes = tuple(sorted({len(places) for places in members}))
            made = [ReduceGroup(_new_group(ranks, timeout), ranks) for ranks in _piece_groups(members, lcm(*sizes))]
            firsts = None
            if len(sizes) > 1:
                has_mixed_tp_sizes = True
                ranks = tuple(sorted({places[0] for places in members}))
                firsts = ReduceGroup(_new_group(ranks, timeout), ranks)
            pieces = tuple(group for group in made if rank in group.ranks)
            if pieces:
                firsts = firsts if firsts is not None and rank in firsts.ranks else None
                reduce[reduction] = ReduceGroups(pieces, min(members), sizes, firsts=firsts)
        _add_expert_groups(plan, reduction, reduce, rank, timeout)
    return Mesh(rank, world_size, stage_groups, reduce, has_mixed_tp_sizes, timeout)


def _add_expert_groups(
    plan: Plan, reduction: Reduce, reduce: dict[Reduce, ReduceGroups], rank: int, timeout: timedelta
) -> None:
    """Notes the group that sums this rank's experts of these layers, where replicas share the experts."""
    module = plan.modules[reduction.module]
    if module.replicas_sharing_experts == 1 or reduction.tied:
        return
    stage = next(s for s in module.replicas[0].stages if s.layers[0] <= reduction.first < s.layers[1])
    sharing = [tuple(_places(ranks)) for ranks in expert_groups(module, stage.layers)]
    for same in zip(*sharing, strict=True):
        group = _new_group(tuple(sorted(same)), timeout)
        if rank in same:
            experts = ReduceGroup(group, tuple(sorted(same)))
            reduce[reduction] = replace(reduce[reduction], experts=experts, first_experts=min(sharing))


def _places(ranks: tuple[int, ...]) -> list[int]:
    """Returns the ranks in the order in which torch.distributed numbers the members of a group."""
    return sorted(ranks)


def _new_group(ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup | None:
    return dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None


def _members_by_share(plan: Plan, holders: tuple[Holder, ...]) -> list[list[tuple[int, ...]]]:
    """Returns, for each share of the parameters, the tensor-parallel groups that hold it of a run of layers, in all
    replicas and for all members of context-parallel groups, each of which has the gradients of its own tokens.

    There is one share unless replicas share parameters."""
    result: dict[int, list[tuple[int, ...]]] = {}
    for holder in holders:
        module = plan.modules[holder.module]
        stage = module.replicas[holder.replica].stages[holder.stage]
        for ranks in tensor_parallel_groups(stage):
            places = _places(ranks)
            share = 0
            if module.shares_over_replicas:
                groups = module.sharing_groups(holder.replica, holder.stage)
                shares = {group.index(rank) for group, rank in zip(groups, places, strict=True)}
                if len(shares) > 1:
                    raise UserError(
                        f"plan: modules.{holder.module}.sharded_replicas: the ranks of its tensor-parallel groups "
                        "alternate; number those of a replica one after the other"
                    )
                share = shares.pop()
            result.setdefault(share, []).append(tuple(places))
    return list(result.values())


def _piece_groups(members: Sequence[tuple[int, ...]], num_pieces: int) -> list[tuple[int, ...]]:
    """Returns the ranks that hold each piece."""
    return [
        tuple(sorted({places[piece * len(places) // num_pieces] for places in members})) for piece in range(num_pieces)
    ]


def _check_members(reduction: Reduce, members: Sequence[tuple[int, ...]]) -> None:
    """Checks that a rank that holds the layers several times has the same shard each time."""
    place_of: dict[int, tuple[int, int]] = {}
    for places in members:
        for place, rank in enumerate(places):
            if place_of.setdefault(rank, (place, len(places))) != (place, len(places)):
                raise UserError(
                    f"plan: rank {rank} has different positions in the groups that hold layers {reduction.first}.."
                    f"{reduction.last - 1} of {reduction.module}; give groups with all ranks in common, or none"
                )
