"""1F1B over a DAG of modules (PipeDream-Flush, Narayanan et al. 2021, section 2.2; over modalities, Cornstarch 4.1).

A stage begins with as many forwards as there are stages on the longest way from it to the sink, then alternates one
forward and one backward, then ends with the backwards that are left. What a microbatch has no need of (an encoder's
forward where there is no image, a backward where nothing before is trainable) is left out, its turn stays empty.

Stages on the same group of ranks are one stage here (encoders on one chain of ranks): a turn takes a microbatch
through all of them.

That this cannot deadlock needs only that the number of warm-up forwards falls along every edge, that microbatch i feeds
microbatch i, that groups of ranks are equal or have no rank in common, and that no way through the stages comes back to
a group that it has left. Otherwise the list scheduler takes over, under the same limit on microbatches in flight; so it
does if a group has, beside other stages, one whose output no stage reads, because its place is in the group's bubbles.

With contrastive towers, a stage has as many microbatches in flight as 1F1B has, or as many as a contrastive batch
needs, if these are more, and the list scheduler finds the order (DistMM Figure 6: the batch-sync without a schedule
made for it). That leaves bubbles that `motet.schedule.generators.distmm_pipe` fills.
"""

from motet.schedule.action import Durations
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.generators.turns import (
    in_flight_without_loss,
    microbatches_per_batch,
    one_group,
    stages_before_the_loss,
)
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule, schedule_of_groups
from motet.schedule.stage_graph import (
    StageKey,
    cuts_alike,
    group_distances_to_sink,
    microbatches_in_flight,
    stages_of_groups,
    unread_beside_others,
)


def one_f_one_b(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs` and `memory` matter only where the closed form does not hold."""
    if routes.plan.loss_module is not None:
        return list_schedule(routes, costs, in_flight=_for_a_contrastive_batch(routes), memory=memory)
    groups = stages_of_groups(routes)
    if memory is None and groups is not None and cuts_alike(routes) and not unread_beside_others(routes, groups):
        warm_up = group_distances_to_sink(routes, groups)
        if warm_up is not None:
            order = [(group, one_group(routes, stages, warm_up[group])) for group, stages in groups.items()]
            return schedule_of_groups(Dependencies(routes), order)
    return list_schedule(routes, costs, in_flight=microbatches_in_flight(routes), memory=memory)


def _for_a_contrastive_batch(routes: Routes) -> dict[StageKey, int]:
    waiting = stages_before_the_loss(routes)
    return {
        key: max(number, microbatches_per_batch(routes.plan, key.module)) if key in waiting else number
        for key, number in in_flight_without_loss(routes).items()
    }
