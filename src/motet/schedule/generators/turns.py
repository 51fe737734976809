"""Building blocks of closed-form schedules: a stage's turns, one per microbatch, and their order in 1F1B.

Turns are numbers of actions; where a microbatch gives a stage nothing to do, its turn is empty (`NOTHING`). Empty turns
keep the places of the others, so a form that cannot deadlock with all turns cannot without some of them.
"""

from collections import defaultdict
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from motet.plan import Plan
from motet.ragged_arrays import Ints
from motet.schedule.action import Kind
from motet.schedule.dependencies import KINDS, NOTHING
from motet.schedule.routes import Routes, StageCells
from motet.schedule.stage_graph import Group, StageKey, stages_after


def num_microbatches(routes: Routes, stage: StageCells) -> int:
    """Includes empty ones, except those after the last non-empty one."""
    return 1 + int(routes.cell_microbatch[stage.last - 1])


def forward_turns(routes: Routes, stage: StageCells, num_turns: int) -> Ints:
    """The stage's forwards by microbatch."""
    turns = np.full(num_turns, NOTHING)
    turns[routes.cell_microbatch[stage.first : stage.last]] = np.arange(stage.first, stage.last)
    return turns


def backward_turns(routes: Routes, stage: StageCells, num_turns: int) -> Ints:
    """The stage's whole backwards by microbatch."""
    cells = stage.first + np.flatnonzero(routes.cell_has_backward[stage.first : stage.last])
    turns = np.full(num_turns, NOTHING)
    turns[routes.cell_microbatch[cells]] = KINDS.index(Kind.BACKWARD) * routes.num_cells + cells
    return turns


def alternate(forwards: Ints, backwards: Ints, num_warm_up: int) -> Ints:
    """`num_warm_up` forwards, then one forward and one backward in turn, then what is left of the backwards.

    Turns of several actions are rows: arrays of shape [turns, actions]."""
    shape = forwards.shape[1:] or (1,)
    pairs = np.full((num_warm_up + len(backwards), 2, *shape), NOTHING)
    pairs[: len(forwards), 0] = forwards.reshape(-1, *shape)
    pairs[num_warm_up:, 1] = backwards.reshape(-1, *shape)
    return pairs[pairs != NOTHING]


def one_group(routes: Routes, stages: Sequence[StageCells], num_warm_up: int) -> Ints:
    """Actions of a group with these stages (in topological order) in 1F1B: a turn takes a microbatch through all of
    them."""
    num_turns = max(num_microbatches(routes, stage) for stage in stages)
    forwards = np.stack([forward_turns(routes, stage, num_turns) for stage in stages], axis=1)
    backwards = np.stack([backward_turns(routes, stage, num_turns) for stage in reversed(stages)], axis=1)
    return alternate(forwards, backwards, min(num_warm_up, num_turns))


# Turns of contrasted towers with their batch-syncs. A batch-sync (DistMM section 5.4) is the loss's forward and
# backward for one contrastive batch. It reads the features of that batch's K microbatches, of all replicas of all
# towers, and their backwards wait for it. So it stands, on the last stage of every tower, in the turn of the
# microbatch that completes the contrastive batch. Nothing else joins the towers.


class TowerTurns(NamedTuple):
    """Turns of one group of ranks."""

    ranks: Group
    forwards: Ints
    """[turns, actions]: a turn takes a microbatch through the group's stages; on last ones, batch-syncs follow."""
    backwards: Ints
    """[turns, actions], as many actions as `forwards` has."""
    per_batch: int
    """K: turns of one contrastive batch."""
    num_after: int
    """Stages after the group's in its towers."""


def tower_turns(routes: Routes) -> list[TowerTurns] | None:
    """Returns the turns of towers; None if there is no closed form: without a loss, with modules beside the towers,
    where groups overlap in part, or hold stages of towers that are not cut alike."""
    plan = routes.plan
    towers = {edge.source for edge in plan.edges if edge.target == plan.loss_module}
    if plan.modules.keys() - towers != {plan.loss_module} or len(plan.edges) != len(towers):
        return None
    groups: dict[Group, list[StageCells]] = defaultdict(list)
    for stage in routes.stages:
        if stage.module in towers:
            groups[tuple(sorted(stage.planned.ranks))].append(stage)
    if sum(map(len, groups)) != len({rank for group in groups for rank in group}):
        return None
    for stages in groups.values():
        if len({(_num_after(plan, stage), plan.num_microbatches_of(stage.module)) for stage in stages}) > 1:
            return None
    return [_turns_of_group(routes, group, stages) for group, stages in groups.items()] + _without_features(
        routes, {rank for group in groups for rank in group}
    )


def _without_features(routes: Routes, others: Set[int]) -> list[TowerTurns]:
    """Members of the loss to which a small batch leaves no microbatch of their tower: they take part all the same."""
    syncs = [stage for stage in routes.stages if stage.module == routes.plan.loss_module]
    members = tuple(rank for stage in syncs for rank in stage.planned.ranks if rank not in others)
    if not members:
        return []
    forwards = np.stack(_batch_syncs(routes, num_microbatches(routes, syncs[0]), 1), axis=1)
    return [TowerTurns(members, forwards, np.full_like(forwards, NOTHING), 1, 0)]


def microbatches_per_batch(plan: Plan, module: str) -> int:
    """K: the microbatches of a module's replica in one contrastive batch. The plan must have a loss."""
    assert plan.loss_module is not None
    return plan.num_microbatches_of(module) // plan.num_microbatches_of(plan.loss_module)


def in_flight_without_loss(routes: Routes) -> dict[StageKey, int]:
    """1F1B's microbatches in flight: one, and one for each stage after it on the longest way, counted in microbatches
    of the stage's own module. The loss is no stage of its own: it is on the last stages' ranks."""
    plan = routes.plan
    after: dict[StageKey, int] = {}
    for stage, targets in reversed(stages_after(routes).items()):
        own = plan.num_microbatches_of(stage.module)
        after[stage] = max(
            (
                -(-(1 + after[target]) * own // plan.num_microbatches_of(target.module))
                for target in targets
                if target.module != plan.loss_module
            ),
            default=0,
        )
    return {stage: 1 + number for stage, number in after.items()}


def stages_before_the_loss(routes: Routes) -> set[StageKey]:
    """Returns the stages whose backwards wait for batch-syncs: those of towers, not of a decoder that reads one."""
    found: set[StageKey] = set()
    for stage, targets in reversed(stages_after(routes).items()):
        if any(target in found or target.module == routes.plan.loss_module for target in targets):
            found.add(stage)
    return found


def _turns_of_group(routes: Routes, group: Group, stages: list[StageCells]) -> TowerTurns:
    plan = routes.plan
    num_turns = plan.num_microbatches_of(stages[0].module)
    per_batch, num_after = microbatches_per_batch(plan, stages[0].module), _num_after(plan, stages[0])
    forwards = [forward_turns(routes, stage, num_turns) for stage in stages]
    if num_after == 0:
        forwards += _batch_syncs(routes, num_turns, per_batch)
    backwards = [backward_turns(routes, stage, num_turns) for stage in reversed(stages)]
    backwards += [np.full(num_turns, NOTHING)] * (len(forwards) - len(backwards))
    return TowerTurns(group, np.stack(forwards, axis=1), np.stack(backwards, axis=1), per_batch, num_after)


def _batch_syncs(routes: Routes, num_turns: int, per_batch: int) -> list[Ints]:
    """The loss's forwards and backwards, by turns."""
    (loss,) = (stage for stage in routes.stages if stage.module == routes.plan.loss_module)
    result = []
    for turns_of in (forward_turns, backward_turns):
        turns = np.full(num_turns, NOTHING)
        turns[per_batch - 1 :: per_batch] = turns_of(routes, loss, num_turns // per_batch)
        result.append(turns)
    return result


def _num_after(plan: Plan, stage: StageCells) -> int:
    return len(plan.modules[stage.module].replicas[stage.replica].stages) - 1 - stage.stage
