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

Limits: greedy, hence not optimal; backwards are not split.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from motet.schedule.action import Compute, Durations, Kind, unit_duration
from motet.schedule.dependencies import Dependencies, Value
from motet.schedule.routes import Cell, Routes
from motet.schedule.schedule import Schedule
from motet.schedule.stage_graph import StageKey, due_microbatches, pipeline_numbers, stage_of


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the bytes that forwards have saved and backwards have not yet freed."""

    saved_bytes: Callable[[Cell], int]
    """What each rank of the cell's stage keeps between its forward and its backward."""
    limit_bytes: Callable[[int], int]
    """For each rank."""
    half_saved_bytes: Callable[[Cell], int] | None = None
    """What it keeps between the halves of its backward: with recomputation more than before. None: as much."""


class Urgency(NamedTuple):
    """Smaller goes first."""

    turn: int
    """0: forwards that someone waits for; 1: backwards; 2: forwards that nobody waits for."""
    due: int
    """The first microbatch of a last stage that waits for this cell."""
    remaining: float
    """Minus the longest time from the action's start to the end of the iteration."""
    order: int


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
    clock = _Clock(routes, costs or unit_duration, in_flight or {}, memory, all_forwards_first)
    return clock.run()


class _Clock:
    def __init__(
        self,
        routes: Routes,
        duration_s: Durations,
        in_flight: Mapping[StageKey, int],
        memory: MemoryLimit | None,
        all_forwards_first: bool,
    ) -> None:
        self.routes, self.duration_s = routes, duration_s
        self.all_forwards_first = all_forwards_first
        self.dependencies = Dependencies(routes)
        self.actions = self.dependencies.required()
        held: list[list[StageKey]] = [[] for _ in range(routes.plan.num_ranks)]
        for module, replica, s, stage in routes.plan.stages():
            for rank in stage.ranks:
                held[rank].append(StageKey(module, replica, s))
        unit_of = {stages: unit for unit, stages in enumerate(dict.fromkeys(map(tuple, held)))}
        self.stages_of_unit = list(unit_of)
        """A unit are ranks that hold the same stages: they do all things together."""
        self.unit_of_rank = [unit_of[tuple(stages)] for stages in held]
        self.units: dict[StageKey, tuple[int, ...]] = {}
        for module, replica, s, stage in routes.plan.stages():
            ranks = dict.fromkeys(self.unit_of_rank[rank] for rank in stage.ranks)
            self.units[StageKey(module, replica, s)] = tuple(ranks)
        self.limit = {key: in_flight.get(key, float("inf")) for key in self.units}
        num_units = len(unit_of)

        self.urgency = self._urgencies()
        self.reads_missing: dict[Compute, int] = {}
        self.readers: dict[Value, list[Compute]] = defaultdict(list)
        self.ready: dict[tuple[StageKey, Kind], list[tuple[Urgency, Compute]]] = defaultdict(list)
        self.forwards_left = [0] * num_units
        for action in self.actions:
            if action.kind is Kind.FORWARD:
                for unit in self.units[stage_of(action.cell)]:
                    self.forwards_left[unit] += 1
            reads = self.dependencies.reads(action)
            self.reads_missing[action] = len(reads)
            for value in reads:
                self.readers[value].append(action)

        self.busy = [False] * num_units
        self.begun: dict[StageKey, int] = defaultdict(int)
        self.consumers_left = {cell: len(routes.outgoing[cell]) for cell in routes.cells}
        self.bytes_held = [0] * num_units
        self.holding: dict[StageKey, int] = defaultdict(int)
        """Microbatches of each stage that are saved for the backward."""
        self.to_save = Counter(stage_of(cell) for cell in routes.with_backward)
        """Those that are not yet."""
        self.largest: dict[StageKey, int] = defaultdict(int)
        """Bytes of the largest one."""
        self.sizes: dict[Cell, int] = {}
        """Bytes that cells keep until their backward; empty without a limit."""
        self.limit_bytes = [float("inf")] * num_units
        if memory is not None:
            self.sizes = {cell: memory.saved_bytes(cell) for cell in routes.with_backward}
            for cell, size in self.sizes.items():
                self.largest[stage_of(cell)] = max(self.largest[stage_of(cell)], size)
            for rank, unit in enumerate(self.unit_of_rank):
                self.limit_bytes[unit] = min(self.limit_bytes[unit], memory.limit_bytes(rank))
        self.lists: list[list[Compute]] = [[] for _ in range(num_units)]
        self.running: list[tuple[float, int, Compute]] = []
        self.num_started = 0
        number = pipeline_numbers(routes)
        self.pipeline = {key: number[key.module, key.replica] for key in self.units}
        self.num_running = [0] * (1 + max(number.values()))
        """Actions of each pipeline."""

    def _urgencies(self) -> dict[Compute, Urgency]:
        due = due_microbatches(self.routes)
        readers: dict[Value, list[Compute]] = defaultdict(list)
        for action in self.actions:
            for value in self.dependencies.reads(action):
                readers[value].append(action)
        urgency: dict[Compute, Urgency] = {}
        for order, action in reversed(list(enumerate(self.actions))):
            after = [-urgency[r].remaining for value in self.dependencies.writes(action) for r in readers[value]]
            waited_for = action.cell in self.routes.with_backward or bool(self.routes.outgoing[action.cell])
            turn = 1 if action.kind is Kind.BACKWARD else 0 if waited_for else 2
            urgency[action] = Urgency(turn, due[action.cell], -max(after, default=0.0) - self.duration_s(action), order)
        return urgency

    def run(self) -> Schedule:
        for action in self.actions:
            if self.reads_missing[action] == 0:
                self._push(action)
        now, idle, touched = 0.0, set(range(len(self.busy))), set(self.pipeline.values())
        while True:
            self._dispatch(now, idle)
            stalled = {pipeline for pipeline in touched if not self.num_running[pipeline]}
            if stalled:
                self._let_one_through_each(now, stalled)
            if not self.running:
                break
            now = self.running[0][0]
            idle, touched = set(), set()
            while self.running and self.running[0][0] == now:
                action = heapq.heappop(self.running)[2]
                idle |= self._finish(action)
                touched.add(self.pipeline[stage_of(action.cell)])
        assert self.num_started == len(self.actions), "work is left, but nothing is ready"
        lists = [tuple(actions) for actions in self.lists]
        return Schedule(tuple(lists[unit] for unit in self.unit_of_rank))

    def _push(self, action: Compute) -> None:
        heapq.heappush(self.ready[stage_of(action.cell), action.kind], (self.urgency[action], action))

    def _dispatch(self, now: float, idle: set[int]) -> None:
        """Starts the most urgent actions on the idle units."""
        for unit in sorted(idle):
            while not self.busy[unit]:
                action = min(
                    (a for key in self.stages_of_unit[unit] if (a := self._candidate(key))),
                    key=self.urgency.__getitem__,
                    default=None,
                )
                if action is None:
                    break
                self._start(now, action)

    def _candidate(self, stage: StageKey) -> Compute | None:
        """The stage's most urgent action that may start now."""
        forwards, backwards = self.ready[stage, Kind.FORWARD], self.ready[stage, Kind.BACKWARD]
        units = self.units[stage]
        if not (forwards or backwards) or any(self.busy[unit] for unit in units):
            return None
        if self.all_forwards_first and any(self.forwards_left[unit] for unit in units):
            backwards = []
        candidates = [backwards[0]] if backwards else []
        if forwards and self._within_limits(stage, forwards[0][1].cell):
            candidates.append(forwards[0])
        return min(candidates)[1] if candidates else None

    def _within_limits(self, stage: StageKey, cell: Cell) -> bool:
        if self.begun[stage] >= self.limit[stage]:
            return False
        if cell not in self.sizes:
            return True
        size = self.sizes[cell]
        return all(
            self.bytes_held[unit] + size + self._kept_free(unit, stage) <= self.limit_bytes[unit]
            for unit in self.units[stage]
        )

    def _kept_free(self, unit: int, stage: StageKey) -> int:
        """Room on the unit's ranks for one microbatch of each other stage that has none, lest it wait for what waits
        for it."""
        others = (other for other in self.stages_of_unit[unit] if other != stage and not self.holding[other])
        return sum(self.largest[other] for other in others if self.to_save[other])

    def _let_one_through_each(self, now: float, stalled: Set[int]) -> None:
        """Starts, in spite of the limits, the most urgent forward of each of these pipelines that has one."""
        most_urgent: dict[int, tuple[Urgency, Compute]] = {}
        for (stage, kind), queue in self.ready.items():
            pipeline = self.pipeline[stage]
            if kind is Kind.FORWARD and queue and pipeline in stalled:
                most_urgent[pipeline] = min(queue[0], most_urgent.get(pipeline, queue[0]))
        for _, action in most_urgent.values():
            self._start(now, action)

    def _start(self, now: float, action: Compute) -> None:
        stage = stage_of(action.cell)
        _, started = heapq.heappop(self.ready[stage, action.kind])
        assert started == action
        for unit in self.units[stage]:
            self.busy[unit] = True
            self.lists[unit].append(action)
        if action.kind is Kind.FORWARD:
            self._begin_cell(action.cell, +1)
        self.num_started += 1
        self.num_running[self.pipeline[stage]] += 1
        heapq.heappush(self.running, (now + self.duration_s(action), self.num_started, action))

    def _begin_cell(self, cell: Cell, sign: int) -> None:
        """Counts a cell as in flight (+1), or as finished (-1)."""
        stage = stage_of(cell)
        self.begun[stage] += sign
        if cell in self.sizes:
            self.holding[stage] += sign
            self.to_save[stage] -= sign > 0
            for unit in self.units[stage]:
                self.bytes_held[unit] += sign * self.sizes[cell]

    def _finish(self, action: Compute) -> set[int]:
        """Frees the action's ranks, hands on what it wrote; returns the units that may have something to start."""
        stage = stage_of(action.cell)
        touched = set(self.units[stage])
        self.num_running[self.pipeline[stage]] -= 1
        for unit in self.units[stage]:
            self.busy[unit] = False
            self.forwards_left[unit] -= action.kind is Kind.FORWARD
        for value in self.dependencies.writes(action):
            for reader in self.readers[value]:
                self.reads_missing[reader] -= 1
                if self.reads_missing[reader] == 0:
                    self._push(reader)
                    touched.update(self.units[stage_of(reader.cell)])
        for cell in self._finished_cells(action):
            self._begin_cell(cell, -1)
            touched.update(self.units[stage_of(cell)])
        return touched

    def _finished_cells(self, action: Compute) -> list[Cell]:
        if action.kind is Kind.BACKWARD:
            return [action.cell]
        finished = []
        if action.cell not in self.routes.with_backward and not self.routes.outgoing[action.cell]:
            finished.append(action.cell)
        for route in self.routes.incoming[action.cell]:
            self.consumers_left[route.source] -= 1
            if self.consumers_left[route.source] == 0 and route.source not in self.routes.with_backward:
                finished.append(route.source)
        return finished
