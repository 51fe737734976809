"""1F1B over a DAG of modules (PipeDream-Flush, Narayanan et al. 2021, section 2.2; over modalities, Cornstarch 4.1).

A stage begins with as many forwards as there are stages on the longest way from it to the sink, then alternates one
forward and one backward, then ends with the backwards that are left. What a microbatch has no need of (an encoder's
forward where there is no image, a backward where nothing before is trainable) is left out, its turn stays empty.

That this cannot deadlock needs only that the number of warm-up forwards falls along every edge, that microbatch i feeds
microbatch i, and that no rank holds two stages. Otherwise the list scheduler takes over, under the same limit on
microbatches in flight.
"""

from motet.schedule.action import Durations
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.generators.turns import one_stage
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule, schedule_of_groups
from motet.schedule.stage_graph import StageKey, cuts_alike, distances_to_sink, microbatches_in_flight, shares_ranks


def one_f_one_b(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs` and `memory` matter only where the closed form does not hold."""
    if memory is not None or shares_ranks(routes) or not cuts_alike(routes):
        return list_schedule(routes, costs, in_flight=microbatches_in_flight(routes), memory=memory)
    warm_up = distances_to_sink(routes)
    return schedule_of_groups(
        Dependencies(routes),
        [(stage.planned.ranks, one_stage(routes, stage, warm_up[StageKey(*stage[:3])])) for stage in routes.stages],
    )
