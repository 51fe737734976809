"""An Alpa-like planner (Zheng et al. 2022, sections 4 and 5), for comparison.

* Inter-operator: all layers in a row are cut into stages, each with a group of devices, so that the sum of the stages'
  times plus (microbatches - 1) x the slowest is minimal. As in the paper, the slowest stage is fixed first and the sum
  minimised under it by dynamic programming over (first remaining layer, remaining devices).
* Intra-operator: the cost of a run of layers on a group.

Deviations: Alpa's intra-operator problem is an integer program over all operators' shardings. A plan has one
tensor-parallel size per stage and one number of replicas for all stages, so these are the choices here. Groups may
differ in size. Schedules have no interleaving, as Alpa's.
Limits: the limit on the slowest stage is tried on a grid of `NUM_LIMITS` values from the smallest feasible one; Alpa
tries all values that differ by more than a gap.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from motet.plan import Plan
from motet.planner.layouts.degrees import common_tp_sizes, dp_sizes
from motet.planner.layouts.layout import Layout, Placement, chunks_of_runs, has_few_stages
from motet.planner.problem import PlanningProblem
from motet.planner.selection import best_plan

NUM_LIMITS = 16
NUM_HALVINGS = 16
MAX_STATES = 30_000
"""Limit on layers x devices of one replica, in units of the smallest group: beyond, the search would take too long."""

Array = NDArray[np.float64]


def alpa(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    return best_plan(problem, list(_layouts(problem)), "alpa", placement)


def _layouts(problem: PlanningProblem) -> Iterator[Layout]:
    num_layers = {name: module.workload.num_layers for name, module in problem.modules.items()}
    total = sum(num_layers.values())
    sizes = common_tp_sizes(problem, problem.modules)

    def layout(stages: Sequence[tuple[int, int]], dp: int) -> Layout:
        runs = list(pairwise([0, *(last for last, _ in stages)]))
        return Layout(
            planner="alpa",
            chunks=tuple(chunks_of_runs(num_layers, runs, range(len(runs)))),
            group_sizes=tuple(size for _, size in stages),
            dp=dp,
        )

    for dp in dp_sizes(problem):
        devices = problem.num_devices // dp
        if not sizes or devices // sizes[0] * total > MAX_STATES:
            continue
        times = {size: _run_seconds(problem, size, dp) for size in sizes}
        stages = assign_stages(times, devices, problem.num_microbatches)
        if stages is not None and not has_few_stages(problem, layout(stages, dp).chunks):
            most = [(module.workload.num_layers, module.max_stages) for module in problem.modules.values()]
            counts = StageCounts.of([(n, None if limit is None else min(limit, devices)) for n, limit in most])
            affordable = devices // sizes[0] * total * len(counts.may_begin) <= MAX_STATES
            stages = assign_stages(times, devices, problem.num_microbatches, counts) if affordable else None
        if stages is not None:
            yield layout(stages, dp)


def _run_seconds(problem: PlanningProblem, tp: int, dp: int) -> Array:
    """[first, last]: forward and backward of layers [first, last) in the row; infinite where there are none."""
    times = [seconds for name in problem.modules for seconds in problem.estimator.layer_seconds(name, tp, dp)]
    prefix = np.concatenate([[0.0], np.cumsum(times)])
    runs = prefix[None, :] - prefix[:, None]
    runs[np.tril_indices(len(prefix))] = np.inf
    return runs


class StageCounts(NamedTuple):
    """The number of stages that a module has `used` before a layer within it, where the user limits its stages."""

    may_begin: NDArray[np.bool_]
    """[used, first]: whether a stage may begin at this layer."""
    then: NDArray[np.int64]
    """[used, (first,) last]: the number used after a stage with these layers."""

    @classmethod
    def of(cls, modules: Sequence[tuple[int, int | None]]) -> "StageCounts":
        """`modules`: (layers, maximum number of stages or None) of each module in the row."""
        limits = np.repeat([limit or 0 for _, limit in modules], [n for n, _ in modules])
        limits = np.append(limits, 0)
        number = np.append(np.repeat(np.arange(len(modules)), [n for n, _ in modules]), len(modules))
        begins = np.append([True], number[1:] != number[:-1])
        used = np.arange(limits.max() + 1)[:, None, None]
        then = np.where(number[:, None] == number[None, :], np.minimum(used + 1, limits.max()), 1)
        then = np.where(begins | (limits == 0), 0, then)
        return cls((used[..., 0] < limits) | (limits == 0), then)


def assign_stages(
    times: dict[int, Array], num_devices: int, num_microbatches: int, counts: StageCounts | None = None
) -> list[tuple[int, int]] | None:
    """(last layer, size of the group) of each stage; None if the devices cannot all be used.

    `times[size][first, last]`: seconds of a run of layers on a group of that size. `counts`: None: any number of
    stages.
    """
    num_layers = len(next(iter(times.values()))) - 1
    counts = counts or StageCounts.of([(num_layers, None)])
    low, high = 0.0, max(float(t[np.isfinite(t)].max()) for t in times.values())
    longest = high
    if _fewest_seconds(times, num_devices, high, counts)[1] is None:
        return None
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _fewest_seconds(times, num_devices, middle, counts)[1] is None else (low, middle)
    best_s, best = np.inf, None
    for limit in np.geomspace(high, longest, NUM_LIMITS):
        total_s, stages = _fewest_seconds(times, num_devices, float(limit), counts)
        assert stages is not None, "what a smaller limit allows, a larger one does"
        iteration_s = total_s + (num_microbatches - 1) * _slowest(times, stages)
        if iteration_s < best_s:
            best_s, best = iteration_s, stages
    return best


def _slowest(times: dict[int, Array], stages: list[tuple[int, int]]) -> float:
    starts = [0, *(last for last, _ in stages)]
    return max(float(times[size][first, last]) for first, (last, size) in zip(starts, stages, strict=False))


def _fewest_seconds(
    times: dict[int, Array], num_devices: int, limit: float, counts: StageCounts
) -> tuple[float, list[tuple[int, int]] | None]:
    """Minimises the sum of stage times with no stage above `limit`, using all layers and all devices."""
    num_layers = len(next(iter(times.values()))) - 1
    layers, num_used = np.arange(num_layers + 1), len(counts.may_begin)
    allowed = {size: np.where(t <= limit * (1 + 1e-12), t, np.inf) for size, t in times.items()}
    least = np.full((num_devices + 1, num_used, num_layers + 1), np.inf)
    least[0, 0, num_layers] = 0.0
    chosen_end, chosen_size = (np.zeros(least.shape, dtype=int) for _ in range(2))
    for devices in range(1, num_devices + 1):
        for size, runs in allowed.items():
            if size > devices or not np.isfinite(least[devices - size]).any():
                continue
            for used in range(num_used):
                rest = least[devices - size]
                totals = runs + (rest[0] if num_used == 1 else rest[counts.then[used], layers])
                ends = totals.argmin(axis=1)
                values = np.where(counts.may_begin[used], totals[layers, ends], np.inf)
                less = values < least[devices, used]
                least[devices, used, less] = values[less]
                chosen_end[devices, used, less], chosen_size[devices, used, less] = ends[less], size
    if not np.isfinite(least[num_devices, 0, 0]):
        return np.inf, None
    stages: list[tuple[int, int]] = []
    devices, first, used = num_devices, 0, 0
    while first < num_layers:
        last, size = int(chosen_end[devices, used, first]), int(chosen_size[devices, used, first])
        stages.append((last, size))
        devices, first, used = devices - size, last, int(counts.then[used, first, last])
    return float(least[num_devices, 0, 0]), stages
