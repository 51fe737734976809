"""Splits the backwards of a given order into halves and puts the weight halves where a rank would wait.

Nothing but the optimizer waits for weight gradients, so their half of the backward (W) is work to fill bubbles with;
the input half (I) stays where the whole backward stood (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2).
A virtual clock runs over the order; a rank takes a weight half

* when it has begun as many microbatches as it may hold and the next forward would be one more;
* when what comes next in its order is not ready. If it is known when that will be, a half that ends later is taken only
  if it ends not much later; how much is "not much" is tried out, and the shortest iteration counts (the paper's
  automatic schedule tries such choices too);
* when nothing else is left.

A backward without an input half (nothing before it is trainable) is a weight half as a whole; one without a weight half
(a frozen stage) stays whole, as it is an input half already.

Valid: the order that remains is the given one without actions that nobody waits for, and weight halves wait for nothing
but the input half. It may hold at least as many microbatches as in the given order, so a forward that is held back
waits for a backward that stood before it in that order.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from math import inf

from motet.schedule.action import Compute, Durations, Kind, unit_duration
from motet.schedule.dependencies import Dependencies, Value
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule, schedule_of_groups

Group = tuple[int, ...]

LATENESS = (0.0, 0.5, 1.0)
"""By how much of its own duration a weight half may delay what comes next."""


def fill_weights(
    routes: Routes,
    order: Mapping[Group, Sequence[Compute]],
    costs: Durations | None = None,
    *,
    may_hold: Mapping[Group, int],
    memory: MemoryLimit | None = None,
) -> Schedule:
    """`order`: what each group of ranks executes, with whole backwards; groups have no rank in common.

    `may_hold`: how many microbatches a group may have between their forward and the end of their whole backward.
    """
    program = _SplitOrder(routes, order, costs or unit_duration)
    runs = [_Clock(program, may_hold, memory, lateness) for lateness in LATENESS]
    best = min(runs, key=lambda run: run.run())
    return schedule_of_groups(routes.plan, best.lists.items())


class _SplitOrder:
    """The order without what may be deferred, and what each action waits for."""

    def __init__(self, routes: Routes, order: Mapping[Group, Sequence[Compute]], duration_s: Durations) -> None:
        self.routes = routes
        dependencies = Dependencies(routes)
        self.group_of: dict[Compute, Group] = {}
        self.fixed: dict[Group, list[Compute]] = {}
        self.num_deferred = 0
        for group, actions in order.items():
            self.fixed[group] = []
            for action in actions:
                for part in self._parts(action):
                    self.group_of[part] = group
                    if self.is_deferred(part):
                        self.num_deferred += 1
                    else:
                        self.fixed[group].append(part)
        self.duration_s = {action: duration_s(action) for action in self.group_of}
        self.reads = {action: dependencies.reads(action) for action in self.group_of}
        self.writes = {action: dependencies.writes(action) for action in self.group_of}
        self.readers: dict[Value, list[Compute]] = defaultdict(list)
        for action, values in self.reads.items():
            for value in values:
                self.readers[value].append(action)

    def _parts(self, action: Compute) -> tuple[Compute, ...]:
        kind, cell = action
        has_both = cell in self.routes.with_weight_gradient and self.routes.has_input_gradient(cell)
        if kind is Kind.BACKWARD and has_both:
            return Compute(Kind.INPUT, cell), Compute(Kind.WEIGHT, cell)
        return (action,)

    def is_deferred(self, action: Compute) -> bool:
        kind, cell = action
        return kind is Kind.WEIGHT or (kind is Kind.BACKWARD and not self.routes.has_input_gradient(cell))


class _Clock:
    def __init__(
        self, order: _SplitOrder, may_hold: Mapping[Group, int], memory: MemoryLimit | None, lateness: float
    ) -> None:
        self.order, self.may_hold, self.memory, self.lateness = order, may_hold, memory, lateness
        self.lists: dict[Group, list[Compute]] = {group: [] for group in order.fixed}
        self.position = dict.fromkeys(order.fixed, 0)
        self.deferred: dict[Group, deque[Compute]] = {group: deque() for group in order.fixed}
        self.held = dict.fromkeys(order.fixed, 0)
        self.bytes_held = dict.fromkeys(order.fixed, 0)
        self.missing = {action: len(values) for action, values in order.reads.items()}
        self.written_at: dict[Value, float] = {}
        """When each value that is written, or being written, is there."""
        self.running: list[tuple[float, int, Compute]] = []
        self.busy = dict.fromkeys(order.fixed, False)
        self.num_started = 0

    def run(self) -> float:
        """The iteration's time in seconds."""
        now = 0.0
        for action, missing in self.missing.items():
            if not missing and self.order.is_deferred(action):
                self.deferred[self.order.group_of[action]].append(action)
        touched = list(self.lists)
        while True:
            for group in touched:
                self._dispatch(now, group)
            if not self.running and not self._let_one_through(now):
                break
            now = self.running[0][0]
            touched = []
            while self.running and self.running[0][0] == now:
                touched += self._finish(heapq.heappop(self.running)[2])
        assert self.num_started == len(self.missing), "work is left, but nothing is ready"
        return now

    def _dispatch(self, now: float, group: Group) -> None:
        if self.busy[group]:
            return
        head, deferred = self._head(group), self.deferred[group]
        if head and not self.missing[head] and self._fits(group, head):
            self._start(now, head)
        elif deferred and (not head or not self.missing[head] or self._is_worth_it(now, head, deferred[0])):
            self._start(now, deferred.popleft())

    def _head(self, group: Group) -> Compute | None:
        fixed = self.order.fixed[group]
        return fixed[self.position[group]] if self.position[group] < len(fixed) else None

    def _fits(self, group: Group, action: Compute) -> bool:
        if action.kind is not Kind.FORWARD or action.cell not in self.order.routes.with_backward:
            return True
        if self.held[group] >= self.may_hold[group]:
            return False
        if self.memory is None:
            return True
        size = self.bytes_held[group] + self.memory.saved_bytes(action.cell)
        return all(size <= self.memory.limit_bytes(rank) for rank in group)

    def _is_worth_it(self, now: float, head: Compute, half: Compute) -> bool:
        ready_s = max(self.written_at.get(value, inf) for value in self.order.reads[head])
        return now + self.order.duration_s[half] * (1 - self.lateness) <= ready_s

    def _let_one_through(self, now: float) -> bool:
        """Starts a forward in spite of a limit in bytes that is too small for it; False if there is none."""
        for group in self.lists:
            head = self._head(group)
            if head and not self.missing[head]:
                self._start(now, head)
                return True
        return False

    def _start(self, now: float, action: Compute) -> None:
        group = self.order.group_of[action]
        if not self.order.is_deferred(action):
            self.position[group] += 1
        self.lists[group].append(action)
        self.busy[group] = True
        self._hold(group, action)
        self.num_started += 1
        end_s = now + self.order.duration_s[action]
        for value in self.order.writes[action]:
            self.written_at[value] = end_s
        heapq.heappush(self.running, (end_s, self.num_started, action))

    def _hold(self, group: Group, action: Compute) -> None:
        """From the beginning of a forward to the *beginning* of its last backward half: the next begins after that."""
        kind, cell = action
        if cell not in self.order.routes.with_backward or kind is Kind.INPUT:
            return
        sign = 1 if kind is Kind.FORWARD else -1
        self.held[group] += sign
        if self.memory is not None:
            self.bytes_held[group] += sign * self.memory.saved_bytes(cell)

    def _finish(self, action: Compute) -> list[Group]:
        touched = [self.order.group_of[action]]
        self.busy[touched[0]] = False
        for value in self.order.writes[action]:
            for reader in self.order.readers[value]:
                self.missing[reader] -= 1
                if not self.missing[reader]:
                    group = self.order.group_of[reader]
                    if self.order.is_deferred(reader):
                        self.deferred[group].append(reader)
                    touched.append(group)
        return touched
