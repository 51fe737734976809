"""Encoders on the language model's ranks, in its bubbles (Optimus: Feng et al. 2025, sections 4.2 and 4.3).

The language model keeps its own order: 1F1B, or interleaved 1F1B with the adjusted warm-up where its stages go round
their groups (Figure 12). The encoders' actions go before it, after it and into the gaps between (`fill_bubbles`). By
how many microbatches encoder forwards go ahead is tried out, from one up to all of them, which is the paper's coarse
schedule; so are what gaps are filled with first, and the list scheduler's own order. The shortest iteration on a
virtual clock, on which messages take no time, counts.

The paper fills gaps with kernels; here it is whole actions, so layer granularity needs a plan that cuts encoders into
stages of one layer (several in a row on the same ranks). Where the paper sorts the encoder pipelines' results (global
ordering) the assignment says which microbatch is for which. TP bubbles and communication are not seen here.

A `memory` limit applies to encoder microbatches, in what the language model's own order leaves; it is lifted where that
order needs more of them at once. Without colocated encoders, and where the language model has no closed form, this is
interleaved 1F1B with the adjusted warm-up.
"""

from collections.abc import Iterable
from operator import itemgetter

from motet.schedule.action import Durations, unit_duration
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.fill_bubbles import BubblesToFill, FillingClock, Policy
from motet.schedule.generators.interleaved_1f1b import interleaved_1f1b_adjusted, order_in_rounds
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.order import iteration_s
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule
from motet.schedule.stage_graph import microbatches_in_flight


def bubble_filling(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs`: how long gaps and what fills them are; by default a backward takes twice as long as a forward."""
    encoders = {name for name, module in routes.plan.modules.items() if module.kind == "encoder"}
    rest = routes.plan.modules.keys() - encoders
    given = order_in_rounds(routes, rest, forwards_per_place=1) if rest else None
    held = {rank for name, *_, stage in routes.plan.stages() if name in rest for rank in stage.ranks}
    shared = any(not held.isdisjoint(s.ranks) for name, *_, s in routes.plan.stages() if name in encoders)
    if given is None or not shared:
        return interleaved_1f1b_adjusted(routes, costs, memory=memory)
    dependencies, duration_s = Dependencies(routes), costs or unit_duration
    bubbles = BubblesToFill(dependencies, given, duration_s, memory)
    first = _best(bubbles, [Policy(lookahead) for lookahead in _lookaheads(routes)])
    lookahead = first[1].policy.lookahead
    others = [Policy(lookahead, forwards_first, late) for forwards_first in (True, False) for late in (0.0, 1.0)]
    filled_s, filled = min(first, _best(bubbles, others), key=itemgetter(0))
    listed = list_schedule(routes, costs, in_flight=microbatches_in_flight(routes), memory=memory)
    return listed if iteration_s(listed, dependencies, duration_s) < filled_s else filled.schedule()


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
