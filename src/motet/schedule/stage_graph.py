"""The graph of stages that an iteration's routes span, and what schedules derive from it.

A stage here is one replica's: (module, replica, stage). Stages that have nothing to do in the iteration are not in it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from motet.assignment.batch_assignment import BatchAssignment
from motet.plan import Plan
from motet.schedule.routes import Cell, Routes, StageCells, replicas_together


class StageKey(NamedTuple):
    module: str
    replica: int
    stage: int


def stage_of(cell: Cell) -> StageKey:
    return StageKey(cell.module, cell.replica, cell.stage)


def cells_of_stages(routes: Routes) -> dict[StageKey, list[Cell]]:
    """The cells of each stage by microbatch; the stages in topological order."""
    return {StageKey(*stage[:3]): list(routes.cells[stage.first : stage.last]) for stage in routes.stages}


def successors(routes: Routes) -> dict[StageKey, dict[StageKey, list[tuple[Cell, Cell]]]]:
    """Successors of each stage, with the (producer, consumer) cells between them."""
    result: dict[StageKey, dict[StageKey, list[tuple[Cell, Cell]]]] = {
        stage: defaultdict(list) for stage in cells_of_stages(routes)
    }
    for cell in routes.cells:
        for route in routes.outgoing[cell]:
            result[stage_of(cell)][stage_of(route.target)].append((route.source, route.target))
    return result


def stages_after(routes: Routes) -> dict[StageKey, set[StageKey]]:
    """Successors of each stage; the stages are in topological order."""
    keys = [StageKey(*stage[:3]) for stage in routes.stages]
    result: dict[StageKey, set[StageKey]] = {key: set() for key in keys}
    for code in routes.stage_pairs[0].tolist():
        source, target = divmod(code, len(keys))
        result[keys[source]].add(keys[target])
    return result


def distances_to_sink(routes: Routes) -> dict[StageKey, int]:
    """The largest number of stages after this one on a way to a stage that hands nothing on."""
    distances: dict[StageKey, int] = {}
    for stage, targets in reversed(stages_after(routes).items()):
        distances[stage] = max((1 + distances[target] for target in targets), default=0)
    return distances


Group = tuple[int, ...]
"""Ranks that execute the same stages together, in ascending order."""


def stages_of_groups(routes: Routes) -> dict[Group, list[StageCells]] | None:
    """The stages that each group holds, in topological order; None if groups have some ranks in common and not all."""
    result: dict[Group, list[StageCells]] = defaultdict(list)
    for stage in routes.stages:
        result[tuple(sorted(stage.planned.ranks))].append(stage)
    num_ranks = sum(map(len, result))
    return dict(result) if num_ranks == len({rank for group in result for rank in group}) else None


def group_distances_to_sink(
    routes: Routes, stages_of_group: Mapping[Group, Sequence[StageCells]]
) -> dict[Group, int] | None:
    """The largest number of other groups after this one on a way to one that hands nothing on.

    None if a way comes back to a group that it has left."""
    group_of = {StageKey(*stage[:3]): group for group, stages in stages_of_group.items() for stage in stages}
    after: dict[Group, set[Group]] = {group: set() for group in stages_of_group}
    for stage, targets in stages_after(routes).items():
        after[group_of[stage]] |= {group_of[target] for target in targets} - {group_of[stage]}
    distances: dict[Group, int] = {}
    try:
        for group in TopologicalSorter(after).static_order():
            distances[group] = max((1 + distances[target] for target in after[group]), default=0)
    except CycleError:
        return None
    return distances


def unread_beside_others(routes: Routes, stages_of_group: Mapping[Group, Sequence[StageCells]]) -> bool:
    """Whether a group that holds several stages has one that hands nothing on and computes no loss."""
    is_read = routes.cell_has_backward.copy()
    is_read[routes.route_source] = True
    return any(
        len(stages) > 1 and not is_read[stage.first : stage.last].any()
        for stages in stages_of_group.values()
        for stage in stages
    )


def shares_ranks(routes: Routes) -> bool:
    """Whether some rank holds two stages."""
    seen: set[int] = set()
    for *_, stage in routes.plan.stages():
        if not seen.isdisjoint(stage.ranks):
            return True
        seen.update(stage.ranks)
    return False


ReplicaKey = tuple[str, int]
"""Module and replica."""


def pipelines(plan: Plan, assignment: BatchAssignment) -> list[list[ReplicaKey]]:
    """The connected replicas, which send to each other, share ranks or share experts: each pipeline's in the order of
    the plan. What one pipeline does, no other one waits for until gradients are reduced."""
    keys = [(name, r) for name, module in plan.modules.items() for r in range(len(module.replicas))]
    parent = {key: key for key in keys}

    def root(key: ReplicaKey) -> ReplicaKey:
        while parent[key] != key:
            parent[key] = key = parent[parent[key]]
        return key

    for name, module in plan.modules.items():
        for together in replicas_together(module):
            for r in together[1:]:
                parent[root((name, r))] = root((name, together[0]))
    on_ranks: dict[tuple[int, ...], ReplicaKey] = {}
    on_rank: dict[int, ReplicaKey] = {}
    for name, r, _, stage in plan.stages():
        key, of_group = (name, r), on_ranks.get(stage.ranks)
        if of_group is not None:
            if of_group != key:
                parent[root(key)] = root(of_group)
            continue
        on_ranks[stage.ranks] = key
        for rank in stage.ranks:
            other = on_rank.setdefault(rank, key)
            if other != key:
                parent[root(key)] = root(other)
    for edge in plan.edges:
        producer = {
            i: (edge.source, r)
            for r, microbatches in enumerate(assignment.microbatches[edge.source])
            for microbatch in microbatches
            for i in microbatch
        }
        for r, microbatches in enumerate(assignment.microbatches[edge.target]):
            for source in {producer[i] for microbatch in microbatches for i in microbatch if i in producer}:
                parent[root((edge.target, r))] = root(source)
    groups: dict[ReplicaKey, list[ReplicaKey]] = defaultdict(list)
    for key in keys:
        groups[root(key)].append(key)
    return list(groups.values())


def pipeline_numbers(routes: Routes) -> dict[ReplicaKey, int]:
    """The number of the pipeline that each replica belongs to."""
    return {key: i for i, members in enumerate(pipelines(routes.plan, routes.assignment)) for key in members}


def most_actions(routes: Routes) -> int:
    """Forwards and whole backwards of the pipeline that has most."""
    number = pipeline_numbers(routes)
    counts: dict[int, int] = Counter()
    for stage in routes.stages:
        num_backwards = int(routes.cell_has_backward[stage.first : stage.last].sum())
        counts[number[stage.module, stage.replica]] += stage.last - stage.first + num_backwards
    return max(counts.values(), default=0)


def shares_ranks_with_encoders(plan: Plan) -> bool:
    """Whether a module that is no encoder has a rank in common with one."""
    ranks: dict[bool, set[int]] = {True: set(), False: set()}
    for name, _, _, stage in plan.stages():
        ranks[plan.modules[name].kind == "encoder"].update(stage.ranks)
    return not ranks[True].isdisjoint(ranks[False])


GroupsOfReplica = dict[tuple[str, int], list[tuple[int, ...]]]
"""Groups of ranks of each (module, replica), each once, in the order of the stages."""


def groups_in_rounds(plan: Plan, modules: Set[str]) -> GroupsOfReplica | None:
    """The groups, if each replica's stage s stands on group s mod P of its P groups, and no other replica of these
    modules; else None."""
    return _groups_placed(plan, modules, lambda s, num_groups: s % num_groups)


def groups_in_v(plan: Plan) -> GroupsOfReplica | None:
    """The groups, if each replica's stages stand on groups of their own, or its 2 P stages on groups 0 .. P - 1, P - 1
    .. 0."""
    groups = _groups_placed(plan, plan.modules.keys(), lambda s, num_groups: max(0, min(s, 2 * num_groups - 1 - s)))
    if groups is None:
        return None
    lengths = [(len(g), len(plan.modules[name].replicas[r].stages)) for (name, r), g in groups.items()]
    return groups if all(num_stages in (num_groups, 2 * num_groups) for num_groups, num_stages in lengths) else None


def _groups_placed(plan: Plan, modules: Set[str], place: Callable[[int, int], int]) -> GroupsOfReplica | None:
    """The groups, if each replica's stage s stands on group `place(s, number of groups)` alone; else None."""
    result: GroupsOfReplica = {}
    seen: set[int] = set()
    for name in modules:
        for r, replica in enumerate(plan.modules[name].replicas):
            groups = list(dict.fromkeys(stage.ranks for stage in replica.stages))
            for group in groups:
                if not seen.isdisjoint(group):
                    return None
                seen.update(group)
            if any(groups[place(s, len(groups))] != stage.ranks for s, stage in enumerate(replica.stages)):
                return None
            result[name, r] = groups
    return result


def cuts_alike(routes: Routes, modules: Set[str] | None = None) -> bool:
    """Whether every microbatch hands its tokens on to microbatches of the same number only.

    `modules`: only what they hand to each other counts; None: all."""
    microbatch, source, target = routes.cell_microbatch, routes.route_source, routes.route_target
    differs = microbatch[source] != microbatch[target]
    if modules is not None:
        counts = np.array([stage.module in modules for stage in routes.stages], dtype=bool)[routes.cell_stage]
        differs &= counts[source] & counts[target]
    return not differs.any()


def due_by_cell(routes: Routes, *, latest: bool = False) -> list[int]:
    """First microbatch of a last stage that waits for each cell: the time in the iteration at which it is needed.

    `latest`: the last such microbatch: when in the iteration all of its gradients have come."""
    choose = max if latest else min
    due: list[int] = routes.cell_microbatch.tolist()
    targets = routes.route_target.tolist()
    for cell, out in reversed(list(enumerate(routes.routes_out.to_lists()))):
        if out:
            due[cell] = choose(due[targets[route]] for route in out)
    return due


def due_microbatches(routes: Routes) -> dict[Cell, int]:
    """The same by `Cell`."""
    return dict(zip(routes.cells, due_by_cell(routes), strict=True))


def microbatches_in_flight(routes: Routes) -> Mapping[StageKey, int]:
    """Number of microbatches in flight with which each stage keeps the stages after it busy.

    Where all modules cut the batch alike, this is 1F1B's: one more than the distance to the sink (or all there are).
    Otherwise it is what a consumer's microbatches in flight need at most, counted in the producer's and added up over
    the replicas that it feeds, and what the consumer's next one needs beside.
    """
    due = due_microbatches(routes)
    cells = cells_of_stages(routes)
    place = {
        cell: i
        for stage in cells.values()
        for i, cell in enumerate(sorted(stage, key=lambda cell: (due[cell], cell.microbatch)))
    }
    result: dict[StageKey, int] = {}
    for stage, targets in reversed(successors(routes).items()):
        per_replica: dict[tuple[str, int], int] = {}
        for_the_next = 1
        for target, pairs in targets.items():
            first: dict[Cell, int] = {}
            last: dict[Cell, int] = {}
            for source, consumer in pairs:
                first[source] = min(first.get(source, place[consumer]), place[consumer])
                last[source] = max(last.get(source, place[consumer]), place[consumer])
            for_the_next = max(for_the_next, *Counter(first.values()).values())
            replica = (target.module, target.replica)
            needed = _most_at_once(list(first.values()), list(last.values()), result[target])
            per_replica[replica] = max(per_replica.get(replica, 0), needed)
        per_module: dict[str, int] = defaultdict(int)
        for (module, _), needed in per_replica.items():
            per_module[module] += needed
        result[stage] = for_the_next + max(per_module.values()) if per_module else 1
    return result


def _most_at_once(first: Sequence[int], last: Sequence[int], window: int) -> int:
    """The largest number of intervals [first, last] that `window` consecutive places meet."""
    # By the window's first place: an interval counts from where the window reaches it to its own last place.
    changes = sorted([*((begin - window + 1, 1) for begin in first), *((end + 1, -1) for end in last)])
    return max(accumulate(change for _, change in changes))
