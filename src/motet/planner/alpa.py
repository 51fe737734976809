"""An Alpa-like planner (Zheng et al. 2022, sections 4 and 5): what it would find for a row of multimodal layers.

* Inter-operator: all layers in a row are cut into stages, and each stage gets a group of devices, so that the sum of
  the stages' times plus (microbatches - 1) x the slowest is least. As in the paper, the slowest stage is fixed first
  and the sum minimised under it by dynamic programming over (first layer left, devices left).
* Intra-operator: within a group, what it costs to compute a run of layers.

Deviations: Alpa's intra-operator problem is an integer program over all operators' shardings. A plan can say one
tensor-parallel size for a stage and one number of replicas for all, so these are the choices here. Groups may differ in
size. Schedules without interleaving, as Alpa's.
Limits: slowest stages are tried on a grid of `NUM_LIMITS` values from the least that can be met, where Alpa tries all
with gaps between them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from motet.plan import Plan
from motet.planner.degrees import best_plan, dp_sizes, has_few_stages, tp_sizes
from motet.planner.explicit import Placement
from motet.planner.layout import Chunk, Layout
from motet.planner.problem import PlanningProblem

NUM_LIMITS = 16
NUM_HALVINGS = 16
MAX_STATES = 30_000
"""Of (layers x devices of one replica, in units of the smallest group): beyond, the search would take too long."""

Array = NDArray[np.float64]


def alpa(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    return best_plan(problem, list(_layouts(problem)), "alpa", placement)


def _layouts(problem: PlanningProblem) -> Iterator[Layout]:
    layers = [(name, i) for name, module in problem.modules.items() for i in range(module.workload.num_layers)]
    sizes = sorted(set.intersection(*(set(tp_sizes(problem, name)) for name in problem.modules)))
    for dp in dp_sizes(problem):
        devices = problem.num_devices // dp
        if not sizes or devices // sizes[0] * len(layers) > MAX_STATES:
            continue
        times = {size: _run_seconds(problem, size, dp) for size in sizes}
        stages = assign_stages(times, devices, problem.num_microbatches)
        if stages is not None and not has_few_stages(problem, _layout(layers, stages, dp).chunks):
            most = [(module.workload.num_layers, module.max_stages) for module in problem.modules.values()]
            counts = StageCounts.of([(n, None if limit is None else min(limit, devices)) for n, limit in most])
            affordable = devices // sizes[0] * len(layers) * len(counts.may_begin) <= MAX_STATES
            stages = assign_stages(times, devices, problem.num_microbatches, counts) if affordable else None
        if stages is not None:
            yield _layout(layers, stages, dp)


def _run_seconds(problem: PlanningProblem, tp: int, dp: int) -> Array:
    """[first, last]: forward and backward of layers [first, last) in the row; infinite where there are none."""
    times = [time.total_s for name in problem.modules for time in problem.estimator.layer_times(name, tp, dp)]
    prefix = np.concatenate([[0.0], np.cumsum(times)])
    runs = prefix[None, :] - prefix[:, None]
    runs[np.tril_indices(len(prefix))] = np.inf
    return runs


class StageCounts(NamedTuple):
    """How many stages a module has had, where the user limits that: `used` of them before a layer within it."""

    may_begin: NDArray[np.bool_]
    """[used, first]: whether a stage may begin at this layer."""
    then: NDArray[np.int64]
    """[used, (first,) last]: what is used after a stage with these layers."""

    @classmethod
    def of(cls, modules: Sequence[tuple[int, int | None]]) -> "StageCounts":
        """(layers, most stages) of each module in the row; None: without limit."""
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
    """For each stage, the layer at which it ends and the size of its group; None if the devices cannot all be used.

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
    """The least sum of stage times with no stage above `limit`, all layers and all devices used."""
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


def _layout(layers: list[tuple[str, int]], stages: list[tuple[int, int]], dp: int) -> Layout:
    chunks, first = [], 0
    for group, (last, _) in enumerate(stages):
        for name in dict.fromkeys(name for name, _ in layers[first:last]):
            mine = [i for other, i in layers[first:last] if other == name]
            chunks.append(Chunk(name, (mine[0], mine[-1] + 1), group))
        first = last
    order = list(dict.fromkeys(name for name, _ in layers))
    return Layout(
        planner="alpa",
        chunks=tuple(sorted(chunks, key=lambda chunk: (order.index(chunk.module), chunk.layers))),
        group_sizes=tuple(size for _, size in stages),
        dp=dp,
    )
