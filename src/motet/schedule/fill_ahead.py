"""Adds run-ahead to any schedule: what encoders kept is handed on first, and the next batch's forwards fill bubbles.

A generator is shown the batch's own cells alone, without those that ran in the iteration before: the language model
waits for no encoder that ran ahead. Its order stays as it is. On a clock that knows expected durations,

1. each rank begins with what the iteration before has kept: this takes no time;
2. each forward of the next batch, microbatch by microbatch, takes the first gap in which all ranks of its stage are
   free for as long as it takes, or else follows the last action.

So no action of the batch itself is expected to begin later. Gaps after a rank's last own forward are preferred (the
cool-down, where the memory of activations is being freed); earlier ones are used if the iteration is shorter then.

It is valid: own actions by their ends and added forwards by their begins stand in an order in which nothing waits for
what comes behind it.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from motet.ragged_arrays import Floats, Ints
from motet.schedule.action import Durations, unit_duration
from motet.schedule.dependencies import Dependencies
from motet.schedule.order import seconds_of_actions, times_s
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule


def schedule_with_next_batch(
    routes: Routes, duration_s: Durations | None, make: Callable[[Routes, Durations | None], Schedule]
) -> Schedule:
    """`make`: the generator, for the batch's own cells."""
    is_own = ~(routes.cell_is_ahead | routes.cell_ran_before)
    own_cells = np.flatnonzero(is_own)
    own = Dependencies(routes.selected(is_own))
    # Not the model's own method: `seconds_of_actions` would take the model's durations by number, which count the
    # cells of all routes.
    one_by_one = None if duration_s is None else lambda action: duration_s(action)
    schedule = make(own.routes, one_by_one)
    starts, ends = times_s(schedule, own, one_by_one or unit_duration)
    dependencies = Dependencies(routes)
    seconds = seconds_of_actions(np.flatnonzero(routes.cell_is_ahead), dependencies, duration_s or unit_duration)
    of_rank = schedule.numbers(own)
    units = _Units(routes, of_rank)
    lists = [_OwnActions.of(of_rank[rank], starts, ends, own_cells, routes.num_cells) for rank in units.first_rank]
    in_cool_down = _filled(routes, units, lists, seconds, [own.after_forwards_s for own in lists])
    anywhere = _filled(routes, units, lists, seconds, [0.0] * len(lists))
    filled = in_cool_down if in_cool_down.end_s <= max(anywhere.end_s, float(ends.max(initial=0.0))) else anywhere
    handed_on = np.flatnonzero(routes.cell_ran_before)
    result = []
    for own_actions, added, stages in zip(lists, filled.added, units.stages, strict=True):
        first = handed_on[np.isin(routes.cell_stage[handed_on], stages)]
        # Each added forward stands behind the own actions that have ended when it begins.
        moments = np.concatenate([own_actions.ends, [begin_s for begin_s, _ in added]])
        order = np.argsort(moments, kind="stable")
        rest = np.concatenate([own_actions.numbers, np.array([cell for _, cell in added], dtype=np.int64)])[order]
        result.append(np.concatenate([first, rest]))
    return Schedule.of_numbers(dependencies, [result[unit] for unit in units.of_rank])


class _OwnActions(NamedTuple):
    """The batch's own actions on a rank, in their order."""

    numbers: Ints
    """Among all actions of the iteration."""
    starts: list[float]
    """Ends without durations, so rounded."""
    ends: list[float]
    """Ascending."""
    after_forwards_s: float
    """End of the last forward."""

    @staticmethod
    def of(numbers: Ints, starts: Floats, ends: Floats, own_cells: Ints, num_cells: int) -> "_OwnActions":
        """`numbers`: among the own actions."""
        kind, cell = np.divmod(numbers, max(1, len(own_cells)))
        forward_ends = ends[numbers[kind == 0]]
        return _OwnActions(
            numbers=kind * num_cells + own_cells[cell] if len(numbers) else numbers,
            starts=starts[numbers].tolist(),
            ends=ends[numbers].tolist(),
            after_forwards_s=float(forward_ends.max(initial=0.0)),
        )


class _Units:
    """Ranks that hold the same stages and execute the same own actions."""

    def __init__(self, routes: Routes, of_rank: tuple[Ints, ...]) -> None:
        held: list[list[int]] = [[] for _ in of_rank]
        for s, stage in enumerate(routes.stages):
            for rank in stage.planned.ranks:
                held[rank].append(s)
        keys = [(id(numbers), *stages) for numbers, stages in zip(of_rank, held, strict=True)]
        number = {key: unit for unit, key in enumerate(dict.fromkeys(keys))}
        self.of_rank = [number[key] for key in keys]
        self.first_rank = [self.of_rank.index(unit) for unit in range(len(number))]
        self.stages = [held[rank] for rank in self.first_rank]
        self.of_stage = [sorted({self.of_rank[rank] for rank in stage.planned.ranks}) for stage in routes.stages]


class _Filled(NamedTuple):
    added: list[list[tuple[float, int]]]
    """By unit: begin and cell of the forwards that it runs ahead, in order."""
    end_s: float


def _filled(
    routes: Routes, units: _Units, own: list[_OwnActions], seconds: Floats, not_before_s: list[float]
) -> _Filled:
    """Puts each cell of the next batch into the first gap of all its units that is long enough."""
    busy = [sorted(zip(actions.starts, actions.ends, strict=True)) for actions in own]
    added: list[list[tuple[float, int]]] = [[] for _ in own]
    end_s = [0.0] * routes.num_cells
    sources = routes.route_source
    cells = np.flatnonzero(routes.cell_is_ahead)
    in_order = cells[np.lexsort((cells, routes.cell_microbatch[cells]))]
    for cell in in_order.tolist():
        members = units.of_stage[routes.cell_stage[cell]]
        begin_s = max(not_before_s[unit] for unit in members)
        for route in routes.routes_in[cell].tolist():
            begin_s = max(begin_s, end_s[int(sources[route])])
        begin_s = _first_gap_s([busy[unit] for unit in members], begin_s, float(seconds[cell]))
        end_s[cell] = begin_s + float(seconds[cell])
        for unit in members:
            busy[unit].insert(bisect_right(busy[unit], (begin_s, end_s[cell])), (begin_s, end_s[cell]))
            added[unit].append((begin_s, cell))
    return _Filled([sorted(each) for each in added], max(end_s, default=0.0))


def _first_gap_s(busy: list[list[tuple[float, float]]], begin_s: float, duration_s: float) -> float:
    """The first moment from `begin_s` on at which all are free for so long. `busy`: (begin, end) in order."""
    while True:
        later_s = begin_s
        for spans in busy:
            place = bisect_right(spans, (later_s, float("inf")))
            if place and spans[place - 1][1] > later_s:
                later_s = spans[place - 1][1]
                place = bisect_right(spans, (later_s, float("inf")))
            while place < len(spans) and spans[place][0] < later_s + duration_s:
                later_s = max(later_s, spans[place][1])
                place += 1
        if later_s == begin_s:
            return begin_s
        begin_s = later_s
