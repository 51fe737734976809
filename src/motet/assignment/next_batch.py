"""The part of the next batch that an iteration runs ahead: forwards of encoders that need no backward.

An encoder's leading stages run ahead if their layers, and all before them, are frozen: what they compute depends on no
update, so the forwards of batch i + 1 may run in iteration i. Their output stays on the ranks that made it and is
handed on in iteration i + 1.

In an iteration that runs ahead, the next batch's samples stand behind the batch's own, and its microbatches behind the
module's own: with four microbatches, microbatch 5 is microbatch 1 of the next batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from motet.assignment.batch_assignment import BatchAssignment
from motet.assignment.sample import Sample
from motet.errors import UserError
from motet.plan import ModulePlan, Plan, Replica, Stage

NOT_FOR_TOWERS = "is not supported for contrastive towers; leave it out"
ReplicaKey = tuple[str, int]
"""Module and replica."""


class RunAhead(NamedTuple):
    """What an iteration shares with the one before and with the one after it."""

    ran_before: bool
    """Whether the iteration before ran this batch's forwards ahead; false in the first one."""
    next_assignment: BatchAssignment | None = None
    """Of the next batch, whose forwards are run ahead; None in the last iteration."""
    next_samples: Sequence[Sample] = ()


NO_RUN_AHEAD = RunAhead(ran_before=False)


def stages_ahead(plan: Plan) -> Mapping[ReplicaKey, int]:
    """Number of leading stages that run ahead, for each replica that has any."""
    if not plan.run_ahead:
        return {}
    found = {}
    for name, module in plan.modules.items():
        if may_run_ahead(plan, name):
            for r, replica in enumerate(module.replicas):
                # Layers up to a stage's end are frozen only if those up to the ends before it are.
                number = sum(not module.is_trainable((0, stage.layers[1])) for stage in replica.stages)
                if number:
                    found[name, r] = number
    return found


def may_run_ahead(plan: Plan, name: str) -> bool:
    """Whether frozen stages of this module run ahead: it is an encoder that reads no other module and has no loss."""
    module = plan.modules[name]
    return module.kind == "encoder" and not module.loss_weight and all(edge.target != name for edge in plan.edges)


def check_run_ahead(plan: Plan) -> None:
    """Raises `UserError` for a plan that says so, but whose stages cannot run ahead."""
    if plan.run_ahead and (why := why_not_ahead(plan)) is not None:
        raise UserError(f"parallel.run_ahead: {why}")


def with_run_ahead(plan: Plan) -> Plan:
    """The plan with run-ahead. Stages are cut where the frozen layers of an encoder end; both parts stay on the same
    ranks. Raises `UserError` as `check_run_ahead` does."""
    modules = {}
    for name, module in plan.modules.items():
        end = _first_trainable(module)
        replicas = module.replicas
        if may_run_ahead(plan, name) and 0 < end < module.num_layers:
            replicas = tuple(Replica(stages=_cut_at(end, replica.stages)) for replica in replicas)
        modules[name] = replace(module, replicas=replicas)
    changed = replace(plan, modules=modules, run_ahead=True)
    check_run_ahead(changed)
    return changed


def _cut_at(layer: int, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    result = []
    for stage in stages:
        first, last = stage.layers
        bounds = [first, layer, last] if first < layer < last else [first, last]
        result += [replace(stage, layers=layers) for layers in pairwise(bounds)]
    return tuple(result)


def why_not_ahead(plan: Plan) -> str | None:
    """Why no stage can run ahead, or for what it is not shown to change nothing; None if some can."""
    if plan.loss_module is not None:
        return NOT_FOR_TOWERS
    ahead = stages_ahead(replace(plan, run_ahead=True))
    if not ahead:
        return _why_none(plan)
    return None


def _why_none(plan: Plan) -> str:
    able = {name: module for name, module in plan.modules.items() if may_run_ahead(plan, name)}
    if not able:
        return "the model has no encoder that could run ahead; leave it out"
    frozen = {name: end for name, module in able.items() if (end := _first_trainable(module))}
    if not frozen:
        names = " or ".join(able)
        return f"no encoder begins with a frozen layer; freeze {names} (train.module: false), or leave it out"
    name, end = next(iter(frozen.items()))
    return (
        f"the first stage of {name} goes beyond its frozen layers, [0, {end}); let a stage end at layer {end}, or "
        "leave run_ahead out"
    )


def _first_trainable(module: ModulePlan) -> int:
    return min((first for first, _ in module.trainable), default=module.num_layers)


def joined_assignment(plan: Plan, assignment: BatchAssignment, num_samples: int, ahead: RunAhead) -> BatchAssignment:
    """The batch's own microbatches, and behind them those of the next batch that run ahead.

    `num_samples`: of the batch."""
    if ahead.next_assignment is None:
        return assignment
    replicas_ahead = stages_ahead(plan)
    following = ahead.next_assignment.microbatches
    joined = {
        name: tuple(
            (*own, *(tuple(i + num_samples for i in members) for members in following[name][r]))
            if (name, r) in replicas_ahead
            else own
            for r, own in enumerate(replicas)
        )
        for name, replicas in assignment.microbatches.items()
    }
    return BatchAssignment(joined)
