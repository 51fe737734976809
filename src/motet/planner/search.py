"""Looks for the numbers of stages and tensor-parallel sizes with the shortest simulated iteration.

Candidates are put in order by estimates, those that seem to fit into memory first; the best are simulated, and the best
simulation that fits wins. What differs between planners is how they cut a module into stages (`Cut`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import comb

from motet.errors import UserError
from motet.plan import Plan
from motet.planner.degrees import dp_sizes, tp_sizes
from motet.planner.estimate import Cut, Estimates
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.explicit import Placement, build_plan
from motet.planner.partition import fewest_stages
from motet.planner.problem import Degrees, PlanningProblem

MAX_ENUMERATED = 2000
"""Up to so many ways to share devices out are all looked at; beyond, Cornstarch's Algorithm 1 picks some."""
NUM_SIMULATED = 8


@dataclass(frozen=True)
class _Candidate:
    degrees: Mapping[str, Degrees]
    placement: Placement
    excess_bytes: float
    seconds: float


def _simulate(estimates: Estimates, candidate: _Candidate, planner: str) -> Evaluation:
    degrees = {
        name: replace(d, layers_per_stage=tuple(stage.num_layers for stage in estimates.stages(name, d)))
        for name, d in candidate.degrees.items()
    }
    plan = build_plan(estimates.problem, degrees, placement=candidate.placement, planner=planner)
    return evaluate(estimates.problem, plan)


def search(problem: PlanningProblem, cut: Cut, *, planner: str, placements: Iterable[Placement]) -> Plan:
    """The best plan on all of the cluster's devices; on fewer only if no plan uses them all.

    A plan that does not fit into memory is returned only if none fits; `Evaluation.overflows` says so.
    Raises `ValueError` if there are fewer devices than modules need.
    """
    estimates = Estimates(problem, cut)
    wanted = tuple(placements)
    for num_devices in range(problem.num_devices, 0, -1):
        candidates = sorted(
            (
                _Candidate(
                    degrees,
                    placement,
                    estimates.excess_bytes(degrees, placement),
                    estimates.seconds(degrees, placement),
                )
                for placement in wanted
                for degrees in _layouts(estimates, num_devices, placement)
            ),
            key=lambda candidate: (candidate.excess_bytes, candidate.seconds),
        )
        if candidates:
            evaluations = [_simulate(estimates, candidate, planner) for candidate in candidates[:NUM_SIMULATED]]
            if not any(evaluation.fits for evaluation in evaluations):
                evaluations += [
                    _simulate(estimates, candidate, planner)
                    for candidate in candidates[NUM_SIMULATED : 4 * NUM_SIMULATED]
                ]
            return min(evaluations, key=_rank).plan
    raise UserError(
        f"cluster.num_devices: is {problem.num_devices}, but {' and '.join(problem.modules)} need at least "
        f"{min(_fewest_devices(problem, placement) for placement in wanted)} under placement {' or '.join(wanted)}"
    )


def _rank(evaluation: Evaluation) -> tuple[int, float]:
    excess = evaluation.overflows[0].needed_bytes if evaluation.overflows else 0
    return excess, evaluation.iteration_time_s


def _fewest_devices(problem: PlanningProblem, placement: Placement) -> int:
    if placement == "replicated":
        return len(problem.sinks)
    return len(problem.sinks) + (min(1, len(problem.sources)) if placement == "colocated" else len(problem.sources))


def _layouts(estimates: Estimates, num_devices: int, placement: Placement) -> Iterator[dict[str, Degrees]]:
    """Every way to use exactly so many devices, or Algorithm 1's if those are too many."""
    problem = estimates.problem
    names = list(problem.modules)
    tp_choices = [tp_sizes(problem, name) for name in names]
    for dp, sizes in product(dp_sizes(problem, num_devices), product(*tp_choices)):
        tp = dict(zip(names, sizes, strict=True))
        units = _units(problem, tp, placement)
        if units is None:
            continue
        for counts in _stage_counts(estimates, units, tp, dp, num_devices // dp):
            yield {
                name: Degrees(tp=tp[name], pp=pp, dp=dp)
                for unit, pp in zip(units, counts, strict=True)
                for name in unit.names
            } | {name: Degrees(tp=tp[name], pp=1, dp=dp) for name in names if not any(name in u.names for u in units)}


@dataclass(frozen=True)
class _Unit:
    """Modules that share their ranks, and so their number of stages."""

    names: tuple[str, ...]
    tp: int
    max_stages: int
    is_sink: bool


def _units(problem: PlanningProblem, tp: Mapping[str, int], placement: Placement) -> list[_Unit] | None:
    """None if modules that would share ranks differ in tensor parallelism."""

    def unit(names: tuple[str, ...], is_sink: bool) -> _Unit:
        limits = [problem.modules[n].max_stages or problem.modules[n].workload.num_layers for n in names]
        layers = [problem.modules[n].workload.num_layers for n in names]
        return _Unit(names, tp[names[0]], min(*limits, *layers), is_sink)

    sinks = [unit((name,), True) for name in problem.sinks]
    if not problem.sources:
        return sinks
    if placement == "parallel":
        return [*(unit((name,), False) for name in problem.sources), *sinks]
    sizes = {tp[name] for name in problem.sources}
    if placement == "colocated":
        return [unit(problem.sources, False), *sinks] if len(sizes) == 1 else None
    return sinks if sizes == {tp[problem.sinks[0]]} else None


def _stage_counts(
    estimates: Estimates, units: list[_Unit], tp: Mapping[str, int], dp: int, num_devices: int
) -> Iterator[tuple[int, ...]]:
    if comb(num_devices - 1, len(units) - 1) <= MAX_ENUMERATED:
        yield from _compositions(units, num_devices)
    else:
        yield from _loosely_coupled(estimates, units, tp, dp, num_devices)


def _compositions(units: list[_Unit], num_devices: int) -> Iterator[tuple[int, ...]]:
    unit, *rest = units
    for count in range(1, min(unit.max_stages, num_devices // unit.tp) + 1):
        left = num_devices - count * unit.tp
        if not rest:
            if left == 0:
                yield (count,)
        elif left > 0:
            for counts in _compositions(rest, left):
                yield (count, *counts)


def _loosely_coupled(
    estimates: Estimates, units: list[_Unit], tp: Mapping[str, int], dp: int, num_devices: int
) -> Iterator[tuple[int, ...]]:
    """Cornstarch Algorithm 1: for each number of stages of the language model, each encoder gets the fewest stages that
    keep up with it. Devices that are left go, stage by stage, to the slowest module."""
    problem = estimates.problem
    sink = next(i for i, unit in enumerate(units) if unit.is_sink)

    def slowest_s(i: int, count: int) -> float:
        per_module = [estimates.stages(n, Degrees(tp=tp[n], pp=count, dp=dp)) for n in units[i].names]
        return max(sum(stage.seconds for stage in stages) for stages in zip(*per_module, strict=True))

    for num_stages in range(1, min(units[sink].max_stages, num_devices // units[sink].tp) + 1):
        target_s = slowest_s(sink, num_stages)
        counts = []
        for unit in units:
            times = [[t.total_s for t in problem.layer_times(n, tp[n], dp)] for n in unit.names]
            needed = max(fewest_stages(t, target_s / len(unit.names)) for t in times)
            counts.append(num_stages if unit.is_sink else min(needed, unit.max_stages))
        left = num_devices - sum(count * unit.tp for count, unit in zip(counts, units, strict=True))
        while left > 0:
            growable = [i for i, u in enumerate(units) if u.tp <= left and counts[i] < u.max_stages]
            if not growable:
                break
            slowest = max(growable, key=lambda i: slowest_s(i, counts[i]))
            counts[slowest] += 1
            left -= units[slowest].tp
        if left == 0:
            yield tuple(counts)
