"""Which degrees of parallelism a planner may choose from: the user's limits, as far as they divide the model."""

from collections.abc import Iterable, Iterator
from itertools import product

from motet.errors import UserError
from motet.plan import Plan
from motet.planner.bound_and_simulate import best_layout, rank
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
    for dp, tp in product(problem.dp_sizes, _common_tp_sizes(problem, modules)):
        if problem.num_devices % (dp * tp) == 0 and dp <= len(problem.samples):
            yield dp, tp, problem.num_devices // (dp * tp)


def spare_degrees(problem: PlanningProblem, modules: tuple[str, ...] | None = None) -> Iterator[tuple[int, int, int]]:
    """The same for sizes that do not divide the devices: as many groups as there is room for, the rest is left over."""
    for dp, tp in product(problem.dp_sizes, _common_tp_sizes(problem, modules)):
        num_groups, left = divmod(problem.num_devices, dp * tp)
        if left and num_groups and dp <= len(problem.samples):
            yield dp, tp, num_groups


def _common_tp_sizes(problem: PlanningProblem, modules: tuple[str, ...] | None) -> list[int]:
    names = tuple(problem.modules) if modules is None else modules
    return sorted(set.intersection(*(set(tp_sizes(problem, name)) for name in names)))


def best_plan(
    problem: PlanningProblem,
    layouts: Iterable[Layout],
    planner: str,
    placement: Placement | None,
    *,
    otherwise: Iterable[Layout] = (),
) -> Plan:
    """The layout with the shortest simulated iteration; of those that fit, if any does. `otherwise`: tried too if none
    of the layouts fits.

    Raises `UserError` if there is none, or if the user wants the encoders elsewhere than this planner puts them."""
    if placement is not None:
        raise UserError(f"parallel.placement: planner {planner} places encoders in its own way; leave placement out")
    evaluations = best_layout(problem, layouts)
    if not any(evaluation.fits for evaluation in evaluations):
        evaluations = sorted([*evaluations, *best_layout(problem, otherwise)], key=rank)
    if not evaluations:
        raise UserError(
            f"parallel.planner: {planner} finds no layout of {' and '.join(problem.modules)} on "
            f"{problem.num_devices} devices within the limits on degrees; allow other tp or dp sizes, or more devices"
        )
    return evaluations[0].plan
