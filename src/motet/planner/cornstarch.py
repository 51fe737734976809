"""Cornstarch: frozen-aware stages, loosely coupled modules, encoders side by side or in turns, whichever is faster.

Stages are cut by the exact partition of T = forward + backward under the frozen rule (thesis 3.3.1, 3.4.1). How many
stages each module gets follows Algorithm 1 (Cornstarch 5.2): for each number of stages of the language model, each
encoder gets as many as keep up with it; where all distributions of the devices can be looked at, they are.
Deviation: an encoder that needs no backward pass is charged none, where the paper assumes a fixed factor.
"""

from motet.plan import Plan
from motet.planner.explicit import Placement, cut_module
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.search import Cut, search


def frozen_aware_cut(problem: PlanningProblem, name: str, degrees: Degrees) -> tuple[int, ...]:
    return tuple(last - first for first, last in cut_module(problem, name, degrees))


def cornstarch(
    problem: PlanningProblem, *, placement: Placement | None = None, unimodal: Cut = frozen_aware_cut
) -> Plan:
    """`placement` None: parallel or colocated, whichever is faster in simulation. `unimodal`: any planner of a single
    model, asked how to cut each module at given degrees (Cornstarch 5.2)."""
    placements: tuple[Placement, ...] = ("parallel", "colocated") if placement is None else (placement,)
    if len(problem.sources) < 2 and placement is None:
        placements = ("parallel",)
    return search(problem, unimodal, planner="cornstarch", placements=placements)
