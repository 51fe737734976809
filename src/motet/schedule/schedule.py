"""For each rank, the ordered list of its compute actions. This one definition is what runs and what is simulated.

Generators write schedules of compute actions only; `motet.schedule.lower` adds reductions and messages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from motet.plan import Plan
from motet.schedule.action import Compute, parse_action
from motet.schedule.routes import Routes
from motet.schedule.stage_graph import StageKey


@dataclass(frozen=True)
class Schedule:
    ranks: tuple[tuple[Compute, ...], ...]

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
                ranks.append(tuple(actions))
        return Schedule(tuple(ranks))  # type: ignore[arg-type]


def schedule_of_stages(routes: Routes, order: Mapping[StageKey, Iterable[Compute]]) -> Schedule:
    """The schedule in which each stage's group executes that stage's list.

    For plans in which no rank holds two stages. `order`: what each stage executes.
    """
    groups = {StageKey(name, r, s): stage.ranks for name, r, s, stage in routes.plan.stages()}
    return schedule_of_groups(routes.plan, [(groups[stage], actions) for stage, actions in order.items()])


def schedule_of_groups(plan: Plan, order: Iterable[tuple[tuple[int, ...], Iterable[Compute]]]) -> Schedule:
    """The schedule in which each group of ranks executes its list. No rank is in two groups."""
    ranks: list[tuple[Compute, ...]] = [()] * plan.num_ranks
    for group, actions in order:
        in_order = tuple(actions)
        for rank in group:
            assert not ranks[rank], f"rank {rank} is in two groups"
            ranks[rank] = in_order
    return Schedule(tuple(ranks))


def grid(lists: Sequence[Sequence[object]], marks: Mapping[int, int]) -> str:
    """What each rank does, one line a rank, with the place `marks[rank]` in each marked rank's list pointed out."""
    lines = []
    for rank, steps in enumerate(lists):
        words = [f">>{step}<<" if i == marks.get(rank) else str(step) for i, step in enumerate(steps)]
        if marks.get(rank) == len(steps):
            words.append(">>end<<")
        lines.append(f"{rank}: {' '.join(words)}")
    return "\n".join(lines)
