"""Chooses among layouts: a cheap lower bound orders and prunes them, simulation decides."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layout import Layout, layout_plan
from motet.planner.layout_costs import LayoutCosts, usable_bytes
from motet.planner.problem import PlanningProblem, TooSlowError
from motet.schedule.generators import SPLIT_BACKWARDS

MAX_ACTIONS = 10_000
"""Of all simulations of a search together: where programs are large, fewer of them are tried."""
MAX_CELLS = 2_000
"""Microbatches on stages of one replica: schedules that go by memory take long where they are many."""
MAX_EXCESS = 0.25
"""Of a device's memory: what exceeds it by more is slow if it is made to fit."""


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    needed_bytes: float
    """By the fullest rank: an estimate."""
    excess_bytes: float
    """What of it is not there."""
    bound_s: float

    @property
    def family(self) -> tuple[str | None, int]:
        """Layouts for which that estimate is off in the same way: of one schedule, with as many runs on a group."""
        runs = Counter(chunk.group for chunk in self.layout.chunks)
        return self.layout.schedule, max(runs.values())


def candidates(problem: PlanningProblem, layouts: Iterable[Layout], costs: LayoutCosts) -> list[Candidate]:
    """Those that seem to fit first, then by their bounds."""
    found = []
    for layout in dict.fromkeys(layouts):
        splits = (layout.schedule or problem.schedule) in SPLIT_BACKWARDS
        bound_s = costs.bound_s(layout, split_backward=splits) + problem.program_s
        found.append(Candidate(layout, costs.needed_bytes(layout), costs.excess_bytes(layout), bound_s))
    return sorted(found, key=lambda candidate: (candidate.excess_bytes, candidate.bound_s))


def within_memory(
    problem: PlanningProblem,
    layouts: Iterable[Layout],
    schedule: str,
    *,
    max_simulated: int = 3,
    known: Sequence[Evaluation] = (),
) -> list[Evaluation]:
    """Simulations of the most promising layouts that keep somewhat too much under their own schedules, under one that
    goes by what memory there is. Those whose programs are large are left out."""
    fastest = min((e.iteration_time_s for e in known if e.fits), default=inf)
    found = sorted(candidates(problem, layouts, LayoutCosts(problem)), key=lambda candidate: candidate.bound_s)
    evaluations: list[Evaluation] = []
    for candidate in found:
        if candidate.bound_s >= fastest or len(evaluations) >= max_simulated:
            break
        num_cells = problem.num_microbatches * len(candidate.layout.chunks)
        if 0 < candidate.excess_bytes <= MAX_EXCESS * usable_bytes(problem) and num_cells <= MAX_CELLS:
            evaluation = evaluate(problem, layout_plan(problem, candidate.layout, schedule=schedule))
            evaluations.append(evaluation)
            if evaluation.fits:
                fastest = min(fastest, evaluation.iteration_time_s)
    return evaluations


def rank(evaluation: Evaluation) -> tuple[int, float]:
    """Less is better: what fits goes before what does not, then time decides."""
    excess = evaluation.overflows[0].needed_bytes if evaluation.overflows else 0
    return excess, evaluation.iteration_time_s


def best_layout(
    problem: PlanningProblem,
    layouts: Iterable[Layout],
    *,
    max_simulated: int = 8,
    costs: LayoutCosts | None = None,
    known: Sequence[Evaluation] = (),
) -> list[Evaluation]:
    """Simulations, the best first; none if there is no layout. Raises `TooSlowError` if all that fit are too slow.

    A candidate is simulated unless its bound is above the best simulation that fits (`known` ones among them), and
    while fewer than `max_simulated` have been, with fewer than `MAX_ACTIONS` actions in all; four times as many while
    nothing fits. Once something does, those are passed over that would not fit if they needed as much more than
    estimated as the last simulated ones of their family.
    """
    costs = costs or LayoutCosts(problem)
    evaluations: list[Evaluation] = []
    fastest = min((e.iteration_time_s for e in known if e.fits), default=inf)
    num_actions = 0
    off: dict[tuple[str | None, int], float] = {}
    found = candidates(problem, layouts, costs)
    for candidate in found:
        times = 1 if fastest < inf else 4
        if len(evaluations) >= max_simulated * times or num_actions >= MAX_ACTIONS * times:
            break
        if candidate.bound_s >= min(fastest, problem.cutoff_s):
            continue
        needed = candidate.needed_bytes * off.get(candidate.family, 1.0)
        if fastest < inf and needed > usable_bytes(problem):
            continue
        evaluation = evaluate(problem, layout_plan(problem, candidate.layout))
        evaluations.append(evaluation)
        num_actions += evaluation.num_actions
        if candidate.needed_bytes:
            off[candidate.family] = max(evaluation.result.peak_memory_bytes) / candidate.needed_bytes
        if evaluation.fits:
            fastest = min(fastest, evaluation.iteration_time_s)
    left_out = [candidate.bound_s for candidate in found if problem.cutoff_s <= candidate.bound_s < fastest]
    if left_out and fastest >= problem.cutoff_s:
        raise TooSlowError(min(fastest, *left_out))
    return sorted(evaluations, key=rank)
