"""Lower bound of the iteration time over all plans and schedules of a problem, by relaxation.

It holds for all plans on the problem's devices in which every module has one tensor-parallel size, one context-parallel
size and one number of replicas, out of given sets, and no module shards its parameters. Stages, groups (own, shared,
interleaved, with copies, some devices unused) and schedules (backwards split or not) are arbitrary; the batch is
assigned by `problem.assignment`. With `mixed`, stages of one module may differ in tensor parallelism: every layer then
has the best of the sizes for each of the sums below, and 3 does not apply.

Relaxed: messages, reductions and exchanges of context-parallel groups take no time; memory counts as one sum of static
bytes over all devices; ranks may interrupt and divide work arbitrarily. Kept:

1. Work. A rank works from the time when its first layer's input can exist (head) to the time that must follow its last
   action (tail). tp x cp x replicas ranks hold a layer, so not every rank can begin with layer 0: over D ranks heads
   add up to at least those of the D earliest places. D x T >= work + heads + tails that weight gradients cannot fill.
2. A layer is indivisible: T >= head + all of its work on its rank + tail.
3. Pigeonholes: of k x D + 1 layers' shares some rank has k + 1. This requires replicas with equal work.

The bound is the least over all combinations of sizes, of which there are few; each is the maximum of the three. If the
batch is cut evenly and a module has one replica for each share of it, its microbatches are known, padding included.
Otherwise loads are summed sample by sample (`Estimator.lower_bound_batch_times`). Plans whose replicas take different
numbers of microbatches (`replica_microbatches`) are not covered if samples differ.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product
from math import gcd, inf
from operator import itemgetter
from typing import NamedTuple

from motet.costs.estimator import LayerTime
from motet.costs.memory import usable_bytes
from motet.planner.degrees import cp_sizes, dp_sizes, largest_ep, tp_sizes
from motet.planner.problem import PlanningProblem


@dataclass(frozen=True)
class _Layer:
    """One layer under one combination of sizes; of several tensor-parallel sizes, the weakest bound."""

    num_holders: int
    device_s: float
    """Work on all ranks that hold it together."""
    device_weight_s: float
    work_s: float
    """Work on each rank that holds it."""
    weight_s: float
    head_s: float
    tail_s: float


class Size(NamedTuple):
    """Sizes of one module."""

    tp: tuple[int, ...]
    """Tensor-parallel sizes, of which each layer has one."""
    cp: int
    num_replicas: int

    def num_holders(self, tp: int) -> int:
        """Number of ranks that hold a layer of this tensor-parallel size, or a shard of it."""
        return tp * self.cp * self.num_replicas


Sizes = Mapping[str, Size]


def problem_lower_bound_s(
    problem: PlanningProblem,
    *,
    num_replicas: Mapping[str, Sequence[int]] | None = None,
    tp: Mapping[str, Sequence[int]] | None = None,
    cp: Mapping[str, Sequence[int]] | None = None,
    mixed: bool = False,
    at_most_s: float = inf,
) -> float:
    """Lower bound in seconds; infinite if no combination can fit into memory.

    `num_replicas`, `tp`, `cp`: sizes that plans may have, by module; None: the problem's. `mixed`: stages of a module
    may differ in tensor parallelism. `at_most_s`: returned where the bound is not below it, which takes less time to
    find out."""
    modules, least_s = _Modules(problem), at_most_s - problem.program_s
    combinations = _combinations(problem, modules, num_replicas, tp, cp, mixed)
    for share_s, sizes in sorted([(modules.share_s(sizes), sizes) for sizes in combinations], key=itemgetter(0)):
        if share_s >= least_s:
            break
        layers = _layers(problem, sizes)
        busy_s = max(_work(layers, problem.num_devices), _indivisible(layers), _pigeonholes(problem, layers, sizes))
        least_s = min(least_s, busy_s + _fixed_s(problem, modules, sizes))
    return least_s + problem.program_s


class _Modules:
    """Remembered sums over a module's layers at each size, as many combinations share them."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self._static_bytes: dict[tuple[str, Size], int] = {}
        self._num_updated: dict[tuple[str, Size], int] = {}
        self._work_s: dict[tuple[str, Size, bool], float] = {}

    def share_s(self, sizes: Sizes) -> float:
        """Each device's part of all the work, which is below the bound and fast to compute."""
        num_shares = _num_shares(sizes)
        keys = [(name, size, size.num_replicas == num_shares) for name, size in sizes.items()]
        for name, size, alone in keys:
            if (name, size, alone) not in self._work_s:
                self._work_s[name, size, alone] = size.cp * sum(
                    min(tp * time.total_s for tp, time in zip(size.tp, times, strict=True))
                    for times in _least_totals(self.problem, name, size, alone=alone)
                )
        return sum(self._work_s[key] for key in keys) / self.problem.num_devices

    def static_bytes(self, name: str, size: Size) -> int:
        """Parameters, gradients and moments, on all ranks together."""
        if (name, size) not in self._static_bytes:
            each = [
                self.problem.estimator.static_bytes(
                    name, tp, size.num_replicas, cp=size.cp, ep=largest_ep(self.problem, name, tp, size.num_replicas)
                )
                for tp in size.tp
            ]
            self._static_bytes[name, size] = sum(
                min(size.num_holders(tp) * num_bytes for tp, num_bytes in zip(size.tp, layer, strict=True))
                for layer in zip(*each, strict=True)
            )
        return self._static_bytes[name, size]

    def num_updated(self, name: str, size: Size) -> int:
        """Parameters that optimizers update, on all ranks together."""
        if (name, size) not in self._num_updated:
            each = [
                [
                    tp * n
                    for n in self.problem.estimator.num_trainable(
                        name, tp=tp, ep=largest_ep(self.problem, name, tp, size.num_replicas)
                    )
                ]
                for tp in size.tp
            ]
            self._num_updated[name, size] = sum(map(min, zip(*each, strict=True)))
        return self.problem.memory.num_keepers(size.cp * size.num_replicas) * self._num_updated[name, size]


def _num_shares(sizes: Sizes) -> int:
    """Number of shares of the batch, as `motet.assignment.batch_assignment.num_shares` defines it."""
    return gcd(*(size.num_replicas for size in sizes.values()))


def _least_totals(problem: PlanningProblem, name: str, size: Size, *, alone: bool) -> Iterator[tuple[LayerTime, ...]]:
    """The times of each layer at each of the tensor-parallel sizes."""
    of_sizes = [
        problem.estimator.lower_bound_batch_times(name, tp, size.num_replicas, cp=size.cp, alone=alone)
        for tp in size.tp
    ]
    return zip(*of_sizes, strict=True)


def _combinations(
    problem: PlanningProblem,
    modules: _Modules,
    num_replicas: Mapping[str, Sequence[int]] | None,
    tp: Mapping[str, Sequence[int]] | None,
    cp: Mapping[str, Sequence[int]] | None,
    mixed: bool,
) -> Iterator[Sizes]:
    """Combinations of sizes whose static bytes fit into memory."""
    names = list(problem.modules)
    # By default, all modules have the same number of replicas.
    for dps in [(dp,) for dp in dp_sizes(problem)] if num_replicas is None else [None]:
        choices = [
            [
                Size(*size)
                for size in product(
                    _choices_of_tp(tp[name] if tp else tp_sizes(problem, name), mixed),
                    sorted(set(cp[name] if cp else cp_sizes(problem, name))),
                    dps or sorted(set((num_replicas or {})[name])),
                )
            ]
            for name in names
        ]
        for sizes in product(*choices):
            combination = dict(zip(names, sizes, strict=True))
            if _fits(problem, modules, combination):
                yield combination


def _choices_of_tp(sizes: Sequence[int], mixed: bool) -> list[tuple[int, ...]]:
    ordered = sorted(set(sizes))
    return [tuple(ordered)] if mixed else [(tp,) for tp in ordered]


def _fits(problem: PlanningProblem, modules: _Modules, sizes: Sizes) -> bool:
    if any(size.num_holders(min(size.tp)) > problem.num_devices for size in sizes.values()):
        return False
    needed = sum(modules.static_bytes(name, size) for name, size in sizes.items())
    return needed <= problem.num_devices * usable_bytes(problem.cluster)


def _layers(problem: PlanningProblem, sizes: Sizes) -> list[_Layer]:
    heads, tails = _heads_and_tails(problem, sizes)
    layers, num_shares = [], _num_shares(sizes)
    for name, size in sizes.items():
        for i, times in enumerate(_least_totals(problem, name, size, alone=size.num_replicas == num_shares)):
            device_s = [tp * size.cp * time.total_s for tp, time in zip(size.tp, times, strict=True)]
            device_weight_s = [tp * size.cp * time.weight_s for tp, time in zip(size.tp, times, strict=True)]
            layers.append(
                _Layer(
                    num_holders=size.num_holders(max(size.tp)),
                    device_s=min(device_s),
                    device_weight_s=max(device_weight_s),
                    work_s=min(time.total_s for time in times) / size.num_replicas,
                    weight_s=max(time.weight_s for time in times) / size.num_replicas,
                    head_s=heads[name][i],
                    tail_s=tails[name][i],
                )
            )
    return layers


def _heads_and_tails(problem: PlanningProblem, sizes: Sizes) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Returns the least time before the first action of each layer, and after its last, by module."""
    heads: dict[str, list[float]] = {}
    backs: dict[str, list[float]] = {}
    one: dict[str, tuple[list[float], list[float]]] = {}
    for name in _in_order(problem):
        tps, cp, replicas = sizes[name]
        smallest = max(1, len(problem.samples) // (replicas * problem.num_microbatches)) if problem.cuts_evenly else 1
        times = list(
            zip(*(problem.estimator.lower_bound_microbatch_times(name, tp, smallest, cp=cp) for tp in tps), strict=True)
        )
        one[name] = (
            [min(time.forward_s for time in of_layer) for of_layer in times],
            [min(time.backward_s - time.weight_s for time in of_layer) for of_layer in times],
        )
        heads[name], backs[name] = [], []
        head = back = 0.0
        for i in range(len(times)):
            entered = [edge.source for edge in problem.edges if edge.target == name and i in edge.layers]
            head = max([head, *(heads[source][-1] + one[source][0][-1] for source in entered)])
            back = max([back, *(backs[source][-1] + one[source][1][-1] for source in entered)])
            heads[name].append(head)
            backs[name].append(back)
            head, back = head + one[name][0][i], back + one[name][1][i]
    return heads, _tails(problem, one, backs)


def _tails(
    problem: PlanningProblem, one: Mapping[str, tuple[list[float], list[float]]], backs: Mapping[str, list[float]]
) -> dict[str, list[float]]:
    """Tails: a backward is followed by those of earlier layers; a forward without one, by everything it feeds."""
    after_forward: dict[str, list[float]] = {}
    tails: dict[str, list[float]] = {}
    for name in reversed(_in_order(problem)):
        num_layers = len(one[name][0])
        outside = [(edge.target, min(edge.layers)) for edge in problem.edges if edge.source == name]
        follow = max((_from(after_forward, one, *entry) for entry in outside), default=0.0)
        after = [0.0] * num_layers
        for i in reversed(range(num_layers)):
            after[i] = follow
            follow += one[name][0][i] + one[name][1][i]
        after_forward[name] = after
        tails[name] = [backs[name][i] if needs.any else after[i] for i, needs in enumerate(problem.gradients[name])]
    return tails


def _from(
    after_forward: Mapping[str, list[float]],
    one: Mapping[str, tuple[list[float], list[float]]],
    name: str,
    layer: int,
) -> float:
    """Time from the start of a layer's forward to the end of its backward."""
    return after_forward[name][layer] + one[name][0][layer] + one[name][1][layer]


def _in_order(problem: PlanningProblem) -> list[str]:
    order: list[str] = []
    remaining = list(problem.modules)
    while remaining:
        name = next(m for m in remaining if not any(e.target == m and e.source in remaining for e in problem.edges))
        remaining.remove(name)
        order.append(name)
    return order


def _work(layers: Sequence[_Layer], num_devices: int) -> float:
    """The bound from work. Ranks without a layer do not work; others may stay unused if that is faster."""
    work = sum(layer.device_s for layer in layers)
    weight = sum(layer.device_weight_s for layer in layers)
    head_places = sorted((layer.head_s, layer.num_holders) for layer in layers)
    tail_places = sorted((layer.tail_s, layer.num_holders) for layer in layers)

    def seconds(num_busy: int) -> float:
        heads, tails = _earliest(head_places, num_busy), _earliest(tail_places, num_busy)
        return (work + heads + max(0.0, tails - weight)) / num_busy

    # The numerator is convex in the number of ranks, so its quotient falls up to a place and rises from there.
    low, high = 1, min(num_devices, sum(layer.num_holders for layer in layers))
    if high > 1 and seconds(high) <= seconds(high - 1):
        low = high
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if seconds(middle + 1) < seconds(middle) else (low, middle)
    return seconds(low)


def _earliest(places: Sequence[tuple[float, int]], num_ranks: int) -> float:
    """The sum of the `num_ranks` smallest values, where each occurs as often as it has places."""
    result, left = 0.0, num_ranks
    for seconds, count in places:
        result += seconds * min(count, left)
        left -= min(count, left)
    return result


def _indivisible(layers: Sequence[_Layer]) -> float:
    return max(layer.head_s + layer.work_s + max(0.0, layer.tail_s - layer.weight_s) for layer in layers)


def _pigeonholes(problem: PlanningProblem, layers: Sequence[_Layer], sizes: Sizes) -> float:
    """The bound from pigeonholes: some rank has k + 1 of the k D + 1 largest items."""
    if not _replicas_work_alike(problem, {size.num_replicas for size in sizes.values()}):
        return 0.0
    if any(len(size.tp) > 1 for size in sizes.values()):
        return 0.0
    items = sorted(
        (seconds for layer in layers for seconds in [layer.work_s] * min(layer.num_holders, problem.num_devices)),
        reverse=True,
    )
    best = 0.0
    for k in range(1, (len(items) - 1) // problem.num_devices + 1):
        last = k * problem.num_devices + 1
        best = max(best, sum(items[last - k - 1 : last]))
    return best


def _replicas_work_alike(problem: PlanningProblem, numbers: Set[int]) -> bool:
    """`numbers`: of replicas."""
    if numbers == {1}:
        return True
    divides = problem.cuts_evenly and all(len(problem.samples) % n == 0 for n in numbers)
    return divides and not any(problem.sample_kinds)


def _fixed_s(problem: PlanningProblem, modules: _Modules, sizes: Sizes) -> float:
    """The optimizer's step if all ranks updated equally many parameters."""
    updated = sum(modules.num_updated(name, size) for name, size in sizes.items())
    return problem.estimator.optimizer_seconds(updated / problem.num_devices)
