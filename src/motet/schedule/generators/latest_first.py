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
        self._before = {action: [writer[value] for value in tables.reads[action]] for action in shifted}
        self._num_after = dict.fromkeys(shifted, 0)
        for earlier in self._before.values():
            for action in earlier:
                self._num_after[action] += 1

    def by_latest_start(self, ends_s: list[float]) -> Ints:
        """All actions by their start when they are as late as possible, the first first. `ends_s`: end of each action
        in the schedule that is to be improved."""
        clock, num_cells = self._clock, self._clock.num_cells
        before, num_after, seconds = self._before, dict(self._num_after), clock.tables.seconds
        ready: list[list[tuple[float, int]]] = [[] for _ in clock.units]
        for action, number in num_after.items():
            if not number:
                heapq.heappush(ready[clock.cell_stage[action % num_cells]], (-ends_s[action], action))
        busy = [False] * len(clock.stages_of_unit)
        running: list[tuple[float, int]] = []
        begun_s = np.zeros(len(seconds))
        now, idle = 0.0, set(range(len(busy)))
        while True:
            for unit in sorted(idle):
                stages = [] if busy[unit] else clock.stages_of_unit[unit]
                free = [s for s in stages if ready[s] and not any(busy[other] for other in clock.units[s])]
                if free:
                    stage = min(free, key=lambda s: ready[s][0])
                    _, action = heapq.heappop(ready[stage])
                    for other in clock.units[stage]:
                        busy[other] = True
                    heapq.heappush(running, (now + seconds[action], action))
            if not running:
                break
            now, idle = running[0][0], set()
            while running and running[0][0] == now:
                _, action = heapq.heappop(running)
                begun_s[action] = -now
                idle.update(clock.units[clock.cell_stage[action % num_cells]])
                for unit in clock.units[clock.cell_stage[action % num_cells]]:
                    busy[unit] = False
                for earlier_action in before[action]:
                    num_after[earlier_action] -= 1
                    if not num_after[earlier_action]:
                        stage = clock.cell_stage[earlier_action % num_cells]
                        heapq.heappush(ready[stage], (-ends_s[earlier_action], earlier_action))
                        idle.update(clock.units[stage])
        begun_s[self._fill] = np.array(ends_s)[self._fill]  # After all others.
        # Equal starts in the order of the program.
        return clock.actions[np.argsort(begun_s[clock.actions], kind="stable")]
