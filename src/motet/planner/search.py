"""Looks for the numbers of stages and tensor-parallel sizes with the shortest simulated iteration.

What differs between planners is how they cut a module into stages (`Cut`), and where they put the encoders. Candidates
are bounded and simulated (`motet.planner.bound_and_simulate`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import comb

from motet.errors import UserError
from motet.plan import LayerRange, Plan
from motet.planner.bound_and_simulate import best_layout, rank
from motet.planner.degrees import dp_sizes, tp_sizes
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.explicit import Placement, build_plan
from motet.planner.layout import Layout, layout_of_degrees
from motet.planner.partition import fewest_stages, stage_costs
from motet.planner.problem import Degrees, PlanningProblem, TooSlowError

Cut = Callable[[PlanningProblem, str, Degrees], tuple[int, ...]]
"""(problem, module, degrees) -> layers of each stage."""

MAX_ENUMERATED = 2000
"""Up to so many ways to share devices out are all looked at; beyond, Cornstarch's Algorithm 1 picks some."""


def search(problem: PlanningProblem, cut: Cut, *, planner: str, placements: Iterable[Placement]) -> Plan:
    """The best plan on all of the cluster's devices; on fewer only if no plan uses them all.

    A plan that does not fit into memory is returned only if none fits; `Evaluation.overflows` says so.
    Raises `ValueError` if there are fewer devices than modules need.
    """
    wanted = tuple(placements)
    for num_devices in range(problem.num_devices, 0, -1):
        replicated = _replicated(problem, cut, num_devices, planner, wanted) if "replicated" in wanted else []
        layouts = layouts_of(problem, cut, num_devices, planner, [p for p in wanted if p != "replicated"])
        evaluations = [*replicated, *best_layout(problem, layouts, known=replicated)]
        if evaluations:
            return min(evaluations, key=rank).plan
    raise UserError(
        f"cluster.num_devices: is {problem.num_devices}, but {' and '.join(problem.modules)} need at least "
        f"{min(_fewest_devices(problem, placement) for placement in wanted)} under placement {' or '.join(wanted)}"
    )


def layouts_of(
    problem: PlanningProblem,
    cut: Cut,
    num_devices: int,
    planner: str,
    placements: Iterable[Placement],
    max_enumerated: int = MAX_ENUMERATED,
) -> Iterator[Layout]:
    """Every way to use exactly so many devices with encoders `parallel` or `colocated`, or Algorithm 1's if there are
    more than `max_enumerated`."""
    cuts: dict[tuple[str, Degrees], Sequence[LayerRange]] = {}

    def runs(name: str, degrees: Degrees) -> Sequence[LayerRange]:
        if (name, degrees) not in cuts:
            sizes = cut(problem, name, degrees)
            cuts[name, degrees] = list(pairwise([sum(sizes[:s]) for s in range(len(sizes) + 1)]))
        return cuts[name, degrees]

    for placement in placements:
        for degrees in _degrees(problem, runs, num_devices, placement, max_enumerated):
            yield layout_of_degrees(
                problem,
                degrees,
                {name: runs(name, d) for name, d in degrees.items()},
                colocated=placement == "colocated",
                planner=planner,
            )


Runs = Callable[[str, Degrees], Sequence[LayerRange]]


def _replicated(
    problem: PlanningProblem, cut: Cut, num_devices: int, planner: str, wanted: Sequence[Placement]
) -> list[Evaluation]:
    """The sink's stages take all devices, for each choice of sizes; a choice whose busiest rank has more to do than the
    best so far takes is left out."""
    if len(problem.sinks) != 1:
        return []
    sink = problem.sinks[0]
    common = set.intersection(*(set(tp_sizes(problem, name)) for name in problem.modules))
    choices = []
    for dp, tp in product(dp_sizes(problem, num_devices), sorted(common)):
        pp, left = divmod(num_devices, dp * tp)
        if left or not 1 <= pp <= most_stages(problem, sink):
            continue
        degrees = {name: Degrees(tp=tp, dp=dp, pp=pp if name == sink else 1) for name in problem.modules}
        cuts = {name: cut(problem, name, d) for name, d in degrees.items()}
        work_s = _replicated_work_s(problem, sink, tp, dp, cuts[sink])
        choices.append((work_s, {name: replace(d, layers_per_stage=cuts[name]) for name, d in degrees.items()}))
    evaluations: list[Evaluation] = []
    if wanted == ("replicated",) and choices and all(work_s >= problem.cutoff_s for work_s, _ in choices):
        raise TooSlowError(min(work_s for work_s, _ in choices))
    for work_s, exact in sorted(choices, key=lambda choice: choice[0]):
        if not any(e.fits and e.iteration_time_s <= work_s for e in evaluations) and work_s < problem.cutoff_s:
            plan = build_plan(problem, exact, placement="replicated", planner=planner)
            evaluations.append(evaluate(problem, plan))
    return evaluations


def _replicated_work_s(problem: PlanningProblem, sink: str, tp: int, dp: int, cut: tuple[int, ...]) -> float:
    """Of the busiest stage: its part of the sink, and a forward of every encoder."""
    times = [time.total_s for time in problem.layer_times(sink, tp, dp)]
    bounds = [sum(cut[:s]) for s in range(len(cut) + 1)]
    encoders = sum(time.forward_s for name in problem.sources for time in problem.layer_times(name, tp, dp))
    return problem.num_microbatches * (encoders + max(stage_costs(times, list(pairwise(bounds)))))


def most_stages(problem: PlanningProblem, name: str) -> int:
    num_layers = problem.modules[name].workload.num_layers
    return min(num_layers, problem.modules[name].max_stages or num_layers)


def _fewest_devices(problem: PlanningProblem, placement: Placement) -> int:
    if placement == "replicated":
        return len(problem.sinks)
    return len(problem.sinks) + (min(1, len(problem.sources)) if placement == "colocated" else len(problem.sources))


def _degrees(
    problem: PlanningProblem, runs: Runs, num_devices: int, placement: Placement, max_enumerated: int
) -> Iterator[dict[str, Degrees]]:
    names = list(problem.modules)
    for dp, sizes in product(dp_sizes(problem, num_devices), product(*(tp_sizes(problem, name) for name in names))):
        tp = dict(zip(names, sizes, strict=True))
        units = _units(problem, tp, placement)
        if units is None:
            continue
        devices = num_devices // dp
        if comb(max(1, devices // min(sizes) - 1), len(units) - 1) <= max_enumerated:
            choices = _compositions(units, devices)
        else:
            choices = loosely_coupled(problem, runs, units, tp, dp, devices)
        for counts in choices:
            yield {
                name: Degrees(tp=tp[name], pp=pp, dp=dp)
                for unit, pp in zip(units, counts, strict=True)
                for name in unit.names
            }


@dataclass(frozen=True)
class Unit:
    """Modules that share their ranks, and so their number of stages."""

    names: tuple[str, ...]
    tp: int
    max_stages: int
    is_sink: bool


def _units(problem: PlanningProblem, tp: Mapping[str, int], placement: Placement) -> list[Unit] | None:
    """None if modules that would share ranks differ in tensor parallelism."""

    def unit(names: tuple[str, ...], is_sink: bool) -> Unit:
        return Unit(names, tp[names[0]], min(most_stages(problem, name) for name in names), is_sink)

    sinks = [unit((name,), True) for name in problem.sinks]
    if placement == "parallel" or not problem.sources:
        return [*(unit((name,), False) for name in problem.sources), *sinks]
    return [unit(problem.sources, False), *sinks] if len({tp[name] for name in problem.sources}) == 1 else None


def _compositions(units: Sequence[Unit], num_devices: int) -> Iterator[tuple[int, ...]]:
    unit, *rest = units
    for count in range(1, min(unit.max_stages, num_devices // unit.tp) + 1):
        left = num_devices - count * unit.tp
        if not rest:
            if left == 0:
                yield (count,)
        elif left > 0:
            for counts in _compositions(rest, left):
                yield (count, *counts)


def loosely_coupled(
    problem: PlanningProblem, runs: Runs, units: Sequence[Unit], tp: Mapping[str, int], dp: int, num_devices: int
) -> Iterator[tuple[int, ...]]:
    """Cornstarch Algorithm 1: for each number of stages of the language model, each encoder gets the fewest stages that
    keep up with it. Devices that are left go, stage by stage, to the slowest module."""
    times = {name: [t.total_s for t in problem.layer_times(name, tp[name], dp)] for name in problem.modules}
    sink = next(i for i, unit in enumerate(units) if unit.is_sink)

    def slowest_s(i: int, count: int) -> float:
        per_module = [stage_costs(times[n], runs(n, Degrees(tp=tp[n], pp=count, dp=dp))) for n in units[i].names]
        return max(sum(stages) for stages in zip(*per_module, strict=True))

    for num_stages in range(1, min(units[sink].max_stages, num_devices // units[sink].tp) + 1):
        target_s = slowest_s(sink, num_stages)
        counts = []
        for unit in units:
            needed = max(fewest_stages(times[name], target_s / len(unit.names)) for name in unit.names)
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
