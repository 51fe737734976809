"""List scheduling: valid for any plan and assignment, where the closed forms do not hold.

Ranks that several stages share, modules that cut the batch differently, unequal numbers of replicas and replicas that
do not look alike have no closed form. Here a virtual clock runs, and whenever the ranks of a stage are free the most
urgent action that is ready begins. "Forward first under a limit": a forward precedes a backward as long as its stage
has fewer microbatches in flight than it needs, and its ranks hold fewer bytes than they may. On a chain of stages this
*is* 1F1B; backward first is not.

Valid by construction: an action begins only when all that it reads is written, so the order in which actions begin is
a witness. Limits cannot deadlock it either: when nothing of a pipeline (replicas that hang together) runs, all of its
ranks are free and every ready backward would have begun, so if work is left, some forward is ready and held back by a
limit alone; the most urgent one is let through. So no pipeline's order depends on another's.

With a `Policy`, urgencies are numbers instead: the longest time from an action's start to the end of the iteration goes
first (the critical path), with weights for earlier microbatches and for backwards. Backwards may then be split into
halves: input halves stand where backwards do, and weight halves, for which nothing waits, run where nothing else can,
or where an input half would exceed the memory.

Limits: greedy, hence not optimal.

Cells, actions and stages are numbers here (`motet.schedule.dependencies`), as are urgencies: an action's place when all
are sorted by what `_set_urgencies` states. *Units* are ranks that hold the same stages: they do all things together.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from motet.ragged_arrays import Ints
from motet.schedule.action import Durations, Kind, unit_duration
from motet.schedule.dependencies import KINDS, NOTHING, Dependencies
from motet.schedule.order import seconds_of_actions
from motet.schedule.routes import Cell, Routes
from motet.schedule.schedule import Schedule
from motet.schedule.stage_graph import StageKey, due_by_cell, pipeline_numbers

# Values and durations of actions as plain lists, for the clocks that generators run.


class ActionTables:
    def __init__(self, dependencies: Dependencies, present: Ints, duration_s: Durations) -> None:
        """`present`: the numbers of the schedule's actions."""
        seconds = np.zeros(dependencies.num_actions)
        seconds[present] = seconds_of_actions(present, dependencies, duration_s)[present]
        self.present: list[int] = present.tolist()
        self.seconds: list[float] = seconds.tolist()
        """0 for actions that are not present."""
        self.reads = _with_kept(dependencies.carried_reads.to_lists(), dependencies.kept_read)
        """Numbers of the values, by action."""
        self.writes = _with_kept(dependencies.carried_writes.to_lists(), dependencies.kept_write)
        readers: dict[int, list[int]] = {}
        for action in self.present:
            for value in self.reads[action]:
                readers.setdefault(value, []).append(action)
        self.readers = [[reader for value in values for reader in readers.get(value, ())] for values in self.writes]
        """By action, the actions of the schedule that read what it writes, once for each value."""


def _with_kept(carried: list[list[int]], kept: Ints) -> list[list[int]]:
    return [row if value == NOTHING else [*row, value] for row, value in zip(carried, kept.tolist(), strict=True)]


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the bytes that forwards have saved and backwards have not yet freed."""

    saved_bytes: Callable[[Cell], int]
    """Bytes that each rank of the cell's stage keeps between forward and backward."""
    limit_bytes: Callable[[int], int]
    """Limit in bytes, by rank."""
    half_saved_bytes: Callable[[Cell], int] | None = None
    """Bytes kept between the halves of the backward (with recomputation more than before it). None: the same."""


class Policy(NamedTuple):
    """Weights of an action's urgency, as shares of its pipeline's longest path."""

    earlier: float
    """For the first of all microbatches compared with the last."""
    backward: float
    """For backwards and input halves compared with forwards."""


def list_schedule(
    routes: Routes,
    costs: Durations | None = None,
    *,
    in_flight: Mapping[StageKey, int] | None = None,
    memory: MemoryLimit | None = None,
    all_forwards_first: bool = False,
) -> Schedule:
    """Orders the actions of an iteration by simulating them.

    `in_flight`: how many microbatches a stage may have begun and not finished; None: any number. A microbatch that has
    no backward is finished when its output is consumed. `all_forwards_first`: no backward before the last forward.
    """
    ranks = Ranks(routes)
    clock = ListClock(routes, ranks, costs or unit_duration, memory, splits=False)
    return ranks.schedule(routes, clock.run(in_flight=in_flight, all_forwards_first=all_forwards_first))


def _first(queue: list[int]) -> int:
    return queue[0]


class Ranks:
    """Ranks of each stage of the routes, as units that compute together."""

    def __init__(self, routes: Routes) -> None:
        held: list[list[int]] = [[] for _ in range(routes.plan.num_ranks)]
        for s, stage in enumerate(routes.stages):
            for rank in stage.planned.ranks:
                held[rank].append(s)
        unit_of = {stages: unit for unit, stages in enumerate(dict.fromkeys(map(tuple, held)))}
        self.stages_of_unit = list(unit_of)
        self.unit_of_rank = [unit_of[tuple(stages)] for stages in held]
        self.units = [
            tuple(dict.fromkeys(self.unit_of_rank[rank] for rank in stage.planned.ranks)) for stage in routes.stages
        ]
        """Of each stage."""

    def schedule(self, routes: Routes, lists: Sequence[Sequence[int]]) -> Schedule:
        """`lists`: the actions of each unit."""
        arrays = [np.array(actions, dtype=np.int64) for actions in lists]
        return Schedule.of_numbers(Dependencies(routes), [arrays[unit] for unit in self.unit_of_rank])


class ListClock:
    """A clock that runs any number of times."""

    def __init__(
        self, routes: Routes, ranks: Ranks, duration_s: Durations, memory: MemoryLimit | None, *, splits: bool
    ) -> None:
        """`splits`: backwards into halves; the clock then needs a `policy` or an order."""
        self.num_cells = routes.num_cells
        self.stages = [StageKey(*stage[:3]) for stage in routes.stages]
        self.stages_of_unit, self.units = ranks.stages_of_unit, ranks.units
        self.cell_stage: list[int] = routes.cell_stage.tolist()
        self.stage_of_action = self.cell_stage * len(KINDS)
        self.has_backward: list[bool] = routes.cell_has_backward.tolist()
        self.first_backward = KINDS.index(Kind.BACKWARD) * routes.num_cells
        self.actions = self._in_order(routes, splits)
        """Actions in topological order."""
        self.tables = ActionTables(Dependencies(routes), self.actions, duration_s)
        self.queue_of_action = self._queues()
        self.num_missing = [len(values) for values in self.tables.reads]
        """Values that each action reads."""
        self.num_readers: list[int] = routes.routes_out.lengths.tolist()
        """Of each cell's output."""
        self.finished_by = self._finished_by(routes)
        number = pipeline_numbers(routes)
        self.pipeline = [number[stage.module, stage.replica] for stage in routes.stages]
        self.num_pipelines = 1 + max(number.values())
        self.num_forwards = [stage.last - stage.first for stage in routes.stages]
        self.num_saved = [int(routes.cell_has_backward[stage.first : stage.last].sum()) for stage in routes.stages]
        """Cells of each stage whose activations are saved."""
        self.due = np.array(due_by_cell(routes), dtype=np.int64)
        self.remaining_s = self._remaining_s()
        self._set_memory(routes, ranks, memory)

    def _queues(self) -> list[int]:
        """By action, the number of the queue that it waits in: each stage has one for forwards, one for backwards, and
        one for actions that fill bubbles."""
        queues = [NOTHING] * len(self.tables.seconds)
        for action in self.tables.present:
            place = 0 if action < self.num_cells else 2 if self.fills(action) else 1
            queues[action] = place * len(self.stages) + self.stage_of_action[action]
        return queues

    def _finished_by(self, routes: Routes) -> list[list[int]]:
        """By forward, the cells without a backward whose output it reads, which its end may finish; its own cell too if
        that has no backward and nobody reads its output."""
        source = routes.route_source.tolist()
        finished = []
        for cell, entering in enumerate(routes.routes_in.to_lists()):
            own = [] if self.has_backward[cell] or self.num_readers[cell] else [cell]
            finished.append([*own, *(source[route] for route in entering if not self.has_backward[source[route]])])
        return finished

    def _in_order(self, routes: Routes, splits: bool) -> Ints:
        cells = np.flatnonzero(routes.cell_has_backward)[::-1]
        has_both = routes.cell_has_input_gradient & routes.cell_has_weight_gradient & splits
        self.is_split: list[bool] = has_both.tolist()
        self.is_deferred: list[bool] = (splits & ~routes.cell_has_input_gradient).tolist()
        """By cell: whether nothing waits for its whole backward."""
        number = {kind: place * routes.num_cells for place, kind in enumerate(KINDS)}
        self.first_input, self.first_weight = number[Kind.INPUT], number[Kind.WEIGHT]
        backwards = np.where(has_both[cells], number[Kind.INPUT], number[Kind.BACKWARD]) + cells
        return np.concatenate([np.arange(routes.num_cells), backwards, self.first_weight + cells[has_both[cells]]])

    def _set_urgencies_by(self, policy: Policy) -> None:
        remaining_s = np.array(self.remaining_s)[self.actions]
        cells, is_forward = self.actions % self.num_cells, self.actions < self.num_cells
        pipeline = np.array(self.pipeline)[np.array(self.cell_stage)[cells]]
        longest_s, last = np.zeros(self.num_pipelines), np.ones(self.num_pipelines)
        np.maximum.at(longest_s, pipeline, remaining_s)
        np.maximum.at(last, pipeline, self.due[cells])
        urgent = remaining_s / np.maximum(longest_s[pipeline], np.finfo(float).tiny)
        urgent += policy.backward * ~is_forward - policy.earlier * self.due[cells] / last[pipeline]
        self._number_urgencies(self.actions[np.lexsort((self.due[cells], -urgent))])

    def _set_urgencies(self) -> None:
        """Smaller goes first: forwards that someone waits for, backwards, forwards that nobody waits for; then the
        first microbatch of a last stage that waits for the cell; then the longest time from the action's start to the
        end of the iteration."""
        is_forward = self.actions < self.num_cells
        cells = self.actions % self.num_cells
        waited_for = np.array(self.has_backward, dtype=bool) | (np.array(self.num_readers) > 0)
        turn = np.where(is_forward, np.where(waited_for[cells], 0, 2), 1)
        keys = (-np.array(self.remaining_s)[self.actions], self.due[cells], turn)
        self._number_urgencies(self.actions[np.lexsort(keys)])

    def _remaining_s(self) -> list[float]:
        """The longest time from each action's start to the end of the iteration."""
        tables, remaining_s = self.tables, [0.0] * len(self.tables.seconds)
        for action in reversed(self.actions.tolist()):
            after = max([remaining_s[reader] for reader in tables.readers[action]], default=0.0)
            remaining_s[action] = after + tables.seconds[action]
        return remaining_s

    def _number_urgencies(self, most_urgent_first: Ints) -> None:
        self.action_of: list[int] = most_urgent_first.tolist()
        """By urgency."""
        self.urgency = [NOTHING] * len(self.tables.seconds)
        for urgency, action in enumerate(self.action_of):
            self.urgency[action] = urgency

    def _set_memory(self, routes: Routes, ranks: Ranks, memory: MemoryLimit | None) -> None:
        self.sizes, self.half_sizes = [0] * routes.num_cells, [0] * routes.num_cells
        """Bytes that cells keep until their backward, and between its halves."""
        self.limit_bytes = [inf] * len(self.stages_of_unit)
        if memory is not None:
            half = memory.half_saved_bytes or memory.saved_bytes
            for number, cell in enumerate(routes.cells):
                self.sizes[number] = memory.saved_bytes(cell) if self.has_backward[number] else 0
                self.half_sizes[number] = half(cell) if self.is_split[number] else 0
            for rank, unit in enumerate(ranks.unit_of_rank):
                self.limit_bytes[unit] = min(self.limit_bytes[unit], memory.limit_bytes(rank))
        grown = [half_size - size for half_size, size in zip(self.half_sizes, self.sizes, strict=True)]
        grown_most = [max(0, *grown[stage.first : stage.last]) for stage in routes.stages]
        # An input half may leave more than it finds.
        self.limit_of_forwards = [
            limit - max((grown_most[s] for s in own), default=0)
            for limit, own in zip(self.limit_bytes, self.stages_of_unit, strict=True)
        ]
        self.largest = [max(self.sizes[stage.first : stage.last], default=0) for stage in routes.stages]
        """Bytes of each stage's largest microbatch."""

    def run(
        self,
        policy: Policy | None = None,
        *,
        most_urgent_first: Ints | None = None,
        in_flight: Mapping[StageKey, int] | None = None,
        all_forwards_first: bool = False,
    ) -> list[list[int]]:
        """Runs a policy, or all actions `most_urgent_first`, and returns the actions of each unit. The other
        arguments are those of `list_schedule`."""
        if most_urgent_first is not None:
            self._number_urgencies(most_urgent_first)
        elif policy is None:
            self._set_urgencies()
        else:
            self._set_urgencies_by(policy)
        self._begin(in_flight or {})
        self.all_forwards_first = all_forwards_first
        for action in self.actions.tolist():
            if not self.missing[action]:
                heapq.heappush(self.queues[self.queue_of_action[action]], self.urgency[action])
        now, idle, touched = 0.0, set(range(len(self.busy))), set(self.pipeline)
        while True:
            for unit in sorted(idle):
                if not self.busy[unit]:
                    self._dispatch(now, unit)
            stalled = {pipeline for pipeline in touched if not self.num_running[pipeline]}
            if stalled:
                self._let_one_through_each(now, stalled)
            if not self.running:
                break
            now = self.running[0][0]
            idle, touched = set(), set()
            while self.running and self.running[0][0] == now:
                action = heapq.heappop(self.running)[2]
                pipeline = self.pipeline[self.stage_of_action[action]]
                self._finish(action, idle)
                self.num_running[pipeline] -= 1
                self.ended_s[pipeline] = self.ends_s[action] = now
                touched.add(pipeline)
        assert self.num_started == len(self.actions), "work is left, but nothing is ready"
        return self.lists

    def _begin(self, in_flight: Mapping[StageKey, int]) -> None:
        num_stages, num_units = len(self.stages), len(self.stages_of_unit)
        self.limit = [in_flight.get(stage, inf) for stage in self.stages]
        self.queues: list[list[int]] = [[] for _ in range(3 * num_stages)]
        """Heaps of urgencies (`queue_of_action`)."""
        self.stages_on = [
            [self._queues_of(stage, unit) for stage in own] for unit, own in enumerate(self.stages_of_unit)
        ]
        """By unit."""
        self.missing = list(self.num_missing)
        self.readers_left = [max(1, number) for number in self.num_readers]
        self.begun = [0] * num_stages
        self.busy = [False] * num_units
        self.forwards_left = [sum(self.num_forwards[s] for s in own) for own in self.stages_of_unit]
        self.lists: list[list[int]] = [[] for _ in range(num_units)]
        self.running: list[tuple[float, int, int]] = []
        self.num_started = 0
        self.num_running = [0] * self.num_pipelines
        """Actions of each pipeline."""
        self.ended_s = [0.0] * self.num_pipelines
        """End of each pipeline's last action."""
        self.ends_s = [0.0] * len(self.tables.seconds)
        """End of each action."""
        self.bytes_held = [0] * num_units
        self.holding = [0] * num_stages
        """Microbatches of each stage that are saved for the backward."""
        self.to_save = list(self.num_saved)
        """Cells of each stage whose activations are not saved yet."""
        self.waits = [number > 0 for number in self.num_saved]
        """By stage: whether it holds no microbatch, and is to hold some."""
        self.kept_free = [sum(self.largest[s] for s in own if self.waits[s]) for own in self.stages_of_unit]
        """Room of each unit for one microbatch of each stage that waits, lest it wait for what waits for it."""

    def _queues_of(self, stage: int, unit: int) -> "_StageOnUnit":
        forwards, backwards, weights = self.queues[stage :: len(self.stages)]
        return _StageOnUnit(stage, forwards, backwards, weights, [u for u in self.units[stage] if u != unit])

    def fills(self, action: int) -> bool:
        """Whether an action runs where nothing else can, as nothing waits for it."""
        if action < self.num_cells:
            return False
        return action >= self.first_weight or (
            action < self.first_input and self.is_deferred[action - self.first_backward]
        )

    def _dispatch(self, now: float, unit: int) -> None:
        """Starts the most urgent action that may start on an idle unit, if there is one."""
        best, queue = len(self.action_of), None
        for stage, forwards, backwards, _, others in self.stages_on[unit]:
            if not (forwards or backwards) or (others and self._is_any_busy(others)):
                continue
            if backwards and backwards[0] < best and not (self.all_forwards_first and self._has_forwards_left(stage)):
                best, queue = backwards[0], backwards
            if forwards and forwards[0] < best and self._is_within_limits(stage, self.action_of[forwards[0]]):
                best, queue = forwards[0], forwards
        if queue is None or self._exceeds(unit, self.action_of[best]):
            best = len(self.action_of)
            for _, _, _, weights, others in self.stages_on[unit]:
                if weights and weights[0] < best and not (others and self._is_any_busy(others)):
                    best, queue = weights[0], weights
        if queue is not None:
            self._start(now, queue)

    def _is_any_busy(self, units: Sequence[int]) -> bool:
        return any(self.busy[unit] for unit in units)

    def _exceeds(self, unit: int, action: int) -> bool:
        """Whether an input half leaves more behind than there is room for."""
        if not self.first_input <= action < self.first_weight:
            return False
        cell = action - self.first_input
        return self.bytes_held[unit] + self.half_sizes[cell] - self.sizes[cell] > self.limit_bytes[unit]

    def _has_forwards_left(self, stage: int) -> bool:
        return any(self.forwards_left[unit] for unit in self.units[stage])

    def _is_within_limits(self, stage: int, cell: int) -> bool:
        if self.begun[stage] >= self.limit[stage]:
            return False
        if not self.has_backward[cell]:
            return True
        # The stage need not wait for itself.
        more = self.sizes[cell] - self.largest[stage] if self.waits[stage] else self.sizes[cell]
        for unit in self.units[stage]:
            if self.bytes_held[unit] + more + self.kept_free[unit] > self.limit_of_forwards[unit]:
                return False
        return True

    def _let_one_through_each(self, now: float, stalled: Set[int]) -> None:
        """Starts, in spite of the limits, the most urgent forward of each of these pipelines that has one."""
        most_urgent: dict[int, list[int]] = {}
        for pipeline, forwards in zip(self.pipeline, self.queues[: len(self.stages)], strict=True):
            if forwards and pipeline in stalled:
                most_urgent[pipeline] = min(forwards, most_urgent.get(pipeline, forwards), key=_first)
        for forwards in most_urgent.values():
            self._start(now, forwards)

    def _start(self, now: float, queue: list[int]) -> None:
        """Starts the first action of a queue."""
        action = self.action_of[heapq.heappop(queue)]
        stage = self.stage_of_action[action]
        for unit in self.units[stage]:
            self.busy[unit] = True
            self.lists[unit].append(action)
        if action < self.num_cells:
            self.begun[stage] += 1
            if self.has_backward[action]:
                self.to_save[stage] -= 1
                self._hold(stage, 1, self.sizes[action])
        self.num_started += 1
        self.num_running[self.pipeline[stage]] += 1
        heapq.heappush(self.running, (now + self.tables.seconds[action], self.num_started, action))

    def _hold(self, stage: int, number: int, size: int) -> None:
        """Counts microbatches that are saved, or with negative numbers freed."""
        self.holding[stage] += number
        waits = not self.holding[stage] and self.to_save[stage] > 0
        more_free = (waits - self.waits[stage]) * self.largest[stage]
        self.waits[stage] = waits
        for unit in self.units[stage]:
            self.bytes_held[unit] += size
            self.kept_free[unit] += more_free

    def _finish(self, action: int, idle: set[int]) -> None:
        """Frees the action's ranks and passes on what it wrote; adds the units that may have something to start."""
        stage, missing = self.stage_of_action[action], self.missing
        units = self.units[stage]
        idle.update(units)
        for unit in units:
            self.busy[unit] = False
        for reader in self.tables.readers[action]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(self.queues[self.queue_of_action[reader]], self.urgency[reader])
                idle.update(self.units[self.stage_of_action[reader]])
        if action < self.num_cells:
            for unit in units:
                self.forwards_left[unit] -= 1
            for cell in self.finished_by[action]:
                self.readers_left[cell] -= 1
                if not self.readers_left[cell]:
                    self.begun[self.cell_stage[cell]] -= 1
                    idle.update(self.units[self.cell_stage[cell]])
        elif self.first_input <= action < self.first_weight:
            cell = action - self.first_input
            for unit in units:
                self.bytes_held[unit] += self.half_sizes[cell] - self.sizes[cell]
        else:
            cell = action % self.num_cells
            self.begun[stage] -= 1
            self._hold(stage, -1, -self.half_sizes[cell] if self.is_split[cell] else -self.sizes[cell])


class _StageOnUnit(NamedTuple):
    """A stage and its queues, as its units see it."""

    stage: int
    forwards: list[int]
    backwards: list[int]
    weights: list[int]
    others: list[int]
    """The stage's other units."""
