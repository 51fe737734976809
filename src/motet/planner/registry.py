"""Planners by name. To add a planner, write a file in this package, an entry in `PLANNERS` and a test."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from motet.errors import UserError, closest
from motet.plan import Plan
from motet.planner.auto import choose_among
from motet.planner.baselines import (
    cornstarch,
    encoders_colocated,
    encoders_replicated,
    even,
    frozen_unaware,
    proportional,
)
from motet.planner.choice import Choice
from motet.planner.distmm.planner import distmm
from motet.planner.disttrain.planner import disttrain
from motet.planner.ending import Progress, silent
from motet.planner.entrain.planner import entrain
from motet.planner.fsdp import fsdp
from motet.planner.layouts.degrees import check_allows_cp_1, check_limits, check_within_limits
from motet.planner.layouts.layout import Placement, explicit_plan
from motet.planner.megatron import megatron, megatron_balanced, megatron_extra_stages
from motet.planner.optimus.planner import optimus
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.selection import PlanFunction, plan_on_best_count
from motet.planner.templates.planner import oobleck


@dataclass(frozen=True, kw_only=True)
class Planner:
    plan: PlanFunction
    plans_towers: bool = False
    """Whether it plans contrastive towers."""
    chooses_cp: bool = False
    """Whether it chooses context-parallel sizes."""
    chooses_num_devices: bool = False
    """Whether it is asked once, about all devices: it chooses how many of them it uses, or always uses all."""
    limits_dp: bool = True
    """Whether its plans keep to `parallel.limits.dp`; some planners exist to find the number of replicas."""
    limits_dp_of_encoders: bool = True
    """Whether that limit holds for encoders too; a planner may give each replica of the language model several of an
    encoder."""
    is_tried_by_auto: bool = True
    is_tried_first: bool = False
    """Whether `auto` asks it first: it often has the best plan, and fewer simulations of the others are needed then."""


def _auto(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    return choose(problem, placement=placement).evaluation.plan


PLANNERS: dict[str, Planner] = {
    "cornstarch": Planner(plan=cornstarch),
    "disttrain": Planner(plan=disttrain, chooses_num_devices=True),
    "distmm": Planner(plan=distmm, plans_towers=True, chooses_num_devices=True),
    "entrain": Planner(plan=entrain),
    "frozen_unaware": Planner(plan=frozen_unaware),
    "even": Planner(plan=even),
    "megatron_balanced": Planner(plan=megatron_balanced, is_tried_first=True),
    "optimus": Planner(plan=optimus, limits_dp_of_encoders=False, is_tried_first=True),
    "oobleck": Planner(
        # It gives up speed for plans that survive failures.
        plan=oobleck,
        chooses_cp=True,
        chooses_num_devices=True,
        limits_dp=False,
        is_tried_by_auto=False,
    ),
    "encoders_colocated": Planner(plan=encoders_colocated),
    "encoders_replicated": Planner(plan=encoders_replicated),
    "megatron": Planner(plan=megatron),
    "megatron_extra_stages": Planner(plan=megatron_extra_stages, limits_dp_of_encoders=False),
    "fsdp": Planner(plan=fsdp, chooses_num_devices=True),
    "proportional": Planner(plan=proportional),
    "auto": Planner(
        # It takes the plans of the others.
        plan=_auto,
        plans_towers=True,
        chooses_cp=True,
        chooses_num_devices=True,
        limits_dp_of_encoders=False,
        is_tried_by_auto=False,
    ),
}
"""Planners that choose the degrees themselves; `explicit` takes them from the user."""


def make_plan(
    problem: PlanningProblem,
    planner: str = "cornstarch",
    *,
    degrees: Mapping[str, Degrees] | None = None,
    placement: Placement | None = None,
) -> Plan:
    """The plan of the planner of this name. `degrees`: of every module, for planner `explicit`.

    Raises `UserError` for an unknown planner, and if it finds no plan within the user's limits."""
    if planner == "explicit":
        if degrees is None:
            raise UserError("parallel.explicit: is empty; give tp, pp and dp of every module, or a planner's name")
        return explicit_plan(problem, degrees, placement=placement or "parallel")
    if planner not in PLANNERS:
        near = closest(planner.lower(), ["explicit", *PLANNERS], "give one of")
        raise UserError(f"parallel.planner: {planner!r} is not known; {near}")
    if problem.loss_module is not None and not PLANNERS[planner].plans_towers:
        able = ", ".join(name for name, entry in PLANNERS.items() if entry.plans_towers)
        raise UserError(
            f"parallel.planner: {planner} lays out encoders and a language model, but the model has contrastive "
            f"towers; give {able} or explicit"
        )
    check_limits(problem)
    return _plan_within_limits(problem, planner, placement=placement)


def choose(
    problem: PlanningProblem,
    *,
    placement: Placement | None = None,
    budget_s: float | None = None,
    interruptible: bool = False,
    progress: Progress = silent,
) -> Choice:
    """Chooses for planner `auto`: the fastest of the named planners' plans and its own. `budget_s`, `interruptible`,
    `progress`: see `choose_among`.

    Raises `UserError` if there is no plan."""
    tried = [name for name, entry in PLANNERS.items() if entry.is_tried_by_auto]
    named = {
        name: partial(_plan_within_limits, planner=name)
        for name in sorted(tried, key=lambda name: not PLANNERS[name].is_tried_first)
    }
    check_limits(problem)
    return choose_among(
        problem, named, placement=placement, budget_s=budget_s, interruptible=interruptible, progress=progress
    )


def _plan_within_limits(problem: PlanningProblem, planner: str, *, placement: Placement | None = None) -> Plan:
    entry = PLANNERS[planner]
    if not entry.chooses_cp:
        check_allows_cp_1(problem, planner)
    if entry.chooses_num_devices:
        plan = entry.plan(problem, placement=placement)
    else:
        plan = plan_on_best_count(entry.plan, problem, placement=placement)
    check_within_limits(problem, plan, limits_dp=entry.limits_dp, limits_dp_of_encoders=entry.limits_dp_of_encoders)
    return plan
