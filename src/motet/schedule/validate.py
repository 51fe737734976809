"""Whether a schedule can be run: complete, free of deadlock, and what it makes each rank hold. Errors show the place.

That its *program* never blocks, whatever the rule by which a transport pairs sends and receives, follows from how
`motet.schedule.lower` places messages; `motet.schedule.queue_rules` executes it under each rule to show it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from motet.schedule.action import Compute, Kind
from motet.schedule.dependencies import Dependencies, SavedGraph
from motet.schedule.order import check_acyclic
from motet.schedule.routes import Cell
from motet.schedule.schedule import Schedule, grid


class IncompleteScheduleError(ValueError):
    """An action is missing, stands twice, or stands where it does not belong. The message marks the place."""


@dataclass(frozen=True)
class Liveness:
    """The most that each rank holds at once between forwards and backwards."""

    peak_activations: tuple[int, ...]
    """Microbatches whose forward has begun and whose backward has not ended, over all stages of the rank."""
    peak_bytes: tuple[int, ...] | None
    """The same in bytes, if sizes were given."""


def validate(
    schedule: Schedule, dependencies: Dependencies, saved_bytes: Callable[[Cell, bool], int] | None = None
) -> Liveness:
    """Checks that the schedule has all it needs and can run. Independent of how long anything takes.

    `saved_bytes(cell, half)`: as `motet.simulator.costs.Costs` has it.
    Raises `IncompleteScheduleError`, or `CyclicScheduleError` if actions wait for each other.
    """
    check_complete(schedule, dependencies)
    check_acyclic(schedule, dependencies)
    return liveness(schedule, dependencies, saved_bytes)


def check_complete(schedule: Schedule, dependencies: Dependencies) -> None:
    """Every forward exactly once on each rank of its stage; every backward too, whole or as its two halves; no more."""
    routes = dependencies.routes
    if len(schedule.ranks) != routes.plan.num_ranks:
        raise IncompleteScheduleError(
            f"the schedule has {len(schedule.ranks)} ranks, but the plan has {routes.plan.num_ranks}"
        )
    cells_of_rank: list[set[Cell]] = [set() for _ in schedule.ranks]
    for cell in routes.cells:
        for rank in routes.stage(cell).ranks:
            cells_of_rank[rank].add(cell)
    split: dict[Cell, set[bool]] = defaultdict(set)
    for rank, actions in enumerate(schedule.ranks):
        count = Counter(actions)
        for place, action in enumerate(actions):
            kind, cell = action
            if cell not in cells_of_rank[rank]:
                fault = f"{action} does not belong on rank {rank}"
            elif count[action] > 1 and action in actions[:place]:
                fault = f"{action} stands {count[action]} times on rank {rank}"
            elif kind is not Kind.FORWARD and cell not in routes.with_backward:
                fault = f"{action} has nothing to compute a gradient for"
            elif kind is Kind.BACKWARD and {Compute(Kind.INPUT, cell), Compute(Kind.WEIGHT, cell)} & count.keys():
                fault = f"{action} stands beside its own half"
            else:
                if kind is not Kind.FORWARD:
                    split[cell].add(kind is not Kind.BACKWARD)
                continue
            raise IncompleteScheduleError(f"{fault}:\n{grid(schedule.ranks, {rank: place})}")
        for cell in sorted(cells_of_rank[rank]):
            for missing in _missing(cell, count, backward=cell in routes.with_backward):
                raise IncompleteScheduleError(
                    f"{missing} is missing on rank {rank}:\n{grid(schedule.ranks, {rank: len(actions)})}"
                )
    for cell, ways in split.items():
        if len(ways) > 1:
            raise IncompleteScheduleError(f"{Compute(Kind.BACKWARD, cell)} is split on some ranks and not on others")


def _missing(cell: Cell, count: Counter[Compute], *, backward: bool) -> list[Compute]:
    required = [Compute(Kind.FORWARD, cell)]
    if backward:
        halves = [Compute(Kind.INPUT, cell), Compute(Kind.WEIGHT, cell)]
        required += halves if any(count[half] for half in halves) else [Compute(Kind.BACKWARD, cell)]
    return [action for action in required if not count[action]]


def liveness(
    schedule: Schedule, dependencies: Dependencies, saved_bytes: Callable[[Cell, bool], int] | None = None
) -> Liveness:
    """What the order of each rank's actions alone makes it hold of activations saved for the backward."""
    peak_activations, peak_bytes = [], []
    for actions in schedule.ranks:
        count = size = peak_count = peak_size = 0
        for action in actions:
            changes = [(value, -1) for value in dependencies.reads(action) if isinstance(value, SavedGraph)]
            changes += [(value, +1) for value in dependencies.writes(action) if isinstance(value, SavedGraph)]
            for graph, sign in changes:
                count += 0 if graph.half else sign
                size += sign * saved_bytes(graph.cell, graph.half) if saved_bytes else 0
            peak_count, peak_size = max(peak_count, count), max(peak_size, size)
        peak_activations.append(peak_count)
        peak_bytes.append(peak_size)
    return Liveness(tuple(peak_activations), tuple(peak_bytes) if saved_bytes else None)
