"""Lower bound of the iteration time over all schedules of a plan and its assignment.

The relaxation considers each rank alone. Each of its actions has a head (the longest path to it from the beginning) and
a tail (the longest path from it to the end), as if all other ranks had unlimited processors and free links. The rank
may interrupt its actions. The optimum then is to work, at every moment, on the action with the longest tail among those
whose head has passed (Jackson's preemptive schedule; Carlier 1982, "The one-machine sequencing problem"). The bound is
at least the longest path through the rank, and at least its work plus its unavoidable fill and drain.

Limits: the plan, the assignment and the durations are fixed; memory is ignored.
"""

import heapq
from math import inf
from typing import NamedTuple

import numpy as np

from motet.ragged_arrays import Floats, Ints, rows_of
from motet.schedule.action import Kind
from motet.schedule.dependencies import KINDS, NOTHING, Dependencies
from motet.schedule.lower import messages, pairs_of_route
from motet.schedule.order import seconds_of_actions
from motet.schedule.routes import Routes
from motet.simulator.costs import ArrayCosts, Costs


class Job(NamedTuple):
    """Seconds."""

    head: float
    duration: float
    tail: float


def lower_bound_s(routes: Routes, costs: Costs, *, split_backward: bool = False) -> float:
    """Lower bound in seconds. `split_backward`: it also holds for schedules that split backwards into halves."""
    of_stage = _jobs(routes, costs, split_backward)
    held: list[list[int]] = [[] for _ in range(routes.plan.num_ranks)]
    for s, stage in enumerate(routes.stages):
        for rank in stage.planned.ranks:
            held[rank].append(s)
    # Ranks with the same stages have the same jobs.
    different = {tuple(stages) for stages in held}
    return max(preemptive_time_s([job for s in stages for job in of_stage[s]]) for stages in different) + costs.fixed_s


def preemptive_time_s(jobs: list[Job]) -> float:
    """Minimal end of one rank's jobs, tails included, if it may interrupt them."""
    waiting = sorted(jobs, reverse=True)  # By head, the earliest last.
    available: list[tuple[float, float]] = []  # (-tail, seconds left)
    now = result = 0.0
    while waiting or available:
        if not available:
            now = max(now, waiting[-1].head)
        while waiting and waiting[-1].head <= now:
            job = waiting.pop()
            heapq.heappush(available, (-job.tail, job.duration))
        minus_tail, left = heapq.heappop(available)
        pause = waiting[-1].head if waiting else inf
        if now + left <= pause:
            now += left
            result = max(result, now - minus_tail)
        else:
            heapq.heappush(available, (minus_tail, left - (pause - now)))
            now = pause
    return result


def _jobs(routes: Routes, costs: Costs, split_backward: bool) -> list[list[Job]]:
    """The jobs of each stage's ranks: one for each forward and backward, or two for a backward that may be split."""
    dependencies, num_cells = Dependencies(routes), routes.num_cells
    backward_cells = np.flatnonzero(routes.cell_has_backward)
    backwards = KINDS.index(Kind.BACKWARD) * num_cells + backward_cells
    present = np.concatenate([np.arange(num_cells), backwards])
    now, later = _durations_s(dependencies, present, costs, split_backward)
    end_s = np.zeros(len(now))
    reduced = routes.cell_has_weight_gradient[backward_cells]
    end_s[backwards] = np.where(reduced, _reduce_s(dependencies, costs)[routes.cell_stage[backward_cells]], 0.0)
    heads, tails = np.zeros(len(now)), later + end_s
    # Actions of one level do not wait for each other, so their paths are found together.
    level = _levels(routes)
    waits = _waits(dependencies, present, _delays_s(dependencies, costs))
    assert (level[waits.before] < level[waits.after]).all(), "what is read is of a lower level"
    for source, target, delay_s in _by_level(waits, level[waits.after]):
        np.maximum.at(heads, target, heads[source] + now[source] + delay_s)
    for source, target, delay_s in reversed(_by_level(waits, level[waits.before])):
        np.maximum.at(tails, source, delay_s + now[target] + tails[target])
    put_off = present[later[present] > 0]
    jobs = np.concatenate(
        [
            np.stack([heads[present], now[present], tails[present]], axis=1),
            np.stack([heads[put_off] + now[put_off], later[put_off], end_s[put_off]], axis=1),
        ]
    )
    of_stage = rows_of(routes.cell_stage[np.concatenate([present, put_off]) % max(1, num_cells)], len(routes.stages))
    return [list(map(Job._make, jobs[of_stage[s]].tolist())) for s in range(len(routes.stages))]


def _levels(routes: Routes) -> Ints:
    """A level for each action that is higher than those of all actions it waits for."""
    depth = [0] * len(routes.stages)
    codes, _ = routes.stage_pairs
    for code in codes.tolist():  # Ascending, and stages come in topological order.
        source, target = divmod(code, len(routes.stages))
        depth[target] = max(depth[target], depth[source] + 1)
    forward = np.array(depth, dtype=np.int64)[routes.cell_stage]
    return np.concatenate([forward, *[2 * len(routes.stages) - forward] * (len(KINDS) - 1)])


class _Waits(NamedTuple):
    """Pairs of actions of which one waits for the other, and the least delay between them."""

    before: Ints
    after: Ints
    delay_s: Floats


def _waits(dependencies: Dependencies, present: Ints, delay_s: Floats) -> _Waits:
    reads, writes = dependencies.carried_reads.selected(present), dependencies.carried_writes.selected(present)
    kept_read, kept_write = dependencies.kept_read[present], dependencies.kept_write[present]
    writer = np.full(len(delay_s), NOTHING)
    writer[writes.values] = np.repeat(present, writes.lengths)
    writer[kept_write[kept_write != NOTHING]] = present[kept_write != NOTHING]
    values = np.concatenate([reads.values, kept_read[kept_read != NOTHING]])
    readers = np.concatenate([np.repeat(present, reads.lengths), present[kept_read != NOTHING]])
    return _Waits(writer[values], readers, delay_s[values])


def _by_level(waits: _Waits, level: Ints) -> list[_Waits]:
    """Waits by level, the lowest first. `level`: of each wait."""
    of_level = rows_of(level, int(level.max(initial=-1)) + 1)
    rows = [of_level[i] for i in np.unique(level).tolist()]
    return [_Waits(waits.before[row], waits.after[row], waits.delay_s[row]) for row in rows]


def _durations_s(
    dependencies: Dependencies, present: Ints, costs: Costs, split_backward: bool
) -> tuple[Floats, Floats]:
    """For each action, the time that others wait for, and the time that may be deferred to the end."""
    now, later = np.zeros(dependencies.num_actions), np.zeros(dependencies.num_actions)
    now[present] = seconds_of_actions(present, dependencies, costs.compute_s)[present]
    if split_backward:
        num_cells, cells = dependencies.routes.num_cells, np.flatnonzero(dependencies.routes.cell_has_backward)
        kinds = Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT
        whole, input_half, weight_half = (KINDS.index(kind) * num_cells + cells for kind in kinds)
        halves = seconds_of_actions(np.concatenate([input_half, weight_half]), dependencies, costs.compute_s)
        all_s = np.minimum(now[whole], halves[input_half] + halves[weight_half])
        now[whole] = np.minimum(now[whole], halves[input_half])
        later[whole] = all_s - now[whole]
    return now, later


def _delays_s(dependencies: Dependencies, costs: Costs) -> Floats:
    """Duration of the slowest message that carries each value."""
    routes = dependencies.routes
    num_values = 2 * routes.num_routes + 3 * routes.num_cells
    if not isinstance(costs, ArrayCosts):
        return np.array(
            [
                max(map(costs.message_s, messages(dependencies.value(value), dependencies)), default=0.0)
                for value in range(num_values)
            ]
        )
    result, sizes = np.zeros(num_values), costs.carried_sizes(dependencies)
    codes, pair = routes.stage_pairs
    for i, code in enumerate(codes.tolist()):
        source, target = (routes.stages[s] for s in divmod(code, len(routes.stages)))
        for gradient in (False, True):
            values = np.flatnonzero(pair == i) + gradient * routes.num_routes
            for sender, receiver in pairs_of_route(routes.plan, source, target, gradient=gradient):
                latency_s, bytes_per_s = costs.link(sender, receiver)
                result[values] = np.maximum(result[values], latency_s + sizes[values] / bytes_per_s)
    return result


def _reduce_s(dependencies: Dependencies, costs: Costs) -> Floats:
    """The longest reduction that waits for each stage's last backward."""
    number = {stage[:3]: s for s, stage in enumerate(dependencies.routes.stages)}
    longest = [0.0] * len(number)
    for reduce, holders in dependencies.reductions.items():
        seconds = costs.reduce_s(reduce)
        for holder in holders:
            s = number.get((holder.module, holder.replica, holder.stage))
            if s is not None:
                longest[s] = max(longest[s], seconds)
    return np.array(longest)
