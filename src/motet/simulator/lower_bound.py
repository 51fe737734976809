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
from collections import defaultdict
from math import inf
from typing import NamedTuple

from motet.schedule.action import Compute, Kind
from motet.schedule.dependencies import Dependencies, Value
from motet.schedule.lower import messages
from motet.schedule.routes import Routes
from motet.schedule.stage_graph import StageKey, stage_of
from motet.simulator.costs import Costs


class Job(NamedTuple):
    """Seconds."""

    head: float
    duration: float
    tail: float


def lower_bound_s(routes: Routes, costs: Costs, *, split_backward: bool = False) -> float:
    """No schedule takes less. `split_backward`: not even one that splits backwards into their halves."""
    dependencies = Dependencies(routes)
    jobs: list[list[Job]] = [[] for _ in range(routes.plan.num_ranks)]
    for action, action_jobs in _jobs(dependencies, costs, split_backward).items():
        for rank in dependencies.ranks(action):
            jobs[rank] += action_jobs
    return max(map(preemptive_time_s, jobs)) + costs.fixed_s


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


def _jobs(dependencies: Dependencies, costs: Costs, split_backward: bool) -> dict[Compute, list[Job]]:
    """What the ranks of each forward and each whole backward have to do: one job, or two if backwards may be split."""
    actions = dependencies.required()
    writer = {value: action for action in actions for value in dependencies.writes(action)}
    delay_s = {value: max(map(costs.message_s, messages(value, dependencies)), default=0.0) for value in writer}
    readers: dict[Value, list[Compute]] = defaultdict(list)
    heads: dict[Compute, float] = {}
    durations = {action: _durations_s(action, costs, split_backward) for action in actions}
    for action in actions:
        heads[action] = 0.0
        for value in dependencies.reads(action):
            readers[value].append(action)
            before = writer[value]
            heads[action] = max(heads[action], heads[before] + durations[before][0] + delay_s[value])
    reduce_s = _reduce_s(dependencies, costs)
    tails: dict[Compute, float] = {}
    jobs: dict[Compute, list[Job]] = {}
    for action in reversed(actions):
        now, later = durations[action]
        end = 0.0
        if action.kind is Kind.BACKWARD and action.cell in dependencies.routes.with_weight_gradient:
            end = reduce_s[stage_of(action.cell)]
        tails[action] = later + end
        for value in dependencies.writes(action):
            for after in readers[value]:
                tails[action] = max(tails[action], delay_s[value] + durations[after][0] + tails[after])
        jobs[action] = [Job(heads[action], now, tails[action])]
        if later:
            jobs[action].append(Job(heads[action] + now, later, end))
    return jobs


def _durations_s(action: Compute, costs: Costs, split_backward: bool) -> tuple[float, float]:
    """What others wait for, and what may be put off to the end."""
    whole = costs.compute_s(action)
    if not split_backward or action.kind is not Kind.BACKWARD:
        return whole, 0.0
    input_half = costs.compute_s(Compute(Kind.INPUT, action.cell))
    halves = input_half + costs.compute_s(Compute(Kind.WEIGHT, action.cell))
    now = min(whole, input_half)
    return now, min(whole, halves) - now


def _reduce_s(dependencies: Dependencies, costs: Costs) -> dict[StageKey, float]:
    """The longest reduction that waits for each stage's last backward."""
    longest: dict[StageKey, float] = defaultdict(float)
    for reduce, holders in dependencies.reductions.items():
        for holder in holders:
            stage = StageKey(holder.module, holder.replica, holder.stage)
            longest[stage] = max(longest[stage], costs.reduce_s(reduce))
    return longest
