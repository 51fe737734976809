"""Planners: from a problem to a plan. A new one is a file here, an entry in `PLANNERS` and a test."""

from collections.abc import Mapping
from typing import Protocol

from motet.errors import UserError, closest
from motet.plan import Plan
from motet.planner.alpa import alpa
from motet.planner.auto.planner import auto
from motet.planner.baselines import (
    cornstarch,
    encoders_colocated,
    encoders_replicated,
    even,
    frozen_unaware,
    proportional,
)
from motet.planner.degrees import check_limits, check_may_share_none, check_within_limits
from motet.planner.device_counts import on_best_count
from motet.planner.distmm.planner import distmm
from motet.planner.disttrain.planner import disttrain
from motet.planner.entrain.planner import entrain
from motet.planner.explicit import Placement, explicit_plan
from motet.planner.fsdp import fsdp
from motet.planner.megatron import megatron, megatron_balanced, megatron_extra_stages
from motet.planner.optimus.planner import optimus
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.templates.planner import oobleck


class Planner(Protocol):
    def __call__(self, problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
        """`placement` None: the planner's own choice."""


PLANNERS: Mapping[str, Planner] = {
    "cornstarch": cornstarch,
    "disttrain": disttrain,
    "distmm": distmm,
    "entrain": entrain,
    "frozen_unaware": frozen_unaware,
    "even": even,
    "optimus": optimus,
    "oobleck": oobleck,
    "encoders_colocated": encoders_colocated,
    "encoders_replicated": encoders_replicated,
    "megatron": megatron,
    "megatron_extra_stages": megatron_extra_stages,
    "megatron_balanced": megatron_balanced,
    "alpa": alpa,
    "fsdp": fsdp,
    "proportional": proportional,
    "auto": auto,
}
"""Those that choose the degrees themselves; `explicit` takes them from the user."""
SHARE_CONTEXT = ("auto", "oobleck")
"""Those that choose context parallelism."""
ON_ALL = ("auto", "disttrain", "distmm", "fsdp", "oobleck")
"""Those that are asked about all devices only: they choose how many they use, or are made for all of them."""


def make_plan(
    problem: PlanningProblem,
    planner: str = "cornstarch",
    *,
    degrees: Mapping[str, Degrees] | None = None,
    placement: Placement | None = None,
) -> Plan:
    """The planner's plan. `degrees`: for planner `explicit`, of every module.

    Raises `ValueError` for a planner that is not known, and for what no plan can satisfy."""
    if planner == "explicit":
        if degrees is None:
            raise UserError("parallel.explicit: is empty; give tp, pp and dp of every module, or a planner's name")
        return explicit_plan(problem, degrees, placement=placement or "parallel")
    if planner not in PLANNERS:
        near = closest(planner.lower(), ["explicit", *PLANNERS], "give one of")
        raise UserError(f"parallel.planner: {planner!r} is not known; {near}")
    if problem.loss_module is not None and planner not in ("distmm", "auto"):
        raise UserError(
            f"parallel.planner: {planner} lays out encoders and a language model, but the model has towers that a loss "
            "contrasts; give distmm, auto or explicit"
        )
    check_limits(problem)
    return plan_within_limits(problem, planner, placement=placement)


def plan_within_limits(problem: PlanningProblem, planner: str, *, placement: Placement | None = None) -> Plan:
    """What the planner of this name finds. Raises `UserError` if it finds none within the user's limits on degrees."""
    if planner not in SHARE_CONTEXT:
        check_may_share_none(problem, planner)
    plan = plan_of(planner, problem, placement=placement)
    check_within_limits(problem, plan)
    return plan


def plan_of(name: str, problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """One of `PLANNERS`' plan, on fewer devices where that is faster."""
    if name in ON_ALL:
        return PLANNERS[name](problem, placement=placement)
    return on_best_count(PLANNERS[name], problem, placement=placement)
