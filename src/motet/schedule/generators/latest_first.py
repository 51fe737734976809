"""Improves a list schedule by shifting its actions to the end, and then to the begin again.

A schedule that runs on a clock leaves idle times that its priorities did not foresee. Here the same actions run on a
clock that goes backwards: an action may run when all that read its results have run, and the one that ended last goes
first. In this second schedule every action is as late as those after it allow, so its start tells how urgent it is.
List scheduling by these starts is often shorter than the first schedule (forward-backward improvement: Li and Willis
1992, "An iterative scheduling technique for resource-constrained project scheduling").

Actions that fill idle times stay where they are: weight halves, for which nothing waits.

Limits: memory does not count on the way back.
"""

import heapq

import numpy as np

from motet.ragged_arrays import Ints
from motet.schedule.generators.list_schedule import ListClock


class LatestFirst:
    """Schedules of a clock's actions that are as late as possible."""

    def __init__(self, clock: ListClock) -> None:
        tables, self._clock = clock.tables, clock
        actions: list[int] = clock.actions.tolist()
        self._fill = [action for action in actions if clock.fills(action)]
        shifted = [action for action in actions if not clock.fills(action)]
        writer = {value: action for action in actions for value in tables.writes[action]}
        self._before: list[list[int]] = [[] for _ in tables.seconds]
        self._num_after = [0] * len(tables.seconds)
        for action in shifted:
            self._before[action] = [writer[value] for value in tables.reads[action]]
            for earlier in self._before[action]:
                self._num_after[earlier] += 1
        self._last = [action for action in shifted if not self._num_after[action]]
        number = {units: i for i, units in enumerate(dict.fromkeys(clock.units))}
        self._units = list(number)
        """Units that compute stages together."""
        self._together = [number[clock.units[stage]] for stage in clock.stage_of_action]
        """By action, which of them."""
        self._of_unit = [[i for i, units in enumerate(number) if u in units] for u in range(len(clock.stages_of_unit))]

    def by_latest_start(self, ends_s: list[float]) -> Ints:
        """All actions by their start when they are as late as possible, the first first. `ends_s`: end of each action
        in the schedule that is to be improved."""
        clock, together, units_of = self._clock, self._together, self._units
        before, num_after, seconds = self._before, list(self._num_after), clock.tables.seconds
        ready: list[list[tuple[float, int]]] = [[] for _ in units_of]
        for action in self._last:
            heapq.heappush(ready[together[action]], (-ends_s[action], action))
        busy = [False] * len(clock.stages_of_unit)
        running: list[tuple[float, int]] = []
        begun_s = np.zeros(len(seconds))
        now, idle = 0.0, set(range(len(busy)))
        while True:
            for unit in sorted(idle):
                if busy[unit]:
                    continue
                free = [i for i in self._of_unit[unit] if ready[i] and not any(busy[u] for u in units_of[i])]
                if free:
                    first = free[0] if len(free) == 1 else min(free, key=lambda i: ready[i][0])
                    _, action = heapq.heappop(ready[first])
                    for other in units_of[first]:
                        busy[other] = True
                    heapq.heappush(running, (now + seconds[action], action))
            if not running:
                break
            now, idle = running[0][0], set()
            while running and running[0][0] == now:
                _, action = heapq.heappop(running)
                begun_s[action] = -now
                units = units_of[together[action]]
                idle.update(units)
                for unit in units:
                    busy[unit] = False
                for earlier in before[action]:
                    num_after[earlier] -= 1
                    if not num_after[earlier]:
                        i = together[earlier]
                        heapq.heappush(ready[i], (-ends_s[earlier], earlier))
                        idle.update(units_of[i])
        begun_s[self._fill] = np.array(ends_s)[self._fill]  # After all others.
        # Equal starts in the order of the program.
        return clock.actions[np.argsort(begun_s[clock.actions], kind="stable")]
