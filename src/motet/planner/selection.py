"""Selects among layouts: a cheap lower bound orders and prunes them, simulation decides.

`plan_on_best_count` asks a planner for fewer devices than there are too, as an odd number of devices often leaves worse
degrees than one device less: nine devices cannot be divided among two replicas, nor seven into groups of two. For each
product of degrees that may be chosen, it tries the largest number of devices that the product divides. Powers of two
leave only the number itself; other numbers have about as many candidates as binary digits.

Limits: other numbers of devices are not tried, though stages of unequal modules may fit them better.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Protocol

from motet.costs.memory import usable_bytes
from motet.errors import UserError
from motet.plan import Plan
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.degrees import cp_sizes, no_layout, tp_sizes
from motet.planner.layouts.layout import Layout, Placement, layout_plan
from motet.planner.layouts.layout_costs import LayoutCosts
from motet.planner.problem import PlanningProblem, TooSlowError
from motet.schedule.generators import SPLIT_BACKWARDS

MAX_ACTIONS = 10_000
"""Limit on the actions of all simulations of a search together: fewer programs are tried where they are large."""
MAX_CELLS = 2_000
"""Limit on the microbatches times stages of one replica: memory-aware schedules take long to make beyond it."""
MAX_EXCESS = 0.25
"""Fraction of a device's memory: a layout that exceeds the memory by more is slow once it is made to fit."""

Simulate = Callable[[PlanningProblem, Plan], Evaluation]


class PlanFunction(Protocol):
    """A planner."""

    def __call__(self, problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
        """`placement` None: the planner's own choice. Raises `UserError` if the planner finds no plan."""


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    needed_bytes: float
    """Estimated peak of the fullest rank."""
    excess_bytes: float
    """The part of it that exceeds the device's memory."""
    bound_s: float

    @property
    def family(self) -> tuple[str | None, int]:
        """Layouts whose estimate of memory errs alike: same schedule, same number of runs of layers on a group."""
        runs = Counter(chunk.group for chunk in self.layout.chunks)
        return self.layout.schedule, max(runs.values())


def candidates(problem: PlanningProblem, layouts: Iterable[Layout], costs: LayoutCosts) -> list[Candidate]:
    """The layouts with their bounds: those that seem to fit first, then by lower bound."""
    found = []
    for layout in dict.fromkeys(layouts):
        splits = (layout.schedule or problem.schedule) in SPLIT_BACKWARDS
        bound_s = costs.bound_s(layout, split_backward=splits) + problem.program_s
        found.append(Candidate(layout, costs.needed_bytes(layout), costs.excess_bytes(layout), bound_s))
    return sorted(found, key=lambda candidate: (candidate.excess_bytes, candidate.bound_s))


def rank(evaluation: Evaluation) -> tuple[int, float]:
    """Sort key, smallest first: plans that fit into memory before those that do not, then by iteration time."""
    excess = evaluation.overflows[0].needed_bytes if evaluation.overflows else 0
    return excess, evaluation.iteration_time_s


def best_plan(
    problem: PlanningProblem, layouts: Iterable[Layout], planner: str, placement: Placement | None = None
) -> Plan:
    """The plan of the layout with the shortest simulated iteration; of those that fit, if any does.

    Raises `UserError` if there is no layout, or if the user sets a placement, which these planners do not take."""
    if placement is not None:
        raise UserError(f"parallel.placement: planner {planner} places encoders in its own way; leave placement out")
    evaluations = best_layout(problem, layouts)
    if not evaluations:
        raise no_layout(problem, planner)
    return evaluations[0].plan


def best_layout(
    problem: PlanningProblem,
    layouts: Iterable[Layout],
    *,
    max_simulated: int = 8,
    costs: LayoutCosts | None = None,
    known: Sequence[Evaluation] = (),
    simulate: Simulate = evaluate,
) -> list[Evaluation]:
    """Simulates the most promising layouts; returns the best first, or nothing if there are no layouts.

    Simulation stops after `max_simulated` layouts or `MAX_ACTIONS` actions, or four times as many while nothing fits. A
    candidate is skipped if its lower bound is above the fastest plan that fits (of `known` ones too). Once a plan fits,
    a candidate is also skipped if it would not fit, were its estimate of memory as far off as it was in the last
    simulation of its family.

    Raises `TooSlowError` if all plans that fit take longer than `problem.cutoff_s`.
    """
    costs = costs or LayoutCosts(problem)
    evaluations: list[Evaluation] = []
    fastest = min((e.iteration_time_s for e in known if e.fits), default=inf)
    num_actions = 0
    peak_over_estimate: dict[tuple[str | None, int], float] = {}
    found = candidates(problem, layouts, costs)
    for candidate in found:
        times = 1 if fastest < inf else 4
        if len(evaluations) >= max_simulated * times or num_actions >= MAX_ACTIONS * times:
            break
        if candidate.bound_s >= min(fastest, problem.cutoff_s):
            continue
        needed = candidate.needed_bytes * peak_over_estimate.get(candidate.family, 1.0)
        if fastest < inf and needed > usable_bytes(problem.cluster):
            continue
        evaluation = simulate(problem, layout_plan(problem, candidate.layout))
        evaluations.append(evaluation)
        num_actions += evaluation.num_actions
        if candidate.needed_bytes:
            peak = max(evaluation.result.peak_memory_bytes)
            peak_over_estimate[candidate.family] = peak / candidate.needed_bytes
        if evaluation.fits:
            fastest = min(fastest, evaluation.iteration_time_s)
    left_out = [candidate.bound_s for candidate in found if problem.cutoff_s <= candidate.bound_s < fastest]
    if left_out and fastest >= problem.cutoff_s:
        raise TooSlowError(min(fastest, *left_out))
    return sorted(evaluations, key=rank)


def within_memory(
    problem: PlanningProblem,
    layouts: Iterable[Layout],
    schedule: str,
    *,
    max_simulated: int = 3,
    known: Sequence[Evaluation] = (),
    simulate: Simulate = evaluate,
) -> list[Evaluation]:
    """Simulates layouts that slightly exceed the memory under their own schedules with a memory-aware `schedule`.

    Takes the most promising ones whose programs are small."""
    fastest = min((e.iteration_time_s for e in known if e.fits), default=inf)
    found = sorted(candidates(problem, layouts, LayoutCosts(problem)), key=lambda candidate: candidate.bound_s)
    evaluations: list[Evaluation] = []
    num_actions = 0
    for candidate in found:
        if candidate.bound_s >= fastest or len(evaluations) >= max_simulated or num_actions >= MAX_ACTIONS:
            break
        num_cells = problem.num_microbatches * len(candidate.layout.chunks)
        if 0 < candidate.excess_bytes <= MAX_EXCESS * usable_bytes(problem.cluster) and num_cells <= MAX_CELLS:
            evaluation = simulate(problem, layout_plan(problem, candidate.layout, schedule=schedule))
            evaluations.append(evaluation)
            num_actions += evaluation.num_actions
            if evaluation.fits:
                fastest = min(fastest, evaluation.iteration_time_s)
    return evaluations


def device_counts(problem: PlanningProblem) -> list[int]:
    """All of the devices, then smaller numbers that the degrees divide better, largest first."""
    tp = {size for name in problem.modules for size in tp_sizes(problem, name)}
    cp = {size for name in problem.modules for size in cp_sizes(problem, name)}
    dp = {size for size in problem.dp_sizes if size <= len(problem.samples)}
    products = {d * t * c for d, t, c in product(dp, tp, cp)}
    counts = {problem.num_devices // p * p for p in products if p <= problem.num_devices}
    return sorted(counts | {problem.num_devices}, reverse=True)


def plan_on_best_count(planner: PlanFunction, problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """The planner's best plan on any of `device_counts`.

    Raises what the planner raises for all devices, if it finds nothing on fewer either."""
    counts = device_counts(problem)
    if len(counts) == 1:
        return planner(problem, placement=placement)
    best: Evaluation | None = None
    too_slow: list[TooSlowError] = []
    refused: UserError | None = None
    for num_devices in counts:
        cutoff_s = best.iteration_time_s if best is not None and best.fits else problem.cutoff_s
        at_least_s = _device_seconds(problem) / num_devices
        if at_least_s >= cutoff_s:
            too_slow.append(TooSlowError(at_least_s))
            continue
        try:
            plan = planner(problem.with_num_devices(num_devices).with_cutoff(cutoff_s), placement=placement)
        except TooSlowError as error:
            too_slow.append(error)
            continue
        except UserError as error:
            refused = refused or error
            continue
        evaluation = evaluate(problem, plan)
        best = evaluation if best is None else min(best, evaluation, key=rank)
    if too_slow and (best is None or not best.fits):
        raise TooSlowError(min(error.at_least_s for error in too_slow))
    if best is not None:
        return best.plan
    assert refused is not None, "on all devices a planner finds a plan or says why not"
    raise refused


def _device_seconds(problem: PlanningProblem) -> float:
    """Lower bound on the device-seconds of an iteration: each layer at its most efficient tensor-parallel size."""

    def compute() -> float:
        return sum(
            min(tp * time.total_s for tp, time in zip(sizes, times, strict=True))
            for name in problem.modules
            for sizes in [tp_sizes(problem, name)]
            for times in zip(*(problem.estimator.lower_bound_batch_times(name, tp) for tp in sizes), strict=True)
        )

    return problem.remembered("device-seconds", compute)
