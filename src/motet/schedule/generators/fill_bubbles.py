"""A virtual clock that puts other modules' actions into the gaps of an order that is given for some.

The given order (of the language model) stays as it is on each group of ranks; the *filling* actions (of encoders on the
same ranks) have none. When ranks are free

1. a filling forward begins that is urgent: fewer than `lookahead` microbatches ahead of what its consumer has begun;
2. else the next action of the given order, if it is ready;
3. else any filling action that is ready, forwards before backwards, what is needed first before the rest. If it is
   known when the given order can go on, only one that does not end much later (`lateness`).

Nothing deadlocks: the given order waits for filling forwards only, these wait for no more than their own producers, and
when nothing of a pipeline (replicas that hang together) runs, every action of it that is ready may begin.
"""

import heapq
from collections.abc import Sequence, Set
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np

from motet.ragged_arrays import Ints
from motet.schedule.action import Durations, Kind
from motet.schedule.dependencies import KINDS, NOTHING, Dependencies
from motet.schedule.generators.list_schedule import ActionTables, MemoryLimit
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule
from motet.schedule.stage_graph import pipeline_numbers


class Policy(NamedTuple):
    lookahead: int
    """Number of microbatches by which filling forwards run ahead of the given order."""
    lateness: float = 0.5
    """Share of its own duration by which an action that fills a gap may outlast the gap."""


class Needs(NamedTuple):
    """The (stage, microbatch) of the given order that each filling cell serves."""

    stage: list[int]
    """`NOTHING` if no action in the given order waits for it."""
    rank: list[int]
    """The place of the microbatch among that stage's."""


class BubblesToFill:
    """The problem without the policy, by numbers: units are ranks that hold the same stages."""

    def __init__(
        self,
        dependencies: Dependencies,
        given: Sequence[tuple[tuple[int, ...], Ints]],
        duration_s: Durations,
        memory: MemoryLimit | None,
    ) -> None:
        """`given`: each group's order; all actions that are not in it are filling."""
        self.dependencies, routes = dependencies, dependencies.routes
        self.num_cells = routes.num_cells
        self.cell_stage: list[int] = routes.cell_stage.tolist()
        stages_of_rank: list[list[int]] = [[] for _ in range(routes.plan.num_ranks)]
        for s, stage in enumerate(routes.stages):
            for rank in stage.planned.ranks:
                stages_of_rank[rank].append(s)
        unit_of = {held: unit for unit, held in enumerate(dict.fromkeys(map(tuple, stages_of_rank)))}
        self.unit_of_rank = [unit_of[tuple(held)] for held in stages_of_rank]
        self.units = [sorted({self.unit_of_rank[rank] for rank in s.planned.ranks}) for s in routes.stages]
        """Of each stage."""
        self.given = [numbers.tolist() for _, numbers in given]
        self.group_of_unit = [NOTHING] * len(unit_of)
        self.given_units = [sorted({self.unit_of_rank[rank] for rank in ranks}) for ranks, _ in given]
        for group, units in enumerate(self.given_units):
            for unit in units:
                self.group_of_unit[unit] = group
        self.is_given = np.zeros(len(routes.stages), dtype=bool)
        for _, numbers in given:
            self.is_given[routes.cell_stage[numbers % routes.num_cells]] = True
        fillings = {tuple(units): None for units, given in zip(self.units, self.is_given, strict=True) if not given}
        self.lanes = list(fillings)
        """The units of filling stages that stand on the same ones: what is ready of them waits in one queue."""
        lane_of = {units: lane for lane, units in enumerate(self.lanes)}
        self.lane_of_stage = [
            NOTHING if given else lane_of[tuple(units)] for units, given in zip(self.units, self.is_given, strict=True)
        ]
        self.lanes_of_unit: list[list[int]] = [[] for _ in unit_of]
        for lane, together in enumerate(self.lanes):
            for unit in together:
                self.lanes_of_unit[unit].append(lane)
        self.groups_of_lane = [sorted({self.group_of_unit[unit] for unit in units} - {NOTHING}) for units in self.lanes]
        backwards = KINDS.index(Kind.BACKWARD) * routes.num_cells + np.flatnonzero(routes.cell_has_backward)
        self.tables = ActionTables(dependencies, np.concatenate([np.arange(routes.num_cells), backwards]), duration_s)
        self.seconds_left = [
            list(accumulate(self.tables.seconds[action] for action in reversed(order)))[::-1] for order in self.given
        ]
        """Remaining time from each position of each given order."""
        number = pipeline_numbers(routes)
        self.pipeline_of_stage = [number[stage.module, stage.replica] for stage in routes.stages]
        self.needs = _needs(routes, self.is_given)
        self.sizes, self.room = self._memory(memory, given)

    def _memory(
        self, memory: MemoryLimit | None, given: Sequence[tuple[tuple[int, ...], Ints]]
    ) -> tuple[list[int], list[float]]:
        """Bytes that each filling cell keeps for its backward, and that each unit has left beside the given order."""
        routes = self.dependencies.routes
        if memory is None:
            return [0] * routes.num_cells, [inf] * len(self.lanes_of_unit)
        sizes = np.array([memory.saved_bytes(cell) for cell in routes.cells], dtype=np.int64) * routes.cell_has_backward
        peak = [0] * len(given)
        for group, (_, numbers) in enumerate(given):
            kind, cell = np.divmod(numbers, routes.num_cells)
            peak[group] = int(np.cumsum(np.where(kind == 0, sizes[cell], -sizes[cell])).max(initial=0))
        room = [inf] * len(self.lanes_of_unit)
        for rank, unit in enumerate(self.unit_of_rank):
            group = self.group_of_unit[unit]
            room[unit] = min(room[unit], memory.limit_bytes(rank) - (0 if group == NOTHING else peak[group]))
        return sizes.tolist(), room


def _needs(routes: Routes, is_given: np.ndarray) -> Needs:
    """A filling cell's need is the earliest of those that its output goes to, first by microbatch."""
    stage, rank = [NOTHING] * routes.num_cells, [routes.num_cells] * routes.num_cells
    for cell in range(routes.num_cells - 1, -1, -1):
        s = int(routes.cell_stage[cell])
        if is_given[s]:
            stage[cell], rank[cell] = s, cell - routes.stages[s].first
            continue
        for target in routes.route_target[routes.routes_out[cell]].tolist():
            if rank[target] < rank[cell]:
                stage[cell], rank[cell] = stage[target], rank[target]
    return Needs(stage, rank)


class FillingClock:
    def __init__(self, bubbles: BubblesToFill, policy: Policy) -> None:
        self.bubbles, self.policy, self.tables = bubbles, policy, bubbles.tables
        num_lanes, num_units = len(bubbles.lanes), len(bubbles.lanes_of_unit)
        self.position = [0] * len(bubbles.given)
        self.forwards: list[list[tuple[int, int]]] = [[] for _ in range(num_lanes)]
        """Ready actions by lane: (position of the waiting microbatch, action)."""
        self.backwards: list[list[tuple[int, int]]] = [[] for _ in range(num_lanes)]
        self.begun = [0] * len(bubbles.units)
        """Forwards of each stage."""
        self.missing = [len(values) for values in self.tables.reads]
        self.written_at: dict[int, float] = {}
        self.busy = [False] * num_units
        self.bytes_held = [0] * num_units
        self.lists: list[list[int]] = [[] for _ in range(num_units)]
        self.running: list[tuple[float, int, int]] = []
        self.num_started = 0
        self.earliest_end_s = 0.0
        """Time left of the given order, largest over the groups."""
        self.num_running = [0] * (1 + max(bubbles.pipeline_of_stage, default=0))
        """Actions of each pipeline."""

    def run(self, limit_s: float = inf) -> float:
        """The iteration's time in seconds; infinite as soon as it is seen to take `limit_s` or more."""
        for action in self.tables.present:
            if not self.missing[action]:
                self._push(action)
        now, touched, pipelines = 0.0, set(range(len(self.busy))), set(self.bubbles.pipeline_of_stage)
        while self.earliest_end_s < limit_s:
            self._dispatch(now, touched)
            stalled = {pipeline for pipeline in pipelines if not self.num_running[pipeline]}
            if stalled:
                self._let_one_through_each(now, stalled)
            if not self.running:
                break
            now = self.running[0][0]
            touched, pipelines = set(), set()
            while self.running and self.running[0][0] == now:
                action = heapq.heappop(self.running)[2]
                touched |= self._finish(action)
                pipelines.add(self._pipeline(action))
        if self.earliest_end_s >= limit_s:
            return inf
        assert self.num_started == len(self.tables.present), "work is left, but nothing is ready"
        return now

    def schedule(self) -> Schedule:
        lists = [np.array(actions, dtype=np.int64) for actions in self.lists]
        return Schedule.of_numbers(self.bubbles.dependencies, [lists[unit] for unit in self.bubbles.unit_of_rank])

    def _push(self, action: int) -> None:
        cell = action % self.bubbles.num_cells
        lane = self.bubbles.lane_of_stage[self.bubbles.cell_stage[cell]]
        if lane != NOTHING:
            queues = self.forwards if action < self.bubbles.num_cells else self.backwards
            heapq.heappush(queues[lane], (self.bubbles.needs.rank[cell], action))

    def _dispatch(self, now: float, touched: set[int]) -> None:
        """Starts what may begin on these units, the most urgent first."""
        bubbles, busy = self.bubbles, self.busy
        units = sorted([unit for unit in touched if not busy[unit]])
        lanes = sorted(
            {
                lane
                for unit in units
                for lane in bubbles.lanes_of_unit[unit]
                if self.forwards[lane] or self.backwards[lane]
            }
        )
        while lanes and (found := self._urgent(lanes)) is not None:
            self._start(now, found)
        for group in dict.fromkeys([bubbles.group_of_unit[unit] for unit in units]):
            if group != NOTHING:
                self._start_given(now, group)
        while lanes and (found := self._filling(now, lanes)) is not None:
            self._start(now, found)

    def _start_given(self, now: float, group: int) -> None:
        """Starts the next action of the group's given order, if it is ready and its ranks are free."""
        head = self._head(group)
        if head is None or self.missing[head]:
            return
        for unit in self.bubbles.given_units[group]:
            if self.busy[unit]:
                return
        left_s = self.bubbles.seconds_left[group][self.position[group]]
        self.earliest_end_s = max(self.earliest_end_s, now + left_s)
        self._start(now, head)

    def _urgent(self, lanes: Sequence[int]) -> int | None:
        best: tuple[int, int] | None = None
        for lane in lanes:
            if (candidate := self._forward(lane)) is not None and (best is None or candidate < best):
                stage = self.bubbles.needs.stage[candidate[1]]
                if stage != NOTHING and candidate[0] < self.begun[stage] + self.policy.lookahead:
                    best = candidate
        return None if best is None else best[1]

    def _filling(self, now: float, lanes: Sequence[int]) -> int | None:
        for next_of in (self._forward, self._backward):
            best: tuple[int, int] | None = None
            for lane in lanes:
                candidate = next_of(lane)
                if candidate is not None and (best is None or candidate < best):
                    best = candidate if self._fits_gap(now, lane, candidate[1]) else best
            if best is not None:
                return best[1]
        return None

    def _forward(self, lane: int) -> tuple[int, int] | None:
        """The lane's next forward, if its units are free and have room for what it keeps."""
        queue = self.forwards[lane]
        if not queue:
            return None
        size, room, held, busy = self.bubbles.sizes[queue[0][1]], self.bubbles.room, self.bytes_held, self.busy
        for unit in self.bubbles.lanes[lane]:
            if busy[unit] or held[unit] + size > room[unit]:
                return None
        return queue[0]

    def _backward(self, lane: int) -> tuple[int, int] | None:
        queue = self.backwards[lane]
        return queue[0] if queue and not any(self.busy[unit] for unit in self.bubbles.lanes[lane]) else None

    def _fits_gap(self, now: float, lane: int, action: int) -> bool:
        """Whether the given order of all the lane's units can spare them for as long."""
        end_s = now + self.tables.seconds[action] * (1 - self.policy.lateness)
        for group in self.bubbles.groups_of_lane[lane]:
            head = self._head(group)
            if head is not None:
                ready_s = max((self.written_at.get(value, inf) for value in self.tables.reads[head]), default=0.0)
                if not self.missing[head] or end_s > ready_s:
                    return False
        return True

    def _head(self, group: int) -> int | None:
        given = self.bubbles.given[group]
        return given[self.position[group]] if self.position[group] < len(given) else None

    def _let_one_through_each(self, now: float, stalled: Set[int]) -> None:
        """Starts, in spite of the limit in bytes, the forward that each of these pipelines needs first, if any."""
        first: dict[int, tuple[int, int]] = {}
        for queue in self.forwards:
            if queue and (pipeline := self._pipeline(queue[0][1])) in stalled:
                first[pipeline] = min(queue[0], first.get(pipeline, queue[0]))
        for _, action in first.values():
            self._start(now, action)

    def _pipeline(self, action: int) -> int:
        return self.bubbles.pipeline_of_stage[self.bubbles.cell_stage[action % self.bubbles.num_cells]]

    def _start(self, now: float, action: int) -> None:
        cell = action % self.bubbles.num_cells
        stage, is_forward = self.bubbles.cell_stage[cell], action < self.bubbles.num_cells
        units = self.bubbles.units[stage]
        if self.bubbles.is_given[stage]:
            self.position[self.bubbles.group_of_unit[units[0]]] += 1
        else:
            queues = self.forwards if is_forward else self.backwards
            _, started = heapq.heappop(queues[self.bubbles.lane_of_stage[stage]])
            assert started == action
        self.begun[stage] += is_forward
        for unit in units:
            self.busy[unit] = True
            self.lists[unit].append(action)
            if not self.bubbles.is_given[stage]:
                self.bytes_held[unit] += self.bubbles.sizes[cell] * (1 if is_forward else -1)
        self.num_started += 1
        self.num_running[self.bubbles.pipeline_of_stage[stage]] += 1
        end_s = now + self.tables.seconds[action]
        for value in self.tables.writes[action]:
            self.written_at[value] = end_s
        heapq.heappush(self.running, (end_s, self.num_started, action))

    def _finish(self, action: int) -> set[int]:
        """Hands on what the action wrote; returns the units that may have something to start."""
        units = self.bubbles.units
        self.num_running[self._pipeline(action)] -= 1
        touched = set(units[self.bubbles.cell_stage[action % self.bubbles.num_cells]])
        for unit in touched:
            self.busy[unit] = False
        for reader in self.tables.readers[action]:
            self.missing[reader] -= 1
            if not self.missing[reader]:
                self._push(reader)
                touched.update(units[self.bubbles.cell_stage[reader % self.bubbles.num_cells]])
        return touched
