"""Folding of equal pipelines, so that each is simulated once.

A pipeline here is a set of replicas that routes or shared ranks connect. Two pipelines are equal if they have the same
stages on ranks with the same placement on the nodes, and microbatches of the same layouts. All their steps then happen
at the same times, and they meet only in reductions, which all of them reach together. One pipeline represents the
others: it keeps its microbatches while the others get empty ones, which have no actions.

Pipelines that differ only in the placement of their ranks take different times, but their actions have the same order,
because orders depend on the durations of actions, not of messages. The order is then found once (`copy_schedule`).

Limits: the costs of a pipeline must depend on nothing else (`motet.costs` guarantees it); all ranks compute equally
fast; the order of one pipeline must not depend on another pipeline (no generator of ours does).
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
    """A folding: the pipelines that represent others."""

    assignment: BatchAssignment
    """The assignment, with empty microbatches for represented pipelines."""
    rank_of: Ints
    """The representative of each rank: itself, or the rank at its place in the representing pipeline."""
    replica_of: Mapping[ReplicaKey, ReplicaKey]
    """The representative of each replica."""

    @cached_property
    def copies(self) -> Mapping[ReplicaKey, list[ReplicaKey]]:
        """For each representative, the replicas that it represents, itself first."""
        result: dict[ReplicaKey, list[ReplicaKey]] = defaultdict(list)
        for key, stands_for_it in self.replica_of.items():
            result[stands_for_it].append(key)
        return result


def fold(
    plan: Plan, assignment: BatchAssignment, kinds: Sequence[int], node: Callable[[int], int] = lambda rank: 0
) -> Folding:
    """Finds equal pipelines. `kinds`: of the samples (`kinds_of_samples`). `node`: the node of a rank."""
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
    """A pipeline's form, with ranks, nodes and samples numbered in order of occurrence, and its ranks."""
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
    """The schedule of `source`, copied to every pipeline of `target` that `folding` says it represents."""
    num_cells, first = source.routes.num_cells, {stage[:3]: stage.first for stage in source.routes.stages}
    number = pipeline_numbers(target.routes)
    cell_of: dict[int, Ints] = defaultdict(lambda: np.zeros(num_cells, dtype=np.int64))
    """For each pipeline of `target`: its cell, by the equal cell of `source`."""
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
