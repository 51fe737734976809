"""Validates that a schedule is complete and free of deadlock, and counts the activations that each rank holds. Errors
show the place.

That its *program* never blocks, whatever the rule by which a transport pairs sends and receives, follows from how
`motet.schedule.lower` places messages; tests execute it under the queue rules of each transport.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from motet.ragged_arrays import Ints, ranges
from motet.schedule.action import Compute, Kind
from motet.schedule.dependencies import KINDS, Dependencies
from motet.schedule.order import check_acyclic
from motet.schedule.routes import Cell, Routes
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
    if _is_complete(schedule, dependencies):
        return
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


def _is_complete(schedule: Schedule, dependencies: Dependencies) -> bool:
    """The same in a few operations for each rank. If the result is negative, the fault still has to be located."""
    routes, num_cells = dependencies.routes, dependencies.routes.num_cells
    try:
        numbers_of_rank = schedule.numbers(dependencies)
    except KeyError:
        return False
    if len(numbers_of_rank) != routes.plan.num_ranks:
        return False
    stages_of_rank: list[list[int]] = [[] for _ in numbers_of_rank]
    for i, stage in enumerate(routes.stages):
        for rank in stage.planned.ranks:
            stages_of_rank[rank].append(i)
    is_whole, is_split = np.zeros(num_cells, dtype=bool), np.zeros(num_cells, dtype=bool)
    for numbers, stages in {(id(n), *s): (n, s) for n, s in zip(numbers_of_rank, stages_of_rank, strict=True)}.values():
        cells = _cells(routes, stages)
        kind, cell = np.divmod(np.sort(numbers), max(1, num_cells))
        forwards, whole, input_halves, weight_halves = (cell[kind == k] for k in range(len(KINDS)))
        backwards = np.sort(np.concatenate([whole, input_halves]))
        if not (
            np.array_equal(forwards, cells)
            and np.array_equal(backwards, cells[routes.cell_has_backward[cells]])
            and np.array_equal(input_halves, weight_halves)
        ):
            return False
        is_whole[whole] = is_split[input_halves] = True
    return not (is_whole & is_split).any()


def _cells(routes: Routes, stages: Sequence[int]) -> Ints:
    """Checks these stages, given in their order."""
    first, last = np.array([(routes.stages[i].first, routes.stages[i].last) for i in stages] or [(0, 0)]).T
    return ranges(first, last - first)


def _missing(cell: Cell, count: Counter[Compute], *, backward: bool) -> list[Compute]:
    required = [Compute(Kind.FORWARD, cell)]
    if backward:
        halves = [Compute(Kind.INPUT, cell), Compute(Kind.WEIGHT, cell)]
        required += halves if any(count[half] for half in halves) else [Compute(Kind.BACKWARD, cell)]
    return [action for action in required if not count[action]]


def liveness(
    schedule: Schedule, dependencies: Dependencies, saved_bytes: Callable[[Cell, bool], int] | None = None
) -> Liveness:
    """Peak number of activations that each rank holds for backwards, from the order of its actions alone."""
    routes = dependencies.routes
    first_saved, num_cells = 2 * routes.num_routes, routes.num_cells
    is_held = np.zeros(2 * num_cells, dtype=bool)
    size = np.zeros(2 * num_cells, dtype=np.int64)
    of_rank = schedule.numbers(dependencies)
    lanes = {id(numbers): numbers for numbers in of_rank}
    for numbers in lanes.values():
        is_held[_graphs(dependencies.kept_write, numbers, first_saved, num_cells)[1]] = True
    if saved_bytes is not None:
        cells = routes.cells
        held = np.flatnonzero(is_held)
        size[held] = [saved_bytes(cells[graph % num_cells], graph >= num_cells) for graph in held.tolist()]
    peaks: dict[int, tuple[int, int]] = {}
    for key, numbers in lanes.items():
        # What an action reads is freed before what it writes is kept.
        count, held_bytes = np.zeros((2, 2 * len(numbers)), dtype=np.int64)
        for offset, sign, table in ((0, -1, dependencies.kept_read), (1, +1, dependencies.kept_write)):
            place, graph = _graphs(table, numbers, first_saved, num_cells)
            count[2 * place + offset] = sign * (graph < num_cells)
            held_bytes[2 * place + offset] = sign * size[graph]
        peaks[key] = (_peak(count), _peak(held_bytes))
    of_ranks = [peaks[id(numbers)] for numbers in of_rank]
    peak_bytes = tuple(peak for _, peak in of_ranks) if saved_bytes is not None else None
    return Liveness(tuple(peak for peak, _ in of_ranks), peak_bytes)


def _graphs(kept: Ints, numbers: Ints, first_saved: int, num_cells: int) -> tuple[Ints, Ints]:
    """The places in a list of actions at which a saved graph is read or written, and which: each cell's, each half."""
    graph = kept[numbers] - first_saved
    place = np.flatnonzero((graph >= 0) & (graph < 2 * num_cells))
    return place, graph[place]


def _peak(changes: Ints) -> int:
    return max(0, int(np.cumsum(changes).max())) if len(changes) else 0
