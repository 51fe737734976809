"""Ordered list of compute actions for each rank. This one definition is both simulated and run.

Generators write schedules of compute actions only; `motet.schedule.lower` adds reductions and messages. A schedule is
written with actions, or with their numbers (`motet.schedule.dependencies`), which is quicker; each is made from the
other when it is asked for.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from motet.ragged_arrays import Ints
from motet.schedule.action import Compute, parse_action
from motet.schedule.dependencies import Dependencies


class Schedule:
    def __init__(self, ranks: Iterable[Iterable[Compute]]) -> None:
        self.ranks = tuple(tuple(actions) for actions in ranks)

    @staticmethod
    def of_numbers(dependencies: Dependencies, ranks: Sequence[Ints]) -> "Schedule":
        """`ranks`: the numbers of each rank's actions; ranks that do the same share one array."""
        return _NumberedSchedule(dependencies, ranks)

    def numbers(self, dependencies: Dependencies) -> tuple[Ints, ...]:
        """Each rank's actions by number; ranks that do the same share one array.

        Raises `KeyError` if the iteration has no cell of one of them."""
        different = {id(actions): actions for actions in self.ranks}
        shared: dict[tuple[Compute, ...], Ints] = {}
        for actions in different.values():
            if actions not in shared:
                shared[actions] = np.array([dependencies.number(action) for action in actions], dtype=np.int64)
        numbers = {key: shared[actions] for key, actions in different.items()}
        return tuple(numbers[id(actions)] for actions in self.ranks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash(self.ranks)

    def __repr__(self) -> str:
        return f"Schedule({self.ranks!r})"

    def text(self) -> str:
        """One line per rank."""
        return "\n".join(
            f"{rank}: {' '.join(str(action) for action in actions)}".rstrip() for rank, actions in enumerate(self.ranks)
        )

    @staticmethod
    def parse(text: str) -> "Schedule":
        """The inverse of `text()`; empty lines and lines that begin with # are skipped."""
        ranks = []
        for line in text.splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                actions = [parse_action(word) for word in line.partition(":")[2].split()]
                assert all(isinstance(action, Compute) for action in actions)
                ranks.append(actions)
        return Schedule(ranks)  # type: ignore[arg-type]


class _NumberedSchedule(Schedule):
    def __init__(self, dependencies: Dependencies, ranks: Sequence[Ints]) -> None:
        self._dependencies, self._numbers = dependencies, tuple(ranks)

    @cached_property
    def ranks(self) -> tuple[tuple[Compute, ...], ...]:  # type: ignore[override]
        objects = {id(numbers): tuple(self._dependencies.actions(numbers)) for numbers in self._numbers}
        return tuple(objects[id(numbers)] for numbers in self._numbers)

    def numbers(self, dependencies: Dependencies) -> tuple[Ints, ...]:
        return self._numbers if dependencies.routes is self._dependencies.routes else super().numbers(dependencies)


def schedule_of_groups(dependencies: Dependencies, order: Iterable[tuple[tuple[int, ...], Ints]]) -> Schedule:
    """The schedule in which each group of ranks executes the actions of these numbers. No rank is in two groups."""
    ranks: list[Ints | None] = [None] * dependencies.routes.plan.num_ranks
    nothing = np.zeros(0, dtype=np.int64)
    for group, numbers in order:
        for rank in group:
            assert ranks[rank] is None, f"rank {rank} is in two groups"
            ranks[rank] = numbers
    return Schedule.of_numbers(dependencies, [nothing if numbers is None else numbers for numbers in ranks])


def grid(lists: Sequence[Sequence[object]], marks: Mapping[int, int]) -> str:
    """Text with one line per rank; position `marks[rank]` of each marked rank's list is pointed out."""
    lines = []
    for rank, steps in enumerate(lists):
        words = [f">>{step}<<" if i == marks.get(rank) else str(step) for i, step in enumerate(steps)]
        if marks.get(rank) == len(steps):
            words.append(">>end<<")
        lines.append(f"{rank}: {' '.join(words)}")
    return "\n".join(lines)
