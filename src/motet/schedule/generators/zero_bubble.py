"""ZB-H1 and ZB-H2 over a DAG of modules (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2 and figure 3).

Forwards and input halves stand as in 1F1B and the weight halves fill bubbles (`fill_weights`). A stage with
d stages between it and the sink begins with d forwards in H1, as in 1F1B, and with 2 d in H2. What a rank may hold is
what its replica's first stage holds: P microbatches in H1, as many as 1F1B's first rank does, and 2 P - 1 in H2.

With F, I and W on P equal stages, H1 leaves a rank a bubble of at most (P - 1)(F + I - W) between its first and its
last action, if W <= F; 1F1B leaves (P - 1)(F + I + W). H2 leaves nothing where F = I = W. An iteration of H2 is then
*not* shorter than one of H1: its last rank begins (P - 1) F later than the first. It pays where I takes longer than W,
where modules run beside each other, or where iterations overlap; the latter needs the paper's optimizer step that waits
for no other rank, and motet's waits for the norm of all gradients.

Over modules that cut the batch differently, ranks that stages share, or where that would not fit into memory, another
schedule's order is split: bubble filling's (interleaved 1F1B's or the list scheduler's, where that one does not apply),
in H2 without shared ranks the list scheduler's with about twice as many microbatches in flight. A rank then holds no
more microbatches than that of its pipeline which holds most there, as in H1 above, and in H2 over shared ranks twice as
many: last stages hold few in that order, and can now put weight halves off to the end, while first stages wait for the
input halves.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from motet.ragged_arrays import Ints
from motet.schedule.action import Durations
from motet.schedule.dependencies import NOTHING, Dependencies
from motet.schedule.generators.bubble_filling import bubble_filling
from motet.schedule.generators.fill_weights import Group, fill_weights, is_within
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.generators.turns import backward_turns, forward_turns, num_microbatches, one_group
from motet.schedule.routes import Routes, StageCells
from motet.schedule.schedule import Schedule
from motet.schedule.stage_graph import (
    StageKey,
    cuts_alike,
    distances_to_sink,
    groups_in_v,
    microbatches_in_flight,
    pipeline_numbers,
    shares_ranks,
    stages_after,
)


def zero_bubble_h1(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs`: where weight halves fit; by default a half takes as long as a forward."""
    return _zero_bubble(routes, costs, memory, forwards_per_stage=1)


def zero_bubble_h2(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs`: where weight halves fit; by default a half takes as long as a forward."""
    return _zero_bubble(routes, costs, memory, forwards_per_stage=2)


def _zero_bubble(
    routes: Routes, costs: Durations | None, memory: MemoryLimit | None, *, forwards_per_stage: int
) -> Schedule:
    if not shares_ranks(routes) and cuts_alike(routes):
        schedule = _closed_form(routes, costs, memory, forwards_per_stage)
        if memory is None or is_within(schedule, routes, memory):
            return schedule
    if forwards_per_stage == 1 or shares_ranks(routes):
        return split(routes, bubble_filling(routes, costs, memory=memory), costs, memory, times=forwards_per_stage)
    in_flight = {stage: forwards_per_stage * (n - 1) + 1 for stage, n in microbatches_in_flight(routes).items()}
    return split(routes, list_schedule(routes, costs, in_flight=in_flight, memory=memory), costs, memory)


def _closed_form(
    routes: Routes, costs: Durations | None, memory: MemoryLimit | None, forwards_per_stage: int
) -> Schedule:
    distances = distances_to_sink(routes)
    of_replica: dict[tuple[str, int], int] = {}
    order: dict[Group, Ints] = {}
    may_hold: dict[Group, int] = {}
    for stage in routes.stages:
        num_warm_up = forwards_per_stage * distances[StageKey(*stage[:3])]
        # Stages come in topological order: a replica's first one, which holds most, before the others.
        replica = stage.module, stage.replica
        of_replica[replica] = max(of_replica.get(replica, 0), 1 + num_warm_up)
        order[stage.planned.ranks] = one_group(routes, [stage], num_warm_up)
        may_hold[stage.planned.ranks] = of_replica[replica]
    return fill_weights(routes, order, costs, may_hold=may_hold, memory=memory)


def split(
    routes: Routes, schedule: Schedule, costs: Durations | None, memory: MemoryLimit | None, *, times: int = 1
) -> Schedule:
    """Splits the backwards of a finished schedule and fills its gaps. A group then holds at most `times` as many
    microbatches as that of its pipeline which holds most in the schedule.

    Where groups have some ranks in common and not all, the schedule is returned as it is: they would have to agree."""
    numbers = schedule.numbers(Dependencies(routes))
    number_of_pipeline = pipeline_numbers(routes)
    order: dict[Group, Ints] = {}
    pipeline_of: dict[Group, int] = {}
    seen: set[int] = set()
    for module, replica, _, stage in routes.plan.stages():
        group = tuple(sorted(stage.ranks))
        if group in order:
            continue
        if not seen.isdisjoint(group):
            return schedule
        seen.update(group)
        order[group] = numbers[group[0]]
        pipeline_of[group] = number_of_pipeline[module, replica]
    most: Counter[int] = Counter()
    for group, peak in _peaks(order, routes).items():
        most[pipeline_of[group]] = max(peak, most[pipeline_of[group]])
    may_hold = {group: times * most[pipeline] for group, pipeline in pipeline_of.items()}
    return fill_weights(routes, order, costs, may_hold=may_hold, memory=memory)


def _peaks(order: Mapping[Group, Ints], routes: Routes) -> dict[Group, int]:
    """The most microbatches that each group has between forward and backward."""
    result = {}
    for group, numbers in order.items():
        kind, cell = np.divmod(numbers, routes.num_cells)
        changes = np.where(routes.cell_has_backward[cell], np.where(kind == 0, 1, -1), 0)
        result[group] = int(np.cumsum(changes).max(initial=0))
    return result


# ZBV over a DAG of modules (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3).
#
# A replica of 2 P stages stands on P groups of ranks in the shape of a V: stages k and 2 P - 1 - k on group k, so the
# first group holds the first stage and the last. The first backward then begins where the last forward ends, and all
# groups need their memory for equally long. At place p, forwards and input halves come in this order:
#
# 1. 2 (P - p) - 1 forwards of the first chunk;
# 2. p times a forward of the second chunk and one of the first, which reach the place in turn by then;
# 3. P - p times a forward and an I of the second chunk;
# 4. F and I of the first, F and I of the second chunk, as long as there are forwards;
# 5. p times I of the second and I of the first chunk in turn, then the P - p that are left of the first.
#
# Weight halves fill the remaining bubbles (`fill_weights`); a group may hold 2 P microbatches of one chunk, as many
# bytes as 1F1B's first group does with stages twice as large. With F = I = W no group then has a bubble between its
# first and its last action, from 2 P - 1 microbatches on. Below 2 P, missing microbatches are empty turns.
#
# Modules before it keep 1F1B's order. A replica on groups of its own is scheduled by ZB-H1; where neither holds, a
# module follows one in V shape, or that would not fit into memory, ZB-H1 takes over (and with it the list scheduler).


def zero_bubble_v(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs`: where weight halves fit; by default a half takes as long as a forward."""
    groups = groups_in_v(routes.plan)
    if groups is None or not cuts_alike(routes):
        return zero_bubble_h1(routes, costs, memory=memory)
    after = stages_after(routes)
    of_key = {StageKey(*stage[:3]): stage for stage in routes.stages}
    order: dict[Group, Ints] = {}
    may_hold: dict[Group, int] = {}
    in_flight: dict[StageKey, int] = {}
    for key, stage in reversed(of_key.items()):
        replica = groups[key.module, key.replica]
        num_places = len(replica)
        num_after = max((in_flight[target] for target in after[key]), default=0)
        if num_places == len(routes.plan.modules[key.module].replicas[key.replica].stages):
            in_flight[key] = 1 + num_after
            order[stage.planned.ranks] = one_group(routes, [stage], num_after)
            # Stages come from the last to the first, which holds most.
            may_hold |= dict.fromkeys(replica, in_flight[key])
            continue
        if key.stage == 2 * num_places - 1 and num_after:
            return zero_bubble_h1(routes, costs, memory=memory)
        in_flight[key] = 2 * num_places
        if key.stage < num_places:
            second = of_key[key._replace(stage=2 * num_places - 1 - key.stage)]
            order[stage.planned.ranks] = _one_group(routes, stage, second, key.stage, num_places)
            may_hold[stage.planned.ranks] = 2 * num_places
    schedule = fill_weights(routes, order, costs, may_hold=may_hold, memory=memory)
    if memory is None or is_within(schedule, routes, memory):
        return schedule
    return zero_bubble_h1(routes, costs, memory=memory)


def _one_group(routes: Routes, first: StageCells, second: StageCells, place: int, num_places: int) -> Ints:
    """Actions of a group, with whole backwards in place of their input halves."""
    num_turns = max(num_microbatches(routes, first), 2 * num_places)
    f0, f1 = (iter(forward_turns(routes, stage, num_turns).tolist()) for stage in (first, second))
    b0, b1 = (iter(backward_turns(routes, stage, num_turns).tolist()) for stage in (first, second))
    turns = [next(f0) for _ in range(2 * (num_places - place) - 1)]
    for _ in range(place):
        turns += [next(f1), next(f0)]
    for _ in range(num_places - place):
        turns += [next(f1), next(b1)]
    for _ in range(num_turns - num_places):
        turns += [next(f0, NOTHING), next(b0), next(f1), next(b1)]
    for _ in range(place):
        turns += [next(b0), next(b1)]
    turns += b0
    assert not any(map(list, (f0, f1, b1))), "a turn is left over"
    return np.array([turn for turn in turns if turn != NOTHING], dtype=np.int64)
