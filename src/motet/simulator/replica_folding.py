"""Pipelines that are alike are simulated once.

A pipeline here is what hangs together by routes and by shared ranks: replicas of modules that pass tokens on to each
other. Two are alike if they have the same stages on ranks that lie alike on the nodes, and microbatches of the same
layouts. Then all that they do happens at the same moments; they meet only in reductions, where each finds the others
just arrived. So one of them is given its microbatches, and the others none (a microbatch without samples has no
actions), and what is seen on its ranks holds for theirs.

Those that differ only in how their ranks lie on the nodes take different times, but their actions have the same order,
which is then found once (`copy_schedule`): orders go by what actions take, not messages.

Limits: the costs of a pipeline may depend on nothing else (`motet.costs` keeps to that); all ranks compute equally
fast. Schedules must not let one pipeline's order depend on another's; ours do not.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from motet.assignment.batch_assignment import BatchAssignment
from motet.plan import Plan
from motet.ragged_arrays import Ints
from motet.schedule.dependencies import NOTHING, Dependencies
from motet.schedule.schedule import Schedule
from motet.schedule.stage_graph import ReplicaKey, pipeline_numbers, pipelines


@dataclass(frozen=True, eq=False)
class Folding:
    """Which pipelines stand for which."""

    assignment: BatchAssignment
    """The batch's cut, without the microbatches of pipelines for which another one stands."""
    rank_of: Ints
    """For each rank, the one that stands for it: itself, or the one at its place in the pipeline that does."""
    replica_of: Mapping[ReplicaKey, ReplicaKey]
    """The same for replicas."""

    @cached_property
    def copies(self) -> Mapping[ReplicaKey, list[ReplicaKey]]:
        """For each replica that stands for itself, those it stands for, itself first."""
        result: dict[ReplicaKey, list[ReplicaKey]] = defaultdict(list)
        for key, stands_for_it in self.replica_of.items():
            result[stands_for_it].append(key)
        return result


def fold(
    plan: Plan, assignment: BatchAssignment, kinds: Sequence[int], node: Callable[[int], int] = lambda rank: 0
) -> Folding:
    """`kinds`: of the samples (`kinds_of_samples`). `node`: of a rank; what is on one node has other links than what is
    not."""
    rank_of = np.arange(plan.num_ranks)
    replica_of: dict[ReplicaKey, ReplicaKey] = {}
    first_alike: dict[Hashable, tuple[list[ReplicaKey], list[int]]] = {}
    for members in pipelines(plan, assignment):
        form, ranks = _form(plan, assignment, members, kinds, node)
        replicas, like_ranks = first_alike.setdefault(form, (members, ranks))
        rank_of[ranks] = like_ranks
        replica_of |= zip(members, replicas, strict=True)
    cut = {
        name: tuple(
            microbatches if replica_of[name, r] == (name, r) else ((),) * len(microbatches)
            for r, microbatches in enumerate(replicas)
        )
        for name, replicas in assignment.microbatches.items()
    }
    return Folding(BatchAssignment(cut), rank_of, replica_of)


def _form(
    plan: Plan,
    assignment: BatchAssignment,
    members: Sequence[ReplicaKey],
    kinds: Sequence[int],
    node: Callable[[int], int],
) -> tuple[Hashable, list[int]]:
    """What a pipeline is like, with ranks, nodes and samples numbered as they first occur in it; and its ranks."""
    ranks: dict[int, int] = {}
    nodes: dict[int, int] = {}
    sample_numbers: dict[int, int] = {}
    form: list[Hashable] = []
    for name, r in members:
        form.append(name)
        for stage in plan.modules[name].replicas[r].stages:
            group = tuple([ranks.setdefault(rank, len(ranks)) for rank in stage.ranks])
            form.append((stage.layers, stage.tp_size, stage.cp_size, group))
        for microbatch in assignment.microbatches[name][r]:
            form.append(tuple([(sample_numbers.setdefault(i, len(sample_numbers)), kinds[i]) for i in microbatch]))
    form.append(tuple([nodes.setdefault(node(rank), len(nodes)) for rank in ranks]))
    return tuple(form), list(ranks)


def copy_schedule(schedule: Schedule, source: Dependencies, target: Dependencies, folding: Folding) -> Schedule:
    """The schedule of `source` on every pipeline of `target` for which, by `folding`, one of `source` stands."""
    num_cells, first = source.routes.num_cells, {stage[:3]: stage.first for stage in source.routes.stages}
    number = pipeline_numbers(target.routes)
    cell_of: dict[int, Ints] = defaultdict(lambda: np.zeros(num_cells, dtype=np.int64))
    """For each pipeline of `target`, by the cell of `source` that its cell is like."""
    pipeline_of_rank: dict[int, int] = {}
    for stage in target.routes.stages:
        pipeline, like = number[stage.module, stage.replica], folding.replica_of[stage.module, stage.replica]
        begin = first[*like, stage.stage]
        cell_of[pipeline][begin : begin + stage.last - stage.first] = np.arange(stage.first, stage.last)
        pipeline_of_rank |= dict.fromkeys(stage.planned.ranks, pipeline)
    numbers, nothing = schedule.numbers(source), np.zeros(0, dtype=np.int64)
    copies: dict[tuple[int, int], Ints] = {}
    ranks = []
    for rank, like_rank in enumerate(folding.rank_of.tolist()):
        pipeline, actions = pipeline_of_rank.get(rank, NOTHING), numbers[like_rank]
        key = (pipeline, id(actions))
        if pipeline != NOTHING and key not in copies:
            kind, cell = np.divmod(actions, num_cells)
            copies[key] = kind * target.routes.num_cells + cell_of[pipeline][cell]
        ranks.append(copies.get(key, nothing))
    return Schedule.of_numbers(target, ranks)
