"""The graph of stages that an iteration's routes span, and what schedules derive from it.

A stage here is one replica's: (module, replica, stage). Stages that have nothing to do in the iteration are not in it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from motet.plan import Plan
from motet.schedule.routes import Cell, Routes


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
    """For each stage, the stages that its output goes to, with the (producer, consumer) cells between them."""
    result: dict[StageKey, dict[StageKey, list[tuple[Cell, Cell]]]] = {
        stage: defaultdict(list) for stage in cells_of_stages(routes)
    }
    for cell in routes.cells:
        for route in routes.outgoing[cell]:
            result[stage_of(cell)][stage_of(route.target)].append((route.source, route.target))
    return result


def stages_after(routes: Routes) -> dict[StageKey, set[StageKey]]:
    """For each stage, the stages that its output goes to; the stages in topological order."""
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


def shares_ranks(routes: Routes) -> bool:
    """Whether some rank holds two stages."""
    seen: set[int] = set()
    for *_, stage in routes.plan.stages():
        if not seen.isdisjoint(stage.ranks):
            return True
        seen.update(stage.ranks)
    return False


GroupsOfReplica = dict[tuple[str, int], list[tuple[int, ...]]]
"""For each (module, replica) its groups of ranks, each once, in the order of the stages."""


def groups_in_rounds(plan: Plan) -> GroupsOfReplica | None:
    """If each replica's stage s stands on group s mod P of its P groups, and no other replica there; else None."""
    return _groups_placed(plan, lambda s, num_groups: s % num_groups)


def groups_in_v(plan: Plan) -> GroupsOfReplica | None:
    """If each replica's stages stand on groups of their own, or the 2 P of them on group 0 .. P - 1, P - 1 .. 0."""
    groups = _groups_placed(plan, lambda s, num_groups: max(0, min(s, 2 * num_groups - 1 - s)))
    if groups is None:
        return None
    lengths = [(len(g), len(plan.modules[name].replicas[r].stages)) for (name, r), g in groups.items()]
    return groups if all(num_stages in (num_groups, 2 * num_groups) for num_groups, num_stages in lengths) else None


def _groups_placed(plan: Plan, place: Callable[[int, int], int]) -> GroupsOfReplica | None:
    """If each replica's stage s stands on group `place(s, number of groups)`, and no other replica there; else None."""
    result: GroupsOfReplica = {}
    seen: set[int] = set()
    for name, module in plan.modules.items():
        for r, replica in enumerate(module.replicas):
            groups = list(dict.fromkeys(stage.ranks for stage in replica.stages))
            for group in groups:
                if not seen.isdisjoint(group):
                    return None
                seen.update(group)
            if any(groups[place(s, len(groups))] != stage.ranks for s, stage in enumerate(replica.stages)):
                return None
            result[name, r] = groups
    return result


def cuts_alike(routes: Routes) -> bool:
    """Whether every microbatch hands its tokens on to microbatches of the same number only."""
    microbatch = routes.cell_microbatch
    return bool((microbatch[routes.route_source] == microbatch[routes.route_target]).all())


def due_microbatches(routes: Routes) -> dict[Cell, int]:
    """For each cell, the first microbatch of a last stage that waits for it: when in the iteration it is needed."""
    due: dict[Cell, int] = {}
    for cell in reversed(routes.cells):
        due[cell] = min((due[route.target] for route in routes.outgoing[cell]), default=cell.microbatch)
    return due


def microbatches_in_flight(routes: Routes) -> Mapping[StageKey, int]:
    """How many microbatches each stage must have begun and not finished to keep the stages after it busy.

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
