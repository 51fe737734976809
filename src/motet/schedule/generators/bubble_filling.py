"""Encoders on the language model's ranks, in its bubbles (Optimus: Feng et al. 2025, sections 4.2 and 4.3).

The language model keeps its own order: 1F1B, or interleaved 1F1B where its stages go round their groups. The encoders'
actions go before it, after it and into the gaps between (`fill_bubbles`). Tried out are both of the language model's
warm-ups (the paper takes the adjusted one, Figure 12), by how many microbatches encoder forwards go ahead, from one up
to all of them, which is the paper's coarse schedule, by how much they may outlast a gap, and the list scheduler's own
order. The shortest iteration on a virtual clock, on which messages take no time, counts.

The paper fills gaps with kernels; here it is whole actions, so layer granularity needs a plan that cuts encoders into
stages of one layer (several in a row on the same ranks). Where the paper sorts the encoder pipelines' results (global
ordering) the assignment says which microbatch is for which. TP bubbles and communication are not seen here.

A `memory` limit applies to encoder microbatches, in what the language model's own order leaves; it is lifted where that
order needs more of them at once. Without colocated encoders, and where the language model has no closed form, this is
interleaved 1F1B with the adjusted warm-up.
"""

from collections.abc import Iterable
from math import inf
from operator import itemgetter

from motet.arrays import Ints
from motet.schedule.action import Durations, unit_duration
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.fill_bubbles import BubblesToFill, FillingClock, Policy
from motet.schedule.generators.interleaved_1f1b import interleaved_1f1b_adjusted, order_in_rounds
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.order import iteration_s
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule
from motet.schedule.stage_graph import microbatches_in_flight

WARM_UPS = (2, 1)
"""The usual and the adjusted one. Of equals the usual is taken: it leaves more time for messages."""
LATENESS = (0.0, 1.0)
"""Tried beside the default."""


def bubble_filling(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs`: how long gaps and what fills them are; by default a backward takes twice as long as a forward."""
    dependencies, duration_s = Dependencies(routes), costs or unit_duration
    shortest_s, shortest = inf, None
    for warm_up in WARM_UPS:
        given = order_beside_encoders(routes, warm_up)
        if given is None:
            return interleaved_1f1b_adjusted(routes, costs, memory=memory)
        bubbles = BubblesToFill(dependencies, given, duration_s, memory)
        time_s, clock = _best(bubbles, map(Policy, _lookaheads(routes)))
        others = [clock.policy._replace(lateness=lateness) for lateness in LATENESS]
        time_s, clock = min((time_s, clock), _best(bubbles, others), key=itemgetter(0))
        if time_s < shortest_s:
            shortest_s, shortest = time_s, clock
    listed = list_schedule(routes, costs, in_flight=microbatches_in_flight(routes), memory=memory)
    is_shorter = shortest is None or iteration_s(listed, dependencies, duration_s) < shortest_s
    return listed if shortest is None or is_shorter else shortest.schedule()


def order_beside_encoders(routes: Routes, forwards_per_place: int) -> list[tuple[tuple[int, ...], Ints]] | None:
    """The closed form of all modules but the encoders; None if no encoder is on their ranks, or they have none."""
    encoders = {name for name, module in routes.plan.modules.items() if module.kind == "encoder"}
    rest = routes.plan.modules.keys() - encoders
    held = {rank for name, *_, stage in routes.plan.stages() if name in rest for rank in stage.ranks}
    if all(held.isdisjoint(stage.ranks) for name, *_, stage in routes.plan.stages() if name in encoders):
        return None
    return order_in_rounds(routes, rest, forwards_per_place)


def _best(bubbles: BubblesToFill, policies: Iterable[Policy]) -> tuple[float, FillingClock]:
    """The shortest iteration in seconds, and its clock; the first of equal ones."""
    clocks = [FillingClock(bubbles, policy) for policy in policies]
    times_s = [clock.run() for clock in clocks]
    shortest = min(range(len(clocks)), key=times_s.__getitem__)
    return times_s[shortest], clocks[shortest]


def _lookaheads(routes: Routes) -> list[int]:
    """1, 2, 4, ... and all microbatches."""
    most = 1 + int(routes.cell_microbatch.max(initial=0))
    return [*(2**i for i in range((most - 1).bit_length())), most]
