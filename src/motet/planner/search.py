"""Searches the numbers of stages and tensor-parallel sizes with the shortest simulated iteration.

Planners differ in how they cut a module into stages (`Cut`) and where they place the encoders. Candidates are bounded
and simulated (`motet.planner.selection`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import comb, inf

from motet.errors import UserError
from motet.plan import LayerRange, Plan
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.degrees import common_tp_sizes, cp_sizes, dp_sizes, most_stages, no_layout, tp_sizes
from motet.planner.layouts.layout import Chunk, Layout, Placement, build_plan, layout_of_degrees
from motet.planner.layouts.layout_costs import LayoutCosts
from motet.planner.layouts.partition import fewest_stages, stage_costs
from motet.planner.problem import Degrees, PlanningProblem, TooSlowError
from motet.planner.selection import best_layout, rank
from motet.schedule.generators import SPLIT_BACKWARDS

Cut = Callable[[PlanningProblem, str, Degrees], Sequence[LayerRange]]
"""(problem, module, degrees) -> layers of each stage."""
Runs = Callable[[str, Degrees], Sequence[LayerRange]]
"""(module, degrees) -> layers of each stage."""

MAX_ENUMERATED = 2000
"""Up to this many distributions of devices among modules are all enumerated; beyond, Cornstarch's Algorithm 1 picks
some."""


def search(problem: PlanningProblem, cut: Cut, *, planner: str, placements: Sequence[Placement]) -> Plan:
    """The best plan on all of the cluster's devices; on fewer only if no plan uses them all. `placements`: replicated,
    or some of parallel and colocated.

    Returns a plan that does not fit into memory only if none fits (`Evaluation.overflows`). Raises `UserError` if there
    are fewer devices than modules need.
    """
    for num_devices in usable_counts(problem, placements):
        if "replicated" in placements:
            evaluations = _replicated(problem, cut, num_devices, planner)
        else:
            cutoff = Cutoff(problem)
            layouts = layouts_of(problem, cut, num_devices, planner, placements, cutoff=cutoff)
            try:
                evaluations = best_layout(problem, layouts)
            except TooSlowError as error:
                raise TooSlowError(min(error.at_least_s, cutoff.least_s)) from error
            fastest = min((e.iteration_time_s for e in evaluations if e.fits), default=inf)
            if cutoff.least_s < inf and fastest >= problem.cutoff_s:
                raise TooSlowError(min(fastest, cutoff.least_s))
        if evaluations:
            return min(evaluations, key=rank).plan
    raise _why_none(problem, planner, placements)


class Cutoff:
    """Leaves out degrees with which one stage alone takes as long as plans may: most degrees, where many are tried."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self.least_s = inf
        """Lower bound of the iteration under the degrees that were left out."""
        self._stage_s: dict[tuple[str, Degrees], float] = {}
        self._fewest: dict[tuple[str, Degrees], float] = {}

    def may_be_fast(self, degrees: Mapping[str, Degrees], runs: Runs) -> bool:
        if self._problem.cutoff_s == inf:
            return True
        seconds = max(self._slowest_s(name, each, runs) for name, each in degrees.items())
        if seconds < self._problem.cutoff_s:
            return True
        self.least_s = min(self.least_s, seconds)
        return False

    def has_room(self, units: Sequence["Unit"], num_ranks: int) -> bool:
        """Whether the ranks of a replica suffice for the fewest stages of all modules."""
        if sum(unit.fewest_stages * unit.ranks_per_stage for unit in units) <= num_ranks:
            return True
        self.least_s = min(self.least_s, self._problem.cutoff_s)
        return False

    def fewest_stages(self, name: str, sizes: Degrees) -> float:
        """The fewest stages, however a module is cut, that are each fast enough; infinite if no number is."""
        problem = self._problem
        if problem.cutoff_s == inf:
            return 1
        if (name, sizes) not in self._fewest:
            limit_s = (problem.cutoff_s - problem.program_s) / problem.num_microbatches
            seconds = self._layer_seconds(name, sizes)
            self._fewest[name, sizes] = inf if max(seconds) > limit_s else fewest_stages(seconds, limit_s)
        return self._fewest[name, sizes]

    def _layer_seconds(self, name: str, degrees: Degrees) -> list[float]:
        times = self._problem.estimator.lower_bound_times(name, degrees.tp, degrees.dp, cp=degrees.cp)
        return [time.total_s for time in times]

    def _slowest_s(self, name: str, degrees: Degrees, runs: Runs) -> float:
        if (name, degrees) not in self._stage_s:
            slowest = max(stage_costs(self._layer_seconds(name, degrees), runs(name, degrees)))
            self._stage_s[name, degrees] = self._problem.num_microbatches * slowest + self._problem.program_s
        return self._stage_s[name, degrees]


def usable_counts(problem: PlanningProblem, placements: Iterable[Placement]) -> list[int]:
    """Numbers of devices that some degrees use completely, largest first; other numbers have no layouts."""
    per_replica = {total for placement in placements for total in _sizes_of_replicas(problem, placement)}
    dps = [dp for dp in problem.dp_sizes if dp <= len(problem.samples)]
    return sorted({dp * n for dp in dps for n in per_replica if dp * n <= problem.num_devices}, reverse=True)


def _sizes_of_replicas(problem: PlanningProblem, placement: Placement) -> set[int]:
    """The numbers of devices that one replica of the whole model may have."""
    if placement == "replicated":
        common = common_tp_sizes(problem, problem.modules)
        return {tp * pp for tp in common for sink in problem.sinks for pp in range(1, most_stages(problem, sink) + 1)}
    totals = {0}
    for names in _groups(problem, placement):
        most = min(most_stages(problem, name) for name in names)
        sizes = {tp * pp for tp in common_tp_sizes(problem, names) for pp in range(1, most + 1)}
        totals = {total + size for total in totals for size in sizes if total + size <= problem.num_devices}
    return totals


def layouts_of(
    problem: PlanningProblem,
    cut: Cut,
    num_devices: int,
    planner: str,
    placements: Iterable[Placement],
    max_enumerated: int = MAX_ENUMERATED,
    *,
    chooses_cp: bool = False,
    cutoff: Cutoff | None = None,
) -> Iterator[Layout]:
    """Layouts on exactly `num_devices` devices with encoders `parallel` or `colocated`: all, or those of Cornstarch's
    Algorithm 1 if there are more than `max_enumerated`. `chooses_cp`: with all allowed context-parallel sizes instead
    of 1. `cutoff`: leaves out degrees that are too slow."""
    cutoff = cutoff or Cutoff(problem.with_cutoff(inf))

    def runs(name: str, degrees: Degrees) -> Sequence[LayerRange]:
        return problem.remembered(("cut", cut, name, degrees), lambda: cut(problem, name, degrees))

    for placement in placements:
        for degrees in _degrees(problem, runs, num_devices, placement, max_enumerated, chooses_cp, cutoff):
            if cutoff.may_be_fast(degrees, runs):
                yield layout_of_degrees(
                    problem,
                    degrees,
                    {name: runs(name, d) for name, d in degrees.items()},
                    colocated=placement == "colocated",
                    planner=planner,
                )


def _replicated(problem: PlanningProblem, cut: Cut, num_devices: int, planner: str) -> list[Evaluation]:
    """Simulates plans whose sink's stages take all devices, one for each choice of sizes. Skips a choice whose lower
    bound is above the fastest plan so far."""
    if len(problem.sinks) != 1:
        return []
    sink = problem.sinks[0]
    choices = []
    for dp, tp in product(dp_sizes(problem, num_devices), common_tp_sizes(problem, problem.modules)):
        pp, left = divmod(num_devices, dp * tp)
        if left or not 1 <= pp <= most_stages(problem, sink):
            continue
        degrees = {name: Degrees(tp=tp, dp=dp, pp=pp if name == sink else 1) for name in problem.modules}
        cuts = {name: cut(problem, name, d) for name, d in degrees.items()}
        bound_s = max(bound(problem, tp, dp, cuts[sink]) for bound in (_replicated_work_s, _sink_alone_s))
        sizes = {name: tuple(last - first for first, last in cuts[name]) for name in problem.modules}
        choices.append((bound_s, {name: replace(d, layers_per_stage=sizes[name]) for name, d in degrees.items()}))
    evaluations: list[Evaluation] = []
    for bound_s, exact in sorted(choices, key=lambda choice: choice[0]):
        if not any(e.fits and e.iteration_time_s <= bound_s for e in evaluations) and bound_s < problem.cutoff_s:
            plan = build_plan(problem, exact, placement="replicated", planner=planner)
            evaluations.append(evaluate(problem, plan))
    left_out = [bound_s for bound_s, _ in choices if bound_s >= problem.cutoff_s]
    if left_out and not any(e.fits for e in evaluations):
        raise TooSlowError(min(left_out))
    return evaluations


def _replicated_work_s(problem: PlanningProblem, tp: int, dp: int, runs: Sequence[LayerRange]) -> float:
    """Work of the busiest stage: its part of the sink, and a forward of every encoder, as copies whose output nothing
    reads have no backward."""

    def freeze() -> PlanningProblem:
        return replace(problem, modules={name: replace(m, trainable=()) for name, m in problem.modules.items()})

    frozen = problem.remembered("frozen", freeze)
    times = [time.total_s for time in problem.estimator.lower_bound_times(problem.sinks[0], tp, dp)]
    encoders = sum(
        time.forward_s for name in problem.sources for time in frozen.estimator.lower_bound_times(name, tp, dp)
    )
    return problem.num_microbatches * (encoders + max(stage_costs(times, runs)))


def _sink_alone_s(problem: PlanningProblem, tp: int, dp: int, runs: Sequence[LayerRange]) -> float:
    """Lower bound of the sink's pipeline by itself, with its fill and drain."""
    chunks = tuple(Chunk(problem.sinks[0], layers, s) for s, layers in enumerate(runs))
    alone = Layout(planner="alone", chunks=chunks, group_sizes=(tp,) * len(chunks), dp=dp)
    return LayoutCosts(problem).bound_s(alone, split_backward=problem.schedule in SPLIT_BACKWARDS)


def _why_none(problem: PlanningProblem, planner: str, placements: Sequence[Placement]) -> UserError:
    where = f"under placement {' or '.join(placements)}"
    groups = {placement: _groups(problem, placement) for placement in placements}
    fewest = min(
        min(problem.dp_sizes) * sum(min(common_tp_sizes(problem, names), default=inf) for names in modules)
        for modules in groups.values()
    )
    if fewest == inf:
        return UserError(
            f"parallel.limits: modules that share ranks {where} have no tp in common; allow one that they have"
        )
    if fewest <= problem.num_devices:
        return no_layout(problem, planner)
    within = ", within parallel.limits" if fewest > min(map(len, groups.values())) else ""
    return UserError(
        f"cluster.num_devices: is {problem.num_devices}, but {' and '.join(problem.modules)} need at least {fewest} "
        f"{where}{within}"
    )


def _groups(problem: PlanningProblem, placement: Placement) -> list[tuple[str, ...]]:
    """The modules of the model, grouped by shared ranks."""
    if placement == "replicated":
        return [(*problem.sources, sink) for sink in problem.sinks]
    if placement == "parallel" or not problem.sources:
        return [(name,) for name in problem.modules]
    return [problem.sources, *((name,) for name in problem.sinks)]


def _degrees(
    problem: PlanningProblem,
    runs: Runs,
    num_devices: int,
    placement: Placement,
    max_enumerated: int,
    chooses_cp: bool,
    cutoff: Cutoff,
) -> Iterator[dict[str, Degrees]]:
    for sizes in _sizes(problem, num_devices, chooses_cp):
        units = _units(problem, sizes, placement, cutoff)
        devices = num_devices // next(iter(sizes.values())).dp
        if units is None or not cutoff.has_room(units, devices):
            continue
        fewest_ranks = min(degrees.ranks_per_stage for degrees in sizes.values())
        if comb(max(1, devices // fewest_ranks - 1), len(units) - 1) <= max_enumerated:
            choices = _compositions(units, devices)
        else:
            choices = loosely_coupled(problem, runs, units, sizes, devices)
        for counts in choices:
            yield {
                name: replace(sizes[name], pp=pp) for unit, pp in zip(units, counts, strict=True) for name in unit.names
            }


def _sizes(problem: PlanningProblem, num_devices: int, chooses_cp: bool) -> Iterator[dict[str, Degrees]]:
    """Degrees of every module, without numbers of stages."""
    for dp in dp_sizes(problem, num_devices):
        choices = [
            [
                Degrees(tp=tp, cp=cp, dp=dp)
                for tp in tp_sizes(problem, name)
                for cp in (cp_sizes(problem, name, dp) if chooses_cp else (1,))
            ]
            for name in problem.modules
        ]
        for chosen in product(*choices):
            yield dict(zip(problem.modules, chosen, strict=True))


@dataclass(frozen=True)
class Unit:
    """Modules on the same ranks, and so with the same number of stages."""

    names: tuple[str, ...]
    ranks_per_stage: int
    max_stages: int
    is_sink: bool
    fewest_stages: float = 1
    """Fewer are too slow; infinite if any number is."""


def _units(
    problem: PlanningProblem, sizes: Mapping[str, Degrees], placement: Placement, cutoff: Cutoff
) -> list[Unit] | None:
    """Returns groups of modules that share ranks; None if they differ in tensor parallelism."""

    def unit(names: tuple[str, ...], is_sink: bool) -> Unit:
        most = min(most_stages(problem, name) for name in names)
        fewest = max(cutoff.fewest_stages(name, sizes[name]) for name in names)
        return Unit(names, sizes[names[0]].ranks_per_stage, most, is_sink, fewest if fewest <= most else inf)

    sinks = [unit((name,), True) for name in problem.sinks]
    if placement == "parallel" or not problem.sources:
        return [*(unit((name,), False) for name in problem.sources), *sinks]
    return [unit(problem.sources, False), *sinks] if len({sizes[n].tp for n in problem.sources}) == 1 else None


def _compositions(units: Sequence[Unit], num_devices: int) -> Iterator[tuple[int, ...]]:
    unit, *rest = units
    for count in range(int(unit.fewest_stages), min(unit.max_stages, num_devices // unit.ranks_per_stage) + 1):
        left = num_devices - count * unit.ranks_per_stage
        if not rest:
            if left == 0:
                yield (count,)
        elif left > 0:
            for counts in _compositions(rest, left):
                yield (count, *counts)


def loosely_coupled(
    problem: PlanningProblem, runs: Runs, units: Sequence[Unit], sizes: Mapping[str, Degrees], num_devices: int
) -> Iterator[tuple[int, ...]]:
    """Numbers of stages by Cornstarch's Algorithm 1: for each number of stages of the language model, each encoder gets
    the fewest stages that keep up with it; remaining devices go, stage by stage, to the slowest module. `sizes`:
    degrees without numbers of stages."""
    times = {name: problem.estimator.layer_seconds(name, own.tp, own.dp, cp=own.cp) for name, own in sizes.items()}
    sink = next(i for i, unit in enumerate(units) if unit.is_sink)

    @cache
    def slowest_s(i: int, count: int) -> float:
        per_module = [stage_costs(times[n], runs(n, replace(sizes[n], pp=count))) for n in units[i].names]
        return max(sum(stages) for stages in zip(*per_module, strict=True))

    most = min(units[sink].max_stages, num_devices // units[sink].ranks_per_stage)
    for num_stages in range(int(units[sink].fewest_stages), most + 1):
        target_s = slowest_s(sink, num_stages)
        counts = []
        for unit in units:
            needed = max(fewest_stages(times[name], target_s / len(unit.names)) for name in unit.names)
            counts.append(num_stages if unit.is_sink else min(needed, unit.max_stages))
        left = num_devices - sum(count * unit.ranks_per_stage for count, unit in zip(counts, units, strict=True))
        while left > 0:
            growable = [i for i, u in enumerate(units) if u.ranks_per_stage <= left and counts[i] < u.max_stages]
            if not growable:
                break
            slowest = max(growable, key=lambda i: slowest_s(i, counts[i]))
            counts[slowest] += 1
            left -= units[slowest].ranks_per_stage
        if left == 0:
            yield tuple(counts)
