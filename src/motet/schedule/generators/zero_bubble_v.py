"""ZBV over a DAG of modules (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3).

A replica of 2 P stages stands on P groups of ranks in the shape of a V: stage k and stage 2 P - 1 - k on group k, so
the first group holds the first stage and the last. The first backward then begins where the last forward ends, and all
groups need their memory for equally long. At place p, in the order in which forwards and input halves come:

1. 2 (P - p) - 1 forwards of the first chunk;
2. p times a forward of the second chunk and one of the first, which reach the place in turn by then;
3. P - p times a forward and an I of the second chunk;
4. F and I of the first, F and I of the second chunk, as long as there are forwards;
5. p times I of the second and I of the first chunk in turn, then the P - p that are left of the first.

The weight halves fill what would be idle (`fill_weights`), where a group may hold 2 P microbatches of one chunk: as
many bytes as 1F1B's first group does with stages twice as large. With F = I = W no group is then ever idle between its
first and its last action, from 2 P - 1 microbatches on. Up to 2 P, missing ones are empty turns.

Modules before it keep 1F1B's order. A replica that stands on groups of its own is scheduled as ZB-H1 does; where
neither holds, or a module comes after one in V shape, ZB-H1 takes over (and with it the list scheduler).
"""

import numpy as np

from motet.ragged_arrays import Ints
from motet.schedule.action import Durations
from motet.schedule.dependencies import NOTHING
from motet.schedule.generators.fill_weights import Group, fill_weights
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.generators.turns import backward_turns, forward_turns, num_microbatches, one_group
from motet.schedule.generators.zero_bubble import zero_bubble_h1
from motet.schedule.routes import Routes, StageCells
from motet.schedule.schedule import Schedule
from motet.schedule.stage_graph import StageKey, cuts_alike, groups_in_v, stages_after


def zero_bubble_v(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs`: where weight halves fit; by default a half takes as long as a forward."""
    groups = groups_in_v(routes.plan)
    if memory is not None or groups is None or not cuts_alike(routes):
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
    return fill_weights(routes, order, costs, may_hold=may_hold)


def _one_group(routes: Routes, first: StageCells, second: StageCells, place: int, num_places: int) -> Ints:
    """What a group executes, with whole backwards at the place of their input halves."""
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
