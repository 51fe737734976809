"""DistMM: a balanced layout for each tower on its own devices; towers share devices where that is faster.

The paper's steps (sections 5.1 to 5.4): an adaptive partition of each tower (`motet.planner.distmm.units`), devices and
batch sizes by dynamic programming (`motet.planner.distmm.planner`), placement by bandwidth
(`motet.planner.distmm.towers`), DistMM-Pipe as schedule.

Beyond the paper: every grouping of towers on the same ranks is balanced too (other systems put all towers together); a
tower may recompute its features if a contrastive batch does not fit otherwise or if that is faster; the best estimates,
balanced with and without the sums of gradients, are simulated, and the best simulation that fits wins. The same balance
gives devices to a caption decoder that reads a tower; only simulation accounts for its wait for the tower.

Limits: no context or sequence parallelism; a tower's replicas look alike; a decoder shares no devices with towers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from motet.errors import UserError
from motet.plan import Plan
from motet.planner.distmm.towers import TowerLayout, decoders, tower_plan
from motet.planner.distmm.units import Choices, unit_choices
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.layout import Placement
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.selection import rank
from motet.ragged_arrays import Floats


def balance(seconds: Sequence[Floats], num_devices: int) -> tuple[float, tuple[int, ...]]:
    """DistMM's load balancer (section 5.2): the least time of the slowest tower, and the devices of each tower.

    `seconds[t][n]`: time of tower t on exactly n devices, for n from 0 to `num_devices`; infinite if impossible. The
    result is infinite if there is no assignment; of equally fast ones, one with the fewest devices is returned. A
    dynamic program over towers and devices."""
    best = np.full(num_devices + 1, inf)
    best[0] = 0.0
    chosen: list[np.ndarray] = []
    for of_tower in seconds:
        assert len(of_tower) == num_devices + 1
        following, devices = np.full(num_devices + 1, inf), np.zeros(num_devices + 1, dtype=np.int64)
        # Numbers of devices that are no faster than fewer devices are never needed.
        fewer = np.concatenate([[inf], np.minimum.accumulate(of_tower)[:-1]])
        for n in np.flatnonzero(of_tower < fewer).tolist():
            slowest = np.maximum(best[: num_devices + 1 - n], of_tower[n])
            better = slowest < following[n:]
            following[n:][better] = slowest[better]
            devices[n:][better] = n
        best = following
        chosen.append(devices)
    used = int(best.argmin())
    result: list[int] = []
    left = used
    for devices in reversed(chosen):
        result.append(int(devices[left]))
        left -= result[-1]
    return float(best[used]), tuple(reversed(result))


NUM_SIMULATED = 4
SCHEDULE = "distmm_pipe"
"""The schedule, unless the user asks for another one."""

Units = tuple[tuple[str, ...], ...]
"""Towers on the same ranks, or a decoder."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The load balancer's result: one row of the choices of each unit."""

    units: Units
    rows: tuple[Choices, ...]
    seconds: float
    """Time of the slowest unit."""

    @property
    def layouts(self) -> tuple[tuple[int, ...], ...]:
        """(tp, pp, dp, K, whether features are recomputed) of each unit."""
        return tuple(
            tuple(int(values[0]) for values in (row.tp, row.pp, row.dp, row.per_batch, row.recomputes))
            for row in self.rows
        )


def distmm(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """The plan with the shortest simulated iteration.

    `placement`: `parallel` keeps towers apart, `colocated` puts all on the same ranks; None: the fastest. Raises
    `UserError` for a model without towers, for other modules than towers and decoders, and if nothing fits."""
    return min((each for _, each in simulated(problem, placement=placement)), key=rank).plan


def simulated(
    problem: PlanningProblem, *, placement: Placement | None = None
) -> Sequence[tuple[Assignment, Evaluation]]:
    """Every candidate's plan. Raises `UserError` as `distmm` does."""
    if placement == "replicated":
        raise UserError(
            "parallel.placement: distmm puts towers on separate ranks (parallel) or the same (colocated); leave it out"
        )
    if problem.loss_module is None:
        raise UserError("parallel.planner: distmm lays out contrastive towers; the model has none")
    placed = (*problem.towers, *decoders(problem))
    others = problem.modules.keys() - {*placed, problem.loss_module}
    if others:
        raise UserError(
            f"parallel.planner: planners lay out towers and a decoder that reads one, not {', '.join(sorted(others))}; "
            "leave it out"
        )
    found = candidates(problem, placement=placement)
    if not found:
        raise UserError(
            f"parallel.planner: no layout of {' and '.join(placed)} fits into {problem.num_devices} devices; "
            "give more devices, other tp sizes, recompute or a smaller contrastive_batch_size"
        )
    return [(each, evaluate(problem, assigned_plan(problem, each))) for each in found]


def candidates(problem: PlanningProblem, *, placement: Placement | None = None) -> list[Assignment]:
    """The assignments with the best estimates, balanced with and without the sums of gradients."""
    return [
        each
        for computation_only in (False, True)
        for each in sorted(
            assignments(problem, placement=placement, computation_only=computation_only),
            key=lambda each: each.seconds,
        )[:NUM_SIMULATED]
    ]


def assignments(
    problem: PlanningProblem, *, placement: Placement | None = None, computation_only: bool = False
) -> Iterator[Assignment]:
    """The best assignment for every grouping of towers, with and without recomputed features.

    `computation_only`: balanced without the sums of gradients, as in the paper, so that towers reach their batch-syncs
    at the same time."""
    for towers in _ways_to_share(problem.towers):
        apart, together = len(towers) == len(problem.towers), len(towers) == 1
        if (placement == "parallel" and not apart) or (placement == "colocated" and not together):
            continue
        units = (*towers, *((name,) for name in decoders(problem)))
        for may_recompute in (False, True):
            choices = [_remembered_choices(problem, unit, may_recompute, computation_only) for unit in units]
            found = assign_devices(units, choices, problem.num_devices)
            if found is not None and (not may_recompute or any(row.recomputes[0] for row in found.rows)):
                yield found


def _remembered_choices(
    problem: PlanningProblem, unit: tuple[str, ...], may_recompute: bool, computation_only: bool
) -> Choices:
    return problem.remembered(
        ("distmm", problem.num_devices, unit, may_recompute, computation_only),
        lambda: unit_choices(problem, unit, may_recompute=may_recompute, computation_only=computation_only),
    )


def assign_devices(units: Units, choices: Sequence[Choices], num_devices: int) -> Assignment | None:
    """The best assignment of devices; None if the units do not fit together."""
    best = [each.best_by_devices(num_devices) for each in choices]
    seconds, devices = balance([of_unit for of_unit, _ in best], num_devices)
    if seconds == float("inf"):
        return None
    rows = [each.take(rows[[n]]) for each, (_, rows), n in zip(choices, best, devices, strict=True)]
    return Assignment(units=units, rows=tuple(rows), seconds=seconds)


def _ways_to_share(towers: Sequence[str]) -> Iterator[Units]:
    """All groupings of the towers into units."""
    if not towers:
        yield ()
        return
    first, *rest = towers
    for units in _ways_to_share(rest):
        yield ((first,), *units)
        for i, unit in enumerate(units):
            yield (*units[:i], (first, *unit), *units[i + 1 :])


def assigned_plan(problem: PlanningProblem, assignment: Assignment) -> Plan:
    """The plan of an assignment. Towers of a unit share their ranks; a decoder is a unit of its own."""
    layouts: dict[str, TowerLayout] = {}
    recomputed: list[str] = []
    for unit, (tp, pp, dp, per_batch, recomputes) in zip(assignment.units, assignment.layouts, strict=True):
        for name in unit:
            layouts[name] = TowerLayout(degrees=Degrees(tp=tp, pp=pp, dp=dp), per_batch=per_batch)
        recomputed += unit if recomputes else ()
    return tower_plan(
        problem,
        layouts,
        together=[unit for unit in assignment.units if unit[0] in problem.towers],
        schedule=SCHEDULE if problem.schedules is None else problem.schedule,
        planner="distmm",
        recompute_features=[name for name in problem.towers if name in recomputed],
    )
