"""Eager 1F1B: forwards run ahead, as far as memory allows, before one forward and one backward alternate.

A stage with d stages between it and the sink begins with 2 d forwards instead of d (Zhuang et al. 2023, "On Optimizing
the Communication of Model Parallelism", section 4). There is a microbatch in hand then while the next one's tokens or
gradients are on their way, or come late because they were deferred (Entrain, thesis section 4.5.3). A limit in bytes
makes it fewer. On ranks that stages share, each keeps room for one microbatch of the others.

Deviation: the thesis runs as many forwards ahead as fit. With much memory that is GPipe's order, in which backwards
come late: in the simulations of benchmarks/balanced_data.py it was slower.
"""

from motet.schedule.action import Durations
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.fill_weights import is_within
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.generators.turns import one_group
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule, schedule_of_groups
from motet.schedule.stage_graph import StageKey, cuts_alike, distances_to_sink, microbatches_in_flight, shares_ranks


def eager_1f1b(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """A limit that is too small for what a consumer needs at once is lifted there."""
    if not shares_ranks(routes) and cuts_alike(routes):
        distances = distances_to_sink(routes)
        schedule = schedule_of_groups(
            Dependencies(routes),
            [
                (stage.planned.ranks, one_group(routes, [stage], 2 * distances[StageKey(*stage[:3])]))
                for stage in routes.stages
            ],
        )
        if memory is None or is_within(schedule, routes, memory):
            return schedule
    in_flight = {stage: 2 * number - 1 for stage, number in microbatches_in_flight(routes).items()}
    return list_schedule(routes, costs, in_flight=in_flight, memory=memory)
