"""Entrain: one static layout from the work of a whole batch (thesis 4.4.3, Algorithm 3).

Each replica's devices are shared among the modules in proportion to their work in the typical global batch. For every
tensor- and context-parallel size, what is left of a module's share are its pipeline stages, cut by the exact partition;
then the layout counts whose iteration takes least,

    T = longest path through the modules (sum of a module's stages) + (K - 1) slowest stage + resharding.

Is the global batch large enough to be typical? `profiling_size` tells (Algorithm 2, `motet.planner.profiling_size`).

Deviations: (4.2) adds up all modules, but encoders side by side run in parallel: here the longest path counts. A share
that a tensor-parallel size does not divide leaves devices idle instead of ruling the size out.
Limits: resharding is what the boundary's messages cost, one after the other; layouts that do not fit into memory are
told by simulating the best ones in turn; `profiling_size` costs samples one by one, so it sees no padding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from motet.errors import UserError
from motet.plan import Edge, Plan
from motet.planner.bound_and_simulate import rank
from motet.planner.degrees import dp_sizes, no_layout, tp_sizes
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.explicit import Placement, build_plan
from motet.planner.partition import partition, stage_costs
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.profiling_size import (
    ProfilingSize,
    drawing_from,
    proportional_allocation,
    stable_profiling_size,
)

MAX_SIMULATED = 8


class Shape(NamedTuple):
    """Of one module in each replica."""

    tp: int
    cp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class Component:
    """One module, as the search sees it."""

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


Reshard = Callable[[Edge, Shape, Shape], float]
"""(edge, source's shape, target's) -> seconds that one microbatch's resharding takes, forth and back."""


def configurations(
    components: Mapping[str, Component],
    edges: Sequence[Edge],
    allocation: Mapping[str, int],
    num_microbatches: int,
    reshard_s: Reshard = lambda edge, source, target: 0.0,
) -> Iterator[Configuration]:
    """Every configuration of one replica (tiers 1 and 2). `allocation`: devices of each module."""
    choices = [list(_shapes(component, allocation[name])) for name, component in components.items()]
    cut: dict[tuple[str, Shape], tuple[float, ...]] = {}
    for combination in product(*choices):
        shapes = dict(zip(components, combination, strict=True))
        for name, shape in shapes.items():
            if (name, shape) not in cut:
                times = components[name].layer_s(shape.tp, shape.cp)
                cut[name, shape] = tuple(stage_costs(times, partition(times, shape.pp)))
        stage_s = {name: cut[name, shape] for name, shape in shapes.items()}
        resharding = num_microbatches * sum(reshard_s(e, shapes[e.source], shapes[e.target]) for e in edges)
        yield Configuration(shapes, stage_s, iteration_s(stage_s, edges, num_microbatches) + resharding)


def _shapes(component: Component, num_devices: int) -> Iterator[Shape]:
    for tp, cp in product(component.tp_sizes, component.cp_sizes):
        num_layers = len(component.layer_s(tp, cp))
        pp = min(num_devices // (tp * cp), num_layers, component.max_stages or num_layers)
        if pp:
            yield Shape(tp, cp, pp)


def iteration_s(stage_s: Mapping[str, Sequence[float]], edges: Sequence[Edge], num_microbatches: int) -> float:
    """(4.2), but with the longest path through the modules, which form a DAG."""
    finished: dict[str, float] = {}

    def finish(name: str) -> float:
        if name not in finished:
            before = max((finish(edge.source) for edge in edges if edge.target == name), default=0.0)
            finished[name] = before + sum(stage_s[name])
        return finished[name]

    slowest = max(max(times) for times in stage_s.values())
    return max(map(finish, stage_s)) + (num_microbatches - 1) * slowest


def entrain(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """The best configuration that fits into memory; one that does not only if none of the best does.

    Raises `ValueError` if there are fewer devices than modules, and for a placement other than `parallel`."""
    if placement not in (None, "parallel"):
        raise UserError(f"parallel.placement: entrain gives every module its own ranks; {placement} shares them")
    found = sorted(_with_dp(problem), key=lambda each: each[1].iteration_s)
    if not found:
        if len(problem.modules) <= problem.num_devices:
            raise no_layout(problem, "entrain")
        names = " and ".join(problem.modules)
        raise UserError(f"cluster.num_devices: is {problem.num_devices}, but {names} need ranks of their own")
    evaluations: list[Evaluation] = []
    for dp, configuration in found[:MAX_SIMULATED]:
        degrees = {name: Degrees(tp=s.tp, cp=s.cp, pp=s.pp, dp=dp) for name, s in configuration.shapes.items()}
        evaluations.append(evaluate(problem, build_plan(problem, degrees, planner="entrain")))
        if evaluations[-1].fits:
            break
    return min(evaluations, key=rank).plan


def _with_dp(problem: PlanningProblem) -> Iterator[tuple[int, Configuration]]:
    for dp in dp_sizes(problem):
        budget = problem.num_devices // dp
        if budget < len(problem.modules):
            continue
        work = [device_seconds(problem, name) for name in problem.modules]
        allocation = dict(zip(problem.modules, proportional_allocation(budget, work), strict=True))
        components = {name: _component(problem, name, dp) for name in problem.modules}
        reshard_s = _resharding(problem, dp)
        for found in configurations(components, problem.edges, allocation, problem.num_microbatches, reshard_s):
            yield dp, found


def device_seconds(problem: PlanningProblem, name: str) -> float:
    """Of one device for the module's share of the global batch: what devices are allocated by."""
    tp = min(tp_sizes(problem, name))
    return tp * problem.num_microbatches * sum(time.total_s for time in problem.layer_times(name, tp))


def _component(problem: PlanningProblem, name: str, dp: int) -> Component:
    return Component(
        layer_s=lambda tp, cp: [time.total_s for time in problem.layer_times(name, tp, dp)],
        tp_sizes=tp_sizes(problem, name),
        max_stages=problem.modules[name].max_stages,
    )


def _resharding(problem: PlanningProblem, dp: int) -> Reshard:
    num_microbatches = dp * problem.num_microbatches

    def seconds(edge: Edge, source: Shape, target: Shape) -> float:
        if (source.tp, source.cp) == (target.tp, target.cp):
            return 0.0
        tokens = sum(sample.num_outputs(edge.source) for sample in problem.samples) / num_microbatches
        width = problem.modules[edge.source].workload.output_size
        there = problem.cluster.between_nodes.seconds(tokens * width * problem.memory.activation_bytes)
        returns = any(needs.any for needs in problem.gradients[edge.source])
        return there * (2 if returns else 1)

    return seconds


def profiling_size(
    problem: PlanningProblem, dp: int, *, alpha: float = 0.05, p_error: float = 0.05, seed: int = 0
) -> ProfilingSize:
    """b_min for this model and cluster, with batches drawn from the problem's samples (Algorithm 2). If it is larger
    than the global batch, the layout is not sure to balance the next batch.

    Raises `ValueError` if the shares lie where the allocation changes."""
    alone = [replace(problem, samples=(sample,), num_microbatches=1) for sample in problem.samples]
    work = np.array(
        [[device_seconds(one, name) if one.samples[0].has(name) else 0.0 for name in problem.modules] for one in alone]
    )
    draw = drawing_from(work, problem.num_devices // dp, np.random.default_rng(seed))
    return stable_profiling_size(draw, alpha=alpha, p_error=p_error)
