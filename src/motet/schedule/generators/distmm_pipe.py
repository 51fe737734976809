"""DistMM-Pipe: 1F1B for contrastive towers, with a batch-sync for every contrastive batch (DistMM section 5.4).

The backwards of a contrastive batch of K microbatches can only begin after its batch-sync. So a stage with d stages
after it in its tower begins with K + d forwards, where 1F1B begins with d + 1, and then alternates one forward and one
backward: while the backwards of one contrastive batch run, so do the forwards of the next. The last stage always has
something to do, and with two contrastive batches or more the only bubbles are 1F1B's own. With one contrastive batch
this is GPipe.

Towers may differ in stages, replicas and K; nothing but the batch-syncs joins their schedules (schedule alignment).
Towers on the same ranks take turns there, microbatch by microbatch, if they are cut alike. For all else (other modules
beside the towers, groups that overlap in part) the list scheduler takes over, under the same limits on microbatches in
flight. The stages of a decoder that reads a tower come after that tower's, and wait for no batch-sync: 1F1B's limits
hold for them, and the tower has K - 1 microbatches more in flight than 1F1B gives it.

The paper's 2 K microbatches of half the size are an iteration of two contrastive batches: it is the plan that says how
many there are of either.
"""

from motet.schedule.action import Durations
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.generators.one_f_one_b import one_f_one_b
from motet.schedule.generators.turns import (
    alternate,
    in_flight_without_loss,
    microbatches_per_batch,
    stages_before_the_loss,
    tower_turns,
)
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule, schedule_of_groups
from motet.schedule.stage_graph import StageKey


def distmm_pipe(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs` and `memory` matter only where the closed form does not hold. Without a loss module this is 1F1B."""
    if routes.plan.loss_module is None:
        return one_f_one_b(routes, costs, memory=memory)
    groups = tower_turns(routes) if memory is None else None
    if groups is None:
        return list_schedule(routes, costs, in_flight=_in_flight(routes), memory=memory)
    # A turn's forward stands before its backward, so the first backward follows the last of K + d forwards.
    order = [
        (g.ranks, alternate(g.forwards, g.backwards, min(g.per_batch + g.num_after - 1, len(g.forwards))))
        for g in groups
    ]
    return schedule_of_groups(Dependencies(routes), order)


def _in_flight(routes: Routes) -> dict[StageKey, int]:
    """K - 1 more than 1F1B where backwards wait for a batch-sync, which is K + d in towers alone."""
    waiting = stages_before_the_loss(routes)
    return {
        key: number + (microbatches_per_batch(routes.plan, key.module) - 1 if key in waiting else 0)
        for key, number in in_flight_without_loss(routes).items()
    }
