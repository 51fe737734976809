"""1F1B over a DAG of modules (PipeDream-Flush, Narayanan et al. 2021, section 2.2; over modalities, Cornstarch 4.1).

A stage begins with as many forwards as there are stages on the longest way from it to the sink, then alternates one
forward and one backward, then ends with the backwards that are left. What a microbatch has no need of (an encoder's
forward where there is no image, a backward where nothing before is trainable) is left out, its turn stays empty.

That this cannot deadlock needs only that the number of warm-up forwards falls along every edge, that microbatch i feeds
microbatch i, and that no rank holds two stages. Otherwise the list scheduler takes over, under the same limit on
microbatches in flight.
"""

from collections.abc import Sequence
from itertools import chain, repeat, zip_longest

from motet.schedule.action import Compute, Durations, Kind
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.routes import Cell, Routes
from motet.schedule.schedule import Schedule, schedule_of_stages
from motet.schedule.stage_graph import (
    cells_of_stages,
    cuts_alike,
    distances_to_sink,
    microbatches_in_flight,
    shares_ranks,
)


def one_f_one_b(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs` and `memory` matter only where the closed form does not hold."""
    if memory is not None or shares_ranks(routes) or not cuts_alike(routes):
        return list_schedule(routes, costs, in_flight=microbatches_in_flight(routes), memory=memory)
    warm_up = distances_to_sink(routes)
    order = {stage: one_stage(cells, routes, warm_up[stage]) for stage, cells in cells_of_stages(routes).items()}
    return schedule_of_stages(routes, order)


def one_stage(cells: Sequence[Cell], routes: Routes, num_warm_up: int) -> list[Compute]:
    """What a stage executes, with its cells by microbatch."""
    num_microbatches = 1 + cells[-1].microbatch
    return alternate(forwards_of(cells, num_microbatches), backwards_of(cells, num_microbatches, routes), num_warm_up)


Turns = Sequence[Compute | None]
"""One turn per microbatch; None where there is nothing to do."""


def alternate(forwards: Turns, backwards: Turns, num_warm_up: int) -> list[Compute]:
    """`num_warm_up` forwards, then one forward and one backward in turn, then what is left of the backwards."""
    steady = chain.from_iterable(zip_longest(forwards[num_warm_up:], backwards))
    return [action for action in chain(forwards[:num_warm_up], steady) if action]


def forwards_of(cells: Sequence[Cell], num_microbatches: int) -> Turns:
    """A stage's forwards by microbatch."""
    return _by_microbatch(Kind.FORWARD, cells, num_microbatches)


def backwards_of(cells: Sequence[Cell], num_microbatches: int, routes: Routes) -> Turns:
    """A stage's backwards by microbatch."""
    return _by_microbatch(Kind.BACKWARD, [cell for cell in cells if cell in routes.with_backward], num_microbatches)


def _by_microbatch(kind: Kind, cells: Sequence[Cell], num_microbatches: int) -> Turns:
    actions = list(map(Compute, repeat(kind), cells))
    if len(actions) == num_microbatches:
        return actions
    turns: list[Compute | None] = [None] * num_microbatches
    for action in actions:
        turns[action.cell.microbatch] = action
    return turns
