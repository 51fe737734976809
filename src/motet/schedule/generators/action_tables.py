"""What each action reads, writes and takes, by number and as plain lists: for the clocks that generators run."""

import numpy as np

from motet.ragged_arrays import Ints
from motet.schedule.action import Durations
from motet.schedule.dependencies import NOTHING, Dependencies
from motet.schedule.order import seconds_of_actions


class ActionTables:
    def __init__(self, dependencies: Dependencies, present: Ints, duration_s: Durations) -> None:
        """`present`: the numbers of the schedule's actions."""
        seconds = np.zeros(dependencies.num_actions)
        seconds[present] = seconds_of_actions(present, dependencies, duration_s)[present]
        self.present: list[int] = present.tolist()
        self.seconds: list[float] = seconds.tolist()
        """0 for actions that are not present."""
        self.reads = _with_kept(dependencies.carried_reads.to_lists(), dependencies.kept_read)
        """For each action, the numbers of the values."""
        self.writes = _with_kept(dependencies.carried_writes.to_lists(), dependencies.kept_write)
        self.readers: dict[int, list[int]] = {}
        """For each value, the actions that are present and read it."""
        for action in self.present:
            for value in self.reads[action]:
                self.readers.setdefault(value, []).append(action)


def _with_kept(carried: list[list[int]], kept: Ints) -> list[list[int]]:
    return [row if value == NOTHING else [*row, value] for row, value in zip(carried, kept.tolist(), strict=True)]
