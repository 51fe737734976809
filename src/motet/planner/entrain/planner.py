"""Entrain: one static layout from the work of a whole batch (thesis 4.4.3, Algorithm 3).

The devices of each replica are allocated to modules in proportion to their work in the typical global batch. For every
tensor-parallel and context-parallel size, the rest of a module's share determines its pipeline stages, which the exact
partition cuts. Layouts are compared by

    T = longest path through the modules (sum of a module's stages) + (K - 1) slowest stage + resharding + reduction.

The best layout of each data-parallel size is simulated, in the order of T, while T is below the best simulation.
`motet data-stats` tells whether the global batch is large enough to be typical (Algorithm 2).

Deviations: (4.2) adds up all modules, but encoders run in parallel, so the longest path counts here. A share that a
tensor-parallel size does not divide leaves devices unused instead of excluding the size. Algorithm 3 omits the sum of
gradients over replicas, which matters on slow networks; the last term is that of the slowest module.
Limits: resharding counts as one exposed transfer per microbatch over the links of the first replica, into the first
stage of the target; simulation detects layouts that exceed memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import inf
from typing import NamedTuple

from motet.costs.communication import resharding_seconds
from motet.errors import UserError
from motet.plan import Edge, LayerRange, Plan
from motet.planner.entrain.profiling_size import proportional_allocation
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.degrees import dp_sizes, no_layout, tp_sizes
from motet.planner.layouts.layout import Placement, build_plan
from motet.planner.layouts.partition import partition, stage_costs
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.selection import rank

MAX_SIMULATED = 8


class Shape(NamedTuple):
    """Degrees of one module in each replica."""

    tp: int
    cp: int
    pp: int

    @property
    def ranks_per_stage(self) -> int:
        return self.tp * self.cp

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_stage * self.pp


@dataclass(frozen=True, kw_only=True)
class Component:
    """One module in the search."""

    layer_s: Callable[[int, int], Sequence[float]]
    """(tp, cp) -> seconds of each layer, forward and backward of one microbatch."""
    tp_sizes: Sequence[int] = (1,)
    cp_sizes: Sequence[int] = (1,)
    max_stages: int | None = None


@dataclass(frozen=True)
class Configuration:
    shapes: Mapping[str, Shape]
    stage_s: Mapping[str, tuple[float, ...]]
    iteration_s: float


Reshard = Callable[[Edge, Mapping[str, Shape]], float]
"""(edge, shapes of all modules) -> seconds that one microbatch's resharding takes, forth and back."""
Reduce = Callable[[str, Mapping[str, Shape], Sequence[LayerRange]], float]
"""(module, shapes of all modules, its stages) -> seconds in which the replicas sum its gradients."""


def configurations(
    components: Mapping[str, Component],
    edges: Sequence[Edge],
    allocation: Mapping[str, int],
    num_microbatches: int,
    reshard_s: Reshard = lambda edge, shapes: 0.0,
    reduce_s: Reduce = lambda name, shapes, stages: 0.0,
) -> Iterator[Configuration]:
    """Every configuration of one replica (tiers 1 and 2). `allocation`: devices of each module."""
    choices = [list(_shapes(component, allocation[name])) for name, component in components.items()]
    cut: dict[tuple[str, Shape], tuple[Sequence[LayerRange], tuple[float, ...]]] = {}
    for combination in product(*choices):
        shapes = dict(zip(components, combination, strict=True))
        for name, shape in shapes.items():
            if (name, shape) not in cut:
                times = components[name].layer_s(shape.tp, shape.cp)
                stages = partition(times, shape.pp)
                cut[name, shape] = stages, tuple(stage_costs(times, stages))
        stage_s = {name: cut[name, shape][1] for name, shape in shapes.items()}
        seconds = iteration_s(stage_s, edges, num_microbatches)
        seconds += num_microbatches * sum(reshard_s(edge, shapes) for edge in edges)
        seconds += max(reduce_s(name, shapes, cut[name, shape][0]) for name, shape in shapes.items())
        yield Configuration(shapes, stage_s, seconds)


def _shapes(component: Component, num_devices: int) -> Iterator[Shape]:
    for tp, cp in product(component.tp_sizes, component.cp_sizes):
        num_layers = len(component.layer_s(tp, cp))
        pp = min(num_devices // (tp * cp), num_layers, component.max_stages or num_layers)
        if pp:
            yield Shape(tp, cp, pp)


def iteration_s(stage_s: Mapping[str, Sequence[float]], edges: Sequence[Edge], num_microbatches: int) -> float:
    """Equation (4.2) with the longest path through the modules, which form a DAG."""
    finished: dict[str, float] = {}

    def finish(name: str) -> float:
        if name not in finished:
            before = max((finish(edge.source) for edge in edges if edge.target == name), default=0.0)
            finished[name] = before + sum(stage_s[name])
        return finished[name]

    slowest = max(max(times) for times in stage_s.values())
    return max(map(finish, stage_s)) + (num_microbatches - 1) * slowest


def entrain(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """The fastest simulated plan that fits into memory; one that exceeds it only if none of the best fits.

    Raises `UserError` if there are fewer devices than modules, and for a placement other than `parallel`."""
    if placement not in (None, "parallel"):
        raise UserError(
            f"parallel.placement: entrain gives every module its own ranks, but is {placement}; leave it out"
        )
    found = sorted(_with_dp(problem), key=lambda each: each[1].iteration_s)
    if not found:
        if len(problem.modules) <= problem.num_devices:
            raise no_layout(problem, "entrain")
        names = " and ".join(problem.modules)
        raise UserError(f"cluster.num_devices: is {problem.num_devices}, but {names} need ranks of their own")
    evaluations: list[Evaluation] = []
    fitting: dict[int, float] = {}
    for dp, configuration in found:
        if len(evaluations) == MAX_SIMULATED or configuration.iteration_s >= min(fitting.values(), default=inf):
            break
        if dp in fitting:
            continue
        degrees = {name: Degrees(tp=s.tp, cp=s.cp, pp=s.pp, dp=dp) for name, s in configuration.shapes.items()}
        evaluations.append(evaluate(problem, build_plan(problem, degrees, planner="entrain")))
        if evaluations[-1].fits:
            fitting[dp] = evaluations[-1].iteration_time_s
    return min(evaluations, key=rank).plan


def _with_dp(problem: PlanningProblem) -> Iterator[tuple[int, Configuration]]:
    for dp in dp_sizes(problem):
        budget = problem.num_devices // dp
        if budget < len(problem.modules):
            continue
        work = [device_seconds(problem, name) for name in problem.modules]
        allocation = dict(zip(problem.modules, proportional_allocation(budget, work), strict=True))
        components = {name: _component(problem, name, dp) for name in problem.modules}
        terms = resharding(problem, dp), _reduction(problem, dp)
        for found in configurations(components, problem.edges, allocation, problem.num_microbatches, *terms):
            yield dp, found


def device_seconds(problem: PlanningProblem, name: str) -> float:
    """Device seconds of a module for the global batch, by which devices are allocated."""
    tp = min(tp_sizes(problem, name))
    return tp * problem.num_microbatches * sum(problem.estimator.layer_seconds(name, tp))


def _component(problem: PlanningProblem, name: str, dp: int) -> Component:
    return Component(
        layer_s=lambda tp, cp: problem.estimator.layer_seconds(name, tp, dp),
        tp_sizes=tp_sizes(problem, name),
        max_stages=problem.modules[name].max_stages,
    )


def resharding(problem: PlanningProblem, dp: int) -> Reshard:
    """Seconds of resharding between modules. `dp`: number of replicas that share the batch."""

    def seconds(edge: Edge, shapes: Mapping[str, Shape]) -> float:
        source, target = shapes[edge.source], shapes[edge.target]
        if (source.tp, source.cp) == (target.tp, target.cp):
            return 0.0
        first_rank = _first_ranks(shapes)
        begin, end = first_rank[edge.source] + source.ranks_per_stage * (source.pp - 1), first_rank[edge.target]
        senders = range(begin, begin + source.ranks_per_stage)
        receivers = range(end, end + target.ranks_per_stage)
        num_bytes = problem.estimator.output_bytes(edge.source, dp)
        returns = any(needs.any for needs in problem.gradients[edge.source])
        there = resharding_seconds(problem.cluster, _transfers(senders, receivers, num_bytes / target.cp))
        back = resharding_seconds(problem.cluster, _transfers(receivers, senders, num_bytes / source.cp))
        return there + (back if returns else 0.0)

    return seconds


def _first_ranks(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """First rank of each module in the first replica."""
    ends = accumulate(shape.num_ranks for shape in shapes.values())
    return {name: end - shape.num_ranks for (name, shape), end in zip(shapes.items(), ends, strict=True)}


def _transfers(senders: range, receivers: range, num_bytes: float) -> list[tuple[int, int, float]]:
    """Transfers of which each receiver has one sender, in turns, as messages do (`motet.schedule.lower`)."""
    return [(senders[i % len(senders)], receiver, num_bytes) for i, receiver in enumerate(receivers)]


def _reduction(problem: PlanningProblem, dp: int) -> Reduce:
    def seconds(name: str, shapes: Mapping[str, Shape], stages: Sequence[LayerRange]) -> float:
        shape, first_rank = shapes[name], _first_ranks(shapes)[name]
        of_layers = problem.estimator.gradient_bytes(name, tp=shape.tp)
        most = max(sum(of_layers[first:last]) for first, last in stages)
        stride = sum(each.num_ranks for each in shapes.values())
        holders = [first_rank + d * stride + c * shape.tp for d in range(dp) for c in range(shape.cp)]
        return problem.estimator.all_reduce_seconds(holders, most)

    return seconds
