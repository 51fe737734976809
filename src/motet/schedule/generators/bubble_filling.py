"""Encoders on the language model's ranks, in its bubbles (Optimus: Feng et al. 2025, sections 4.2 and 4.3).

The language model keeps its own order: 1F1B, or interleaved 1F1B where its stages go round their groups. The encoders'
actions go before it, after it and into the gaps between (`fill_bubbles`). Tried out are by how many microbatches their
forwards go ahead (all of them is the paper's coarse schedule), by how much they may outlast a gap, and both of the
language model's warm-ups (the paper takes the adjusted one, Figure 12); for small problems the list scheduler's own
order too. The shortest iteration on a virtual clock, on which messages take no time, counts.

The paper fills gaps with kernels; here it is whole actions, so layer granularity needs a plan that cuts encoders into
stages of one layer (several in a row on the same ranks). Where the paper sorts the encoder pipelines' results (global
ordering) the assignment says which microbatch is for which. TP bubbles and communication are not seen here.

A `memory` limit applies to encoder microbatches, in what the language model's own order leaves; it is lifted where that
order needs more of them at once. Without colocated encoders, and where the language model has no closed form, this is
interleaved 1F1B with the adjusted warm-up.
"""

from collections.abc import Iterable
from functools import lru_cache
from math import inf

from motet.ragged_arrays import Ints
from motet.schedule.action import Durations, unit_duration
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.fill_bubbles import BubblesToFill, FillingClock, Policy
from motet.schedule.generators.interleaved_1f1b import interleaved_1f1b_adjusted, order_in_rounds
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.order import iteration_s
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule
from motet.schedule.stage_graph import microbatches_in_flight, most_actions, shares_ranks_with_encoders
from motet.schedule.validate import liveness

MAX_LISTED = 2000
"""Actions of one pipeline, up to which list scheduling is tried too: it takes longer and is seldom better."""
LATENESS = (0.0, 1.0)
"""Tried beside the default."""


def bubble_filling(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs`: how long gaps and what fills them are; by default a backward takes twice as long as a forward."""
    return _bubble_filling(routes, costs, memory)


@lru_cache(maxsize=1)  # Whoever tries schedules out asks for the same again: zero-bubble ones split this one.
def _bubble_filling(routes: Routes, costs: Durations | None, memory: MemoryLimit | None) -> Schedule:
    dependencies, duration_s = Dependencies(routes), costs or unit_duration
    usual, adjusted = (order_beside_encoders(routes, forwards_per_place) for forwards_per_place in (2, 1))
    if usual is None or adjusted is None:
        return _without_fillings(routes, costs, memory)
    bubbles = BubblesToFill(dependencies, usual, duration_s, memory)
    best = _best(bubbles, map(Policy, _lookaheads(routes)))
    best = _best(bubbles, [best[1].policy._replace(lateness=late) for late in LATENESS], best)
    # Of equals the usual warm-up is taken: it leaves more time for messages.
    bubbles = BubblesToFill(dependencies, adjusted, duration_s, memory)
    time_s, clock = _best(bubbles, [best[1].policy], best)
    if most_actions(routes) > MAX_LISTED:
        return clock.schedule()
    listed = list_schedule(routes, costs, in_flight=microbatches_in_flight(routes), memory=memory)
    return listed if iteration_s(listed, dependencies, duration_s) < time_s else clock.schedule()


def order_beside_encoders(routes: Routes, forwards_per_place: int) -> list[tuple[tuple[int, ...], Ints]] | None:
    """The closed form of all modules but the encoders; None if no encoder is on their ranks, or they have none."""
    encoders = {name for name, module in routes.plan.modules.items() if module.kind == "encoder"}
    if not shares_ranks_with_encoders(routes.plan):
        return None
    return order_in_rounds(routes, routes.plan.modules.keys() - encoders, forwards_per_place)


def _without_fillings(routes: Routes, costs: Durations | None, memory: MemoryLimit | None) -> Schedule:
    """The closed form, if there is one and it keeps the limit."""
    closed = interleaved_1f1b_adjusted(routes, costs)
    if memory is None:
        return closed
    peaks = liveness(closed, Dependencies(routes), lambda cell, half: memory.saved_bytes(cell)).peak_bytes or ()
    fits = all(peak <= memory.limit_bytes(rank) for rank, peak in enumerate(peaks))
    return closed if fits else interleaved_1f1b_adjusted(routes, costs, memory=memory)


Run = tuple[float, FillingClock]
"""The iteration in seconds, and the clock that has run."""


def _best(bubbles: BubblesToFill, policies: Iterable[Policy], best: Run | None = None) -> Run:
    """The shortest iteration under these policies, if it is shorter than the `best` so far; the first of equal ones."""
    for policy in policies:
        clock = FillingClock(bubbles, policy)
        time_s = clock.run(inf if best is None else best[0])
        if best is None or time_s < best[0]:
            best = time_s, clock
    assert best is not None, "there are policies"
    return best


def _lookaheads(routes: Routes) -> list[int]:
    """One, two, and all microbatches: between two and all little changes."""
    most = 1 + int(routes.cell_microbatch.max(initial=0))
    return sorted({1, min(2, most), most})
