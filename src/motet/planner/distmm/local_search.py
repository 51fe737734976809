"""Searches for faster plans of contrastive towers, from the plans of planner `distmm` (planner `auto`).

DistMM's load balancer ignores messages and batch-syncs, keeps one answer for each grouping of towers, and makes more
than one stage only of what a node does not hold. From its best simulations this local search changes one unit (a tower,
or towers on the same ranks) at a time. It tries other layouts of the unit that the remaining devices can hold and whose
computation alone takes less than the best plan so far: it simulates those with the best estimates and continues from
the fastest that fits. Then it tries other schedules, and recomputing the features of fewer towers. The result is never
slower than the plan of `distmm`.

Limits: a local search; it simulates at most `MAX_ACTIONS` actions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.plan import Plan
from motet.planner.distmm.planner import Assignment, assigned_plan, simulated
from motet.planner.distmm.units import Choices, Partition, most_stages, tp_sizes_within_nodes, unit_choices
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.layout import Placement
from motet.planner.problem import PlanningProblem
from motet.planner.selection import MAX_ACTIONS, rank

TOWER_SCHEDULES = ("distmm_pipe", "gpipe", "1f1b")
NUM_STAGES = (1, 2, 3, 4, 6, 8)
"""Numbers of stages of a unit that are tried with every tensor-parallel size."""
NUM_STARTS = 2
"""Number of groupings of towers that the search starts from."""
NUM_TRIED = 8
"""Number of layouts of a unit that are simulated before the search moves on."""


@dataclass(frozen=True)
class TowerSearch:
    of_distmm: Evaluation
    """The plan of `distmm`."""
    best: Evaluation


def search_towers(problem: PlanningProblem, *, placement: Placement | None = None) -> TowerSearch:
    """`placement`: that of `distmm`. Raises `UserError` as `distmm` does, and for schedules without batch-syncs."""
    schedules = problem.schedules or TOWER_SCHEDULES
    begun = sorted(simulated(problem, placement=placement), key=lambda pair: rank(pair[1]))
    search = _Search(problem, num_actions=sum(evaluation.num_actions for _, evaluation in begun))
    starts: dict[tuple[tuple[str, ...], ...], tuple[Assignment, Evaluation]] = {}
    for assignment, evaluation in begun:
        starts.setdefault(assignment.units, (assignment, evaluation))
    found = [search.descend(*start) for start in list(starts.values())[:NUM_STARTS]]
    best = min([begun[0][1], *found], key=rank)
    while True:
        variants = [evaluate(problem, plan) for plan in _variants(best.plan, schedules)]
        better = min([best, *variants], key=rank)
        if better is best:
            return TowerSearch(of_distmm=begun[0][1], best=best)
        best = better


def _variants(plan: Plan, schedules: Sequence[str]) -> Iterator[Plan]:
    """The plan with another schedule, or with recomputed features of one tower fewer (a unit of `distmm` recomputes all
    of its towers' features or none)."""
    for name in schedules:
        if name != plan.schedule:
            yield replace(plan, schedule=name)
    for tower in plan.recompute_features:
        yield replace(plan, recompute_features=tuple(name for name in plan.recompute_features if name != tower))


class _Search:
    def __init__(self, problem: PlanningProblem, *, num_actions: int) -> None:
        self._problem = problem
        self._num_actions = num_actions
        self._units: dict[tuple[str, ...], tuple[Choices, Choices]] = {}
        self._tried: set[object] = set()

    def descend(self, assignment: Assignment, evaluation: Evaluation) -> Evaluation:
        """Descends until no change is faster: neither of one unit, nor of the microbatches of all units."""
        since = 0
        while since <= len(assignment.units):
            for i in (None, *range(len(assignment.units))):
                since += 1
                for changed in self._scaled(assignment) if i is None else self._changes(assignment, i, evaluation):
                    if self._num_actions >= MAX_ACTIONS:
                        return evaluation
                    key = changed.units, changed.layouts
                    if key in self._tried:
                        continue
                    self._tried.add(key)
                    other = evaluate(self._problem, assigned_plan(self._problem, changed))
                    self._num_actions += other.num_actions
                    if rank(other) < rank(evaluation):
                        assignment, evaluation, since = changed, other, 0
        return evaluation

    def _changes(self, assignment: Assignment, i: int, best: Evaluation) -> Iterator[Assignment]:
        """Other layouts of unit i, best estimates first."""
        whole, computation = self._choices(assignment.units[i])
        left = self._problem.num_devices - sum(int(r.devices[0]) for j, r in enumerate(assignment.rows) if j != i)
        own = assignment.rows[i]
        differs = np.zeros(len(whole), dtype=bool)
        for name in ("tp", "pp", "dp", "per_batch", "recomputes"):
            differs |= getattr(whole, name) != getattr(own, name)[0]
        able = differs & (whole.devices <= left) & (computation.seconds < best.iteration_time_s)
        for k in np.flatnonzero(able)[np.argsort(whole.seconds[able], kind="stable")[:NUM_TRIED]]:
            rows = (*assignment.rows[:i], whole.take(np.array([k])), *assignment.rows[i + 1 :])
            yield replace(assignment, rows=rows)

    def _scaled(self, assignment: Assignment) -> Iterator[Assignment]:
        """Half and twice as many microbatches in every unit, where that fits: a decoder waits for the coarser one of
        its own and its tower's microbatches, so changing only one of the two gains nothing."""
        for halved in (True, False):
            rows = []
            for unit, own in zip(assignment.units, assignment.rows, strict=True):
                whole, _ = self._choices(unit)
                wanted = own.per_batch[0] // 2 if halved else own.per_batch[0] * 2
                alike = whole.per_batch == max(1, wanted)
                for name in ("tp", "pp", "dp", "recomputes"):
                    alike &= getattr(whole, name) == getattr(own, name)[0]
                rows.append(whole.take(alike))
            if all(map(len, rows)):
                yield replace(assignment, rows=tuple(rows))

    def _choices(self, unit: tuple[str, ...]) -> tuple[Choices, Choices]:
        """The unit's layouts twice, with seconds that include gradient reductions and that do not."""
        if unit not in self._units:
            sizes, most = tp_sizes_within_nodes(self._problem, unit), most_stages(self._problem, unit)
            partitions = [Partition(tp, pp) for tp in sizes for pp in NUM_STAGES if pp <= most]
            partitions = [p for p in partitions if p.num_devices <= self._problem.num_devices]
            whole, computation = (
                unit_choices(
                    self._problem, unit, partitions=partitions, num_partitions=len(partitions), computation_only=only
                )
                for only in (False, True)
            )
            self._units[unit] = whole, computation
        return self._units[unit]
