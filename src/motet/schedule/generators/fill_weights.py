"""Splits the backwards of a given order into halves and puts the weight halves where a rank would wait.

Nothing but the optimizer waits for weight gradients, so their half of the backward (W) is work to fill bubbles with;
the input half (I) stays where the whole backward stood (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2).
A virtual clock runs over the order; a rank takes a weight half

* when it has begun as many microbatches as it may hold and the next forward would be one more, or when the next action
  would not fit into memory: with recomputation an input half leaves more behind than it finds;
* when what comes next in its order is not ready. If it is known when that will be, a half that ends later is taken only
  if it ends not much later; how much is "not much" is tried out, and the shortest iteration counts (the paper's
  automatic schedule tries such choices too);
* when nothing else is left.

A backward without an input half (nothing before it is trainable) is a weight half as a whole; one without a weight half
(a frozen stage) stays whole, as it is an input half already.

Valid: the order that remains is the given one without actions that no other action waits for, and weight halves wait
only for the input half. It may hold at least as many microbatches as in the given order, so a forward that is delayed
waits for a backward that preceded it in that order.
"""

import heapq
from collections import deque
from collections.abc import Mapping
from math import inf

import numpy as np

from motet.ragged_arrays import Ints
from motet.schedule.action import Durations, Kind, unit_duration
from motet.schedule.dependencies import KINDS, NOTHING, Dependencies
from motet.schedule.generators.list_schedule import ActionTables, MemoryLimit
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule, schedule_of_groups

Group = tuple[int, ...]

LATENESS = (0.0, 0.5, 1.0)
"""Share of its own duration by which a weight half may delay the next action."""


def fill_weights(
    routes: Routes,
    order: Mapping[Group, Ints],
    costs: Durations | None = None,
    *,
    may_hold: Mapping[Group, int],
    memory: MemoryLimit | None = None,
) -> Schedule:
    """`order`: what each group of ranks executes, with whole backwards; groups have no rank in common.

    `may_hold`: how many microbatches a group may have between their forward and the end of their whole backward.
    """
    dependencies = Dependencies(routes)
    split = _SplitOrder(dependencies, list(order.values()), costs or unit_duration)
    limits = _Limits(split, [may_hold[group] for group in order], list(order), memory)
    runs = [_Clock(split, limits, lateness) for lateness in LATENESS]
    best = min(runs, key=lambda run: run.run())
    lists = [np.array(actions, dtype=np.int64) for actions in best.lists]
    return schedule_of_groups(dependencies, zip(order, lists, strict=True))


def is_within(schedule: Schedule, routes: Routes, memory: MemoryLimit) -> bool:
    """Whether what each rank keeps never exceeds its limit."""
    half_saved_bytes = memory.half_saved_bytes or memory.saved_bytes
    for rank, actions in enumerate(schedule.ranks):
        held, most = 0, 0
        halves = {action.cell for action in actions if action.kind is Kind.INPUT}
        for action in actions:
            cell = action.cell
            if action.kind is Kind.FORWARD and cell in routes.with_backward:
                held += memory.saved_bytes(cell)
            elif action.kind is Kind.WEIGHT and cell in halves:
                held -= half_saved_bytes(cell)
            elif action.kind is not Kind.FORWARD:
                held += (half_saved_bytes(cell) if action.kind is Kind.INPUT else 0) - memory.saved_bytes(cell)
            most = max(most, held)
        if most > memory.limit_bytes(rank):
            return False
    return True


class _SplitOrder:
    """The order without what may be deferred, and what each action waits for. Groups and actions are numbers."""

    def __init__(self, dependencies: Dependencies, order: list[Ints], duration_s: Durations) -> None:
        routes, num_cells = dependencies.routes, dependencies.routes.num_cells
        first_of = {kind: place * num_cells for place, kind in enumerate(KINDS)}
        whole = slice(first_of[Kind.BACKWARD], first_of[Kind.BACKWARD] + num_cells)
        halves = slice(first_of[Kind.WEIGHT], first_of[Kind.WEIGHT] + num_cells)
        is_deferred = np.zeros(dependencies.num_actions, dtype=bool)
        is_deferred[whole], is_deferred[halves] = ~routes.cell_has_input_gradient, True
        has_both = routes.cell_has_input_gradient & routes.cell_has_weight_gradient
        group_of = np.full(dependencies.num_actions, NOTHING)
        self.fixed: list[list[int]] = []
        for group, numbers in enumerate(order):
            cells = numbers % num_cells
            is_split = (numbers // num_cells == KINDS.index(Kind.BACKWARD)) & has_both[cells]
            parts = np.where(is_split, cells + first_of[Kind.INPUT], numbers)
            group_of[parts] = group
            group_of[cells[is_split] + first_of[Kind.WEIGHT]] = group
            self.fixed.append(parts[~is_deferred[parts]].tolist())
        holds = np.zeros(dependencies.num_actions, dtype=np.int64)
        holds[:num_cells] = routes.cell_has_backward
        holds[whole] = holds[halves] = -1
        self.tables = ActionTables(dependencies, np.flatnonzero(group_of != NOTHING), duration_s)
        self.num_cells, self.cells = num_cells, routes.cells
        self.group_of, self.is_deferred, self.holds = group_of.tolist(), is_deferred.tolist(), holds.tolist()
        """`holds`: by how many microbatches more, or less, a group holds from the action's beginning on. A half that
        ends frees memory for what begins after it, which is as well as if it did so at its beginning."""


class _Limits:
    """Memory limit of each group."""

    def __init__(
        self, order: _SplitOrder, may_hold: list[int], groups: list[Group], memory: MemoryLimit | None
    ) -> None:
        self.may_hold = may_hold
        self.limit_bytes = [inf if memory is None else min(map(memory.limit_bytes, group)) for group in groups]
        self.more_bytes = [0] * len(order.holds)
        """Change of kept bytes by action."""
        if memory is not None:
            for action in order.tables.present:
                self.more_bytes[action] = _more_bytes(order, memory, action)


def _more_bytes(order: _SplitOrder, memory: MemoryLimit, action: int) -> int:
    kind, number = KINDS[action // order.num_cells], action % order.num_cells
    cell = order.cells[number]
    whole = memory.saved_bytes(cell) if order.holds[number] else 0
    if kind is Kind.FORWARD:
        return whole
    if kind is Kind.BACKWARD:
        return -whole
    half = whole if memory.half_saved_bytes is None else memory.half_saved_bytes(cell)
    return half - whole if kind is Kind.INPUT else -half


class _Clock:
    def __init__(self, order: _SplitOrder, limits: _Limits, lateness: float) -> None:
        self.order, self.limits, self.lateness = order, limits, lateness
        num_groups = len(order.fixed)
        self.lists: list[list[int]] = [[] for _ in range(num_groups)]
        self.position = [0] * num_groups
        self.deferred: list[deque[int]] = [deque() for _ in range(num_groups)]
        self.held = [0] * num_groups
        self.bytes_held = [0] * num_groups
        self.missing = [len(values) for values in order.tables.reads]
        self.written_at: dict[int, float] = {}
        """Time at which each value that is written, or being written, becomes available."""
        self.running: list[tuple[float, int, int]] = []
        self.busy = [False] * num_groups
        self.num_started = 0

    def run(self) -> float:
        """The iteration's time in seconds."""
        now, touched = 0.0, list(range(len(self.busy)))
        while True:
            for group in touched:
                self._dispatch(now, group)
            if not self.running and not self._let_one_through(now):
                break
            now = self.running[0][0]
            touched = []
            while self.running and self.running[0][0] == now:
                touched += self._finish(heapq.heappop(self.running)[2])
        assert self.num_started == len(self.order.tables.present), "work is left, but nothing is ready"
        return now

    def _dispatch(self, now: float, group: int) -> None:
        if self.busy[group]:
            return
        head, deferred = self._head(group), self.deferred[group]
        is_ready = head is not None and not self.missing[head]
        if head is not None and is_ready and self._fits(group, head):
            self._start(now, head)
        elif deferred and (head is None or is_ready or self._is_worth_it(now, head, deferred[0])):
            self._start(now, deferred.popleft())

    def _head(self, group: int) -> int | None:
        fixed = self.order.fixed[group]
        return fixed[self.position[group]] if self.position[group] < len(fixed) else None

    def _fits(self, group: int, action: int) -> bool:
        is_forward = self.order.holds[action] > 0
        if is_forward and self.held[group] >= self.limits.may_hold[group]:
            return False
        more = self.limits.more_bytes[action]
        if more <= 0 or not (is_forward or self.deferred[group]):
            return True
        return self.bytes_held[group] + more <= self.limits.limit_bytes[group]

    def _is_worth_it(self, now: float, head: int, half: int) -> bool:
        ready_s = max(self.written_at.get(value, inf) for value in self.order.tables.reads[head])
        return now + self.order.tables.seconds[half] * (1 - self.lateness) <= ready_s

    def _let_one_through(self, now: float) -> bool:
        """Starts a forward in spite of a limit in bytes that is too small for it; False if there is none."""
        for group in range(len(self.busy)):
            head = self._head(group)
            if head is not None and not self.missing[head]:
                self._start(now, head)
                return True
        return False

    def _start(self, now: float, action: int) -> None:
        group, holds = self.order.group_of[action], self.order.holds[action]
        if not self.order.is_deferred[action]:
            self.position[group] += 1
        self.lists[group].append(action)
        self.busy[group] = True
        self.held[group] += holds
        self.bytes_held[group] += self.limits.more_bytes[action]
        self.num_started += 1
        end_s = now + self.order.tables.seconds[action]
        for value in self.order.tables.writes[action]:
            self.written_at[value] = end_s
        heapq.heappush(self.running, (end_s, self.num_started, action))

    def _finish(self, action: int) -> list[int]:
        """Hands on what the action wrote; returns the groups that may have something to start."""
        touched = [self.order.group_of[action]]
        self.busy[touched[0]] = False
        for reader in self.order.tables.readers[action]:
            self.missing[reader] -= 1
            if not self.missing[reader]:
                group = self.order.group_of[reader]
                if self.order.is_deferred[reader]:
                    self.deferred[group].append(reader)
                touched.append(group)
        return touched
