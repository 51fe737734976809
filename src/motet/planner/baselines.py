"""What planners are compared with: the same search over stage counts, with stages cut in simpler ways."""

from motet.plan import Plan
from motet.planner.explicit import Placement, cut_module
from motet.planner.partition import even_partition
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.search import search


def frozen_unaware(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """The exact partition, but as if every layer were trainable (Cornstarch 6.3's baseline)."""
    return search(problem, _frozen_unaware_cut, planner="frozen_unaware", placements=(placement or "parallel",))


def even(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """Stages with equal numbers of layers."""
    return search(problem, _even_cut, planner="even", placements=(placement or "parallel",))


def _frozen_unaware_cut(problem: PlanningProblem, name: str, degrees: Degrees) -> tuple[int, ...]:
    return tuple(last - first for first, last in cut_module(problem, name, degrees, frozen_aware=False))


def _even_cut(problem: PlanningProblem, name: str, degrees: Degrees) -> tuple[int, ...]:
    num_layers = problem.modules[name].workload.num_layers
    return tuple(last - first for first, last in even_partition(num_layers, degrees.pp))
