"""Which degrees of parallelism a planner may choose from: the user's limits, as far as they divide the model."""

from collections.abc import Iterator
from itertools import product

from motet.errors import UserError
from motet.plan import Plan
from motet.planner.bound_and_simulate import best_layout
from motet.planner.explicit import Placement
from motet.planner.layout import Layout
from motet.planner.problem import Degrees, PlanningProblem


def tp_sizes(problem: PlanningProblem, name: str) -> list[int]:
    """Of those allowed, the ones that divide the module's heads."""
    fitting = []
    for size in problem.modules[name].tp_sizes:
        try:
            problem.check_degrees(name, Degrees(tp=size))
        except UserError:
            continue
        fitting.append(size)
    return fitting


def dp_sizes(problem: PlanningProblem, num_devices: int | None = None) -> list[int]:
    """Of those allowed, the ones that divide the devices (None: all of them) and leave no replica without a sample."""
    total = problem.num_devices if num_devices is None else num_devices
    return [dp for dp in problem.dp_sizes if total % dp == 0 and dp <= len(problem.samples)]


def uniform_degrees(problem: PlanningProblem, modules: tuple[str, ...] | None = None) -> Iterator[tuple[int, int, int]]:
    """(dp, tp, groups) with one tensor-parallel size for these modules (None: all); groups are those of one replica."""
    names = tuple(problem.modules) if modules is None else modules
    common = set.intersection(*(set(tp_sizes(problem, name)) for name in names))
    for dp, tp in product(dp_sizes(problem), sorted(common)):
        if problem.num_devices % (dp * tp) == 0:
            yield dp, tp, problem.num_devices // (dp * tp)


def best_plan(problem: PlanningProblem, layouts: list[Layout], planner: str, placement: Placement | None) -> Plan:
    """The layout with the shortest simulated iteration; of those that fit, if any does.

    Raises `UserError` if there is none, or if the user wants the encoders elsewhere than this planner puts them."""
    if placement is not None:
        raise UserError(f"parallel.placement: planner {planner} places encoders in its own way; leave placement out")
    evaluations = best_layout(problem, layouts)
    if not evaluations:
        raise UserError(
            f"parallel.planner: {planner} finds no layout of {' and '.join(problem.modules)} on "
            f"{problem.num_devices} devices within the limits on degrees; allow other tp or dp sizes, or more devices"
        )
    return evaluations[0].plan
