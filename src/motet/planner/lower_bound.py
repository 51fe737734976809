"""No plan of a problem takes less: a lower bound over all plans and schedules, by relaxation.

Covered are all plans on the problem's devices in which every module has one tensor-parallel size and one number of
replicas, both out of given sets: any cut into stages, any groups (own, shared, interleaved, with copies), any schedule,
backwards split or not, the batch dealt out as `problem.assignment` does.

Relaxed are: messages and reductions take no time; memory is looked at as one sum, of parameters, gradients and moments
over all devices; ranks may interrupt and share out work at will. What is kept:

1. Work. A rank works from when its first layer's input can exist (head) until what must follow its last action (tail).
   A layer is held by tp x replicas ranks, so not every rank can begin with layer 0: over D ranks heads add up to at
   least those of the D earliest places. D x T >= work + heads + what of the tails weight gradients cannot fill.
2. A layer is indivisible: T >= head + all of its work on its rank + tail.
3. Pigeonholes: of k x D + 1 layers' shares some rank has k + 1. Only where replicas have equal work.

The bound is the least over all combinations of sizes, which are few; each is a maximum of the three. Loads are summed
sample by sample, which no cut into microbatches can undercut (`PlanningProblem.least_total_times`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from motet.costs.memory import RESERVE, static_layer_bytes
from motet.planner.degrees import dp_sizes, tp_sizes
from motet.planner.problem import PlanningProblem


@dataclass(frozen=True)
class _Layer:
    """One layer of the model under one combination of sizes. Seconds on each rank that holds it."""

    num_holders: int
    work_s: float
    weight_s: float
    head_s: float
    tail_s: float


def problem_lower_bound_s(
    problem: PlanningProblem,
    *,
    num_replicas: Mapping[str, Sequence[int]] | None = None,
    tp: Mapping[str, Sequence[int]] | None = None,
) -> float:
    """Seconds of one iteration that no plan undercuts; infinite if no combination can fit into memory.

    `num_replicas`, `tp`: for each module the sizes that plans may have; None: the problem's."""
    return (
        min(
            (
                max(_work(layers, problem.num_devices), _indivisible(layers), _pigeonholes(problem, layers, replicas))
                + _fixed_s(problem, sizes, replicas)
                for sizes, replicas in _combinations(problem, num_replicas, tp)
                for layers in [_layers(problem, sizes, replicas)]
            ),
            default=float("inf"),
        )
        + problem.program_s
    )


Sizes = Mapping[str, int]


def _combinations(
    problem: PlanningProblem, num_replicas: Mapping[str, Sequence[int]] | None, tp: Mapping[str, Sequence[int]] | None
) -> Iterator[tuple[Sizes, Sizes]]:
    """Tensor-parallel sizes and numbers of replicas whose parameters fit."""
    names = list(problem.modules)
    tp_choices = [sorted(set(tp[name] if tp else tp_sizes(problem, name))) for name in names]
    if num_replicas is None:
        replica_choices = [(dp,) * len(names) for dp in dp_sizes(problem)]
    else:
        replica_choices = list(product(*(sorted(set(num_replicas[name])) for name in names)))
    for sizes in product(*tp_choices):
        for replicas in replica_choices:
            combination = dict(zip(names, sizes, strict=True)), dict(zip(names, replicas, strict=True))
            if _fits(problem, *combination):
                yield combination


def _fits(problem: PlanningProblem, tp: Sizes, replicas: Sizes) -> bool:
    if any(tp[name] * replicas[name] > problem.num_devices for name in problem.modules):
        return False
    needed = 0
    for name, module in problem.modules.items():
        for index, layer in enumerate(module.workload.layers):
            needed += (
                replicas[name]
                * tp[name]
                * static_layer_bytes(
                    layer,
                    trainable=module.is_trainable(index),
                    tp_size=tp[name],
                    num_holders=replicas[name],
                    options=problem.memory,
                )
            )
    return needed <= problem.num_devices * problem.cluster.device.memory_bytes * (1 - RESERVE)


def _layers(problem: PlanningProblem, tp: Sizes, replicas: Sizes) -> list[_Layer]:
    total = {name: problem.least_total_times(name, tp[name], replicas[name]) for name in problem.modules}
    heads, tails = _heads_and_tails(problem, tp, replicas)
    return [
        _Layer(
            num_holders=tp[name] * replicas[name],
            work_s=time.total_s / replicas[name],
            weight_s=time.weight_s / replicas[name],
            head_s=heads[name][i],
            tail_s=tails[name][i],
        )
        for name in problem.modules
        for i, time in enumerate(total[name])
    ]


def _heads_and_tails(
    problem: PlanningProblem, tp: Sizes, replicas: Sizes
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """By module and layer: the least time before its first action, and after its last."""
    heads: dict[str, list[float]] = {}
    backs: dict[str, list[float]] = {}
    one: dict[str, tuple[list[float], list[float]]] = {}
    for name in _in_order(problem):
        smallest = (
            max(1, len(problem.samples) // (replicas[name] * problem.num_microbatches)) if problem.cuts_evenly else 1
        )
        times = problem.least_times(name, tp[name], smallest)
        one[name] = ([time.forward_s for time in times], [time.backward_s - time.weight_s for time in times])
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
    """After a backward come those of the layers before; after a forward that has none, all that it feeds."""
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
    """From the start of a layer's forward to the end of its backward."""
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
    """Ranks that no layer is left for are idle anyway."""
    num_busy = min(num_devices, sum(layer.num_holders for layer in layers))
    work = sum(layer.num_holders * layer.work_s for layer in layers)
    weight = sum(layer.num_holders * layer.weight_s for layer in layers)
    heads = _earliest([(layer.head_s, layer.num_holders) for layer in layers], num_busy)
    tails = _earliest([(layer.tail_s, layer.num_holders) for layer in layers], num_busy)
    return (work + heads + max(0.0, tails - weight)) / num_busy


def _earliest(places: Sequence[tuple[float, int]], num_ranks: int) -> float:
    """The sum of the `num_ranks` smallest, each as often as there are places."""
    result, left = 0.0, num_ranks
    for seconds, count in sorted(places):
        result += seconds * min(count, left)
        left -= min(count, left)
    return result


def _indivisible(layers: Sequence[_Layer]) -> float:
    return max(layer.head_s + layer.work_s + max(0.0, layer.tail_s - layer.weight_s) for layer in layers)


def _pigeonholes(problem: PlanningProblem, layers: Sequence[_Layer], replicas: Sizes) -> float:
    """Sorted by work, the (k D + 1 - j)-th items for j = 0..k: some rank has k + 1 of those before, none smaller."""
    if not _replicas_work_alike(problem, replicas):
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


def _replicas_work_alike(problem: PlanningProblem, replicas: Sizes) -> bool:
    if set(replicas.values()) == {1}:
        return True
    first = problem.samples[0]
    divides = problem.cuts_evenly and all(len(problem.samples) % n == 0 for n in replicas.values())
    return divides and all(
        (sample.layouts, sample.num_loss_tokens) == (first.layouts, first.num_loss_tokens) for sample in problem.samples
    )


def _fixed_s(problem: PlanningProblem, tp: Sizes, replicas: Sizes) -> float:
    """The optimizer's step if all ranks updated equally many parameters."""
    updated = 0.0
    for name, module in problem.modules.items():
        held = tp[name] * (1 if problem.memory.zero1 else replicas[name])
        updated += held * sum(
            layer.num_parameters_per_rank(tp[name])
            for index, layer in enumerate(module.workload.layers)
            if module.is_trainable(index)
        )
    table = problem.table
    return table.optimizer_constant_s + table.optimizer_s_per_parameter * updated / problem.num_devices
