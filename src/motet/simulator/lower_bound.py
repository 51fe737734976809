"""A time below which no schedule of a plan and its assignment can come.

The relaxation: each rank is looked at alone. Of the others it knows only that every action waits for what it reads (its
head: the longest way to it from the beginning) and is waited for (its tail: the longest way from it to the end), as if
they had processors without number and links that nothing occupies. Within that, the rank may interrupt its actions. The
best it can do then is to work, at every moment, at the action with the longest tail among those whose head has passed
(Jackson's preemptive schedule; Carlier 1982, "The one-machine sequencing problem"). That is never less than the longest
path through the rank, nor than its work plus its unavoidable fill and drain.

Limits: fixed are the plan, the assignment and the durations; memory is not looked at.
"""

import heapq
from math import inf
from typing import NamedTuple

import numpy as np

from motet.schedule.action import Kind
from motet.schedule.dependencies import KINDS, NOTHING, Dependencies
from motet.schedule.generators.action_tables import ActionTables
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
    """No schedule takes less. `split_backward`: not even one that splits backwards into their halves."""
    of_stage = _jobs(routes, costs, split_backward)
    held: list[list[int]] = [[] for _ in range(routes.plan.num_ranks)]
    for s, stage in enumerate(routes.stages):
        for rank in stage.planned.ranks:
            held[rank].append(s)
    # Ranks with the same stages have the same jobs.
    different = {tuple(stages) for stages in held}
    return max(preemptive_time_s([job for s in stages for job in of_stage[s]]) for stages in different) + costs.fixed_s


def preemptive_time_s(jobs: list[Job]) -> float:
    """When one rank's jobs, tails included, end at best if it may interrupt them."""
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
    """What the ranks of each stage have to do for each forward and each whole backward: one job, or two if backwards
    may be split."""
    dependencies, num_cells = Dependencies(routes), routes.num_cells
    first_backward = KINDS.index(Kind.BACKWARD) * num_cells
    backwards = first_backward + np.flatnonzero(routes.cell_has_backward)
    in_order = np.concatenate([np.arange(num_cells), backwards[::-1]])
    tables, delay_s = ActionTables(dependencies, in_order, costs.compute_s), _delays_s(dependencies, costs)
    actions, (now, later) = in_order.tolist(), _durations_s(dependencies, tables, costs, split_backward)
    writer = [NOTHING] * len(delay_s)
    for action in actions:
        for value in tables.writes[action]:
            writer[value] = action
    heads, tails = [0.0] * len(now), [0.0] * len(now)
    for action in actions:
        before = [(writer[value], delay_s[value]) for value in tables.reads[action]]
        heads[action] = max((heads[other] + now[other] + delay for other, delay in before), default=0.0)
    jobs: list[list[Job]] = [[] for _ in routes.stages]
    reduce_s, cell_stage = _reduce_s(dependencies, costs), routes.cell_stage.tolist()
    has_weight_gradient = routes.cell_has_weight_gradient.tolist()
    for action in reversed(actions):
        cell = action % num_cells
        end_s = reduce_s[cell_stage[cell]] if action >= first_backward and has_weight_gradient[cell] else 0.0
        tails[action] = max(
            (
                delay_s[value] + now[after] + tails[after]
                for value in tables.writes[action]
                for after in tables.readers.get(value, ())
            ),
            default=0.0,
        )
        tails[action] = max(tails[action], later[action] + end_s)
        jobs[cell_stage[cell]].append(Job(heads[action], now[action], tails[action]))
        if later[action]:
            jobs[cell_stage[cell]].append(Job(heads[action] + now[action], later[action], end_s))
    return jobs


def _durations_s(
    dependencies: Dependencies, tables: ActionTables, costs: Costs, split_backward: bool
) -> tuple[list[float], list[float]]:
    """For each action, what others wait for, and what may be put off to the end."""
    now, later = np.array(tables.seconds), np.zeros(dependencies.num_actions)
    if split_backward:
        num_cells, cells = dependencies.routes.num_cells, np.flatnonzero(dependencies.routes.cell_has_backward)
        kinds = Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT
        whole, input_half, weight_half = (KINDS.index(kind) * num_cells + cells for kind in kinds)
        halves = seconds_of_actions(np.concatenate([input_half, weight_half]), dependencies, costs.compute_s)
        all_s = np.minimum(now[whole], halves[input_half] + halves[weight_half])
        now[whole] = np.minimum(now[whole], halves[input_half])
        later[whole] = all_s - now[whole]
    return now.tolist(), later.tolist()


def _delays_s(dependencies: Dependencies, costs: Costs) -> list[float]:
    """For each value, how long the slowest of the messages that carry it takes."""
    routes = dependencies.routes
    num_values = 2 * routes.num_routes + 3 * routes.num_cells
    if not isinstance(costs, ArrayCosts):
        return [
            max(map(costs.message_s, messages(dependencies.value(value), dependencies)), default=0.0)
            for value in range(num_values)
        ]
    result, sizes = np.zeros(num_values), costs.carried_sizes(dependencies)
    codes, pair = routes.stage_pairs
    for i, code in enumerate(codes.tolist()):
        source, target = (routes.stages[s] for s in divmod(code, len(routes.stages)))
        for gradient in (False, True):
            values = np.flatnonzero(pair == i) + gradient * routes.num_routes
            for sender, receiver in pairs_of_route(routes.plan, source, target, gradient=gradient):
                latency_s, bytes_per_s = costs.link(sender, receiver)
                result[values] = np.maximum(result[values], latency_s + sizes[values] / bytes_per_s)
    return result.tolist()


def _reduce_s(dependencies: Dependencies, costs: Costs) -> list[float]:
    """For each stage, the longest reduction that waits for its last backward."""
    number = {stage[:3]: s for s, stage in enumerate(dependencies.routes.stages)}
    longest = [0.0] * len(number)
    for reduce, holders in dependencies.reductions.items():
        seconds = costs.reduce_s(reduce)
        for holder in holders:
            s = number.get((holder.module, holder.replica, holder.stage))
            if s is not None:
                longest[s] = max(longest[s], seconds)
    return longest
