"""Layers as the kernels that Optimus places: what computes and what communicates, in order, with seconds.

A layer's time at a tensor-parallel size comes from the cost table. What it communicates is that time less its share of
the time on one rank, where the table knows that; the rest is shared out among its linears and its attention by FLOPs.
Communication closes what Megatron's row-cut linears end (Shoeybi et al. 2019, section 3): attention, then the MLP.

Limits: an analytic or profiled table knows layers, not kernels; norms and activation functions count with the linears.
"""

from collections.abc import Sequence
from itertools import pairwise

from motet.costs.analytic import layer_flops
from motet.costs.cost_model import CostTable
from motet.costs.load import Load
from motet.plan import LayerRange
from motet.planner.optimus_timeline import Kernel, Kernels
from motet.planner.problem import LayerTime, PlanningProblem
from motet.workload import LayerShape


def stage_kernels(
    problem: PlanningProblem, name: str, tp: int, dp: int, stages: Sequence[LayerRange]
) -> tuple[list[Kernels], list[Kernels]]:
    """Forward and backward of each stage, for a typical microbatch of the language model."""
    load = problem.typical_load(name, dp)
    times = problem.layer_times(name, tp, dp)
    whole = problem.layer_times(name, 1, dp) if tp > 1 and _knows(problem.table, name, 1) else None
    forward, backward = [], []
    for index, layer in enumerate(problem.modules[name].workload.layers):
        alone = whole[index] if whole else None
        forward.append(_layer_kernels(layer, load, *_shares(times[index], alone, tp, forward=True)))
        there = _layer_kernels(layer, load, *_shares(times[index], alone, tp, forward=False))
        backward.append(_reversed_segments(there))
    return (
        [tuple(kernel for layer in forward[first:last] for kernel in layer) for first, last in stages],
        [tuple(kernel for layer in reversed(backward[first:last]) for kernel in layer) for first, last in stages],
    )


def _knows(table: CostTable, name: str, tp: int) -> bool:
    return tp in table.modules[name]


def _shares(time: LayerTime, alone: LayerTime | None, tp: int, *, forward: bool) -> tuple[float, float]:
    """(computation, communication) in seconds."""
    total = time.forward_s if forward else time.backward_s
    if alone is None:
        return total, 0.0
    computation = min(total, (alone.forward_s if forward else alone.backward_s) / tp)
    return computation, total - computation


def _layer_kernels(layer: LayerShape, load: Load, compute_s: float, communicate_s: float) -> Kernels:
    """The forward's order; a segment is what stands between communications."""
    segments: list[list[float]] = [[]]
    attention_s = _attention_flops(layer, load)
    num_cut = sum(linear.cut == "row" for linear in layer.linears)
    for linear in layer.linears:
        if linear.cut == "row" and attention_s:
            segments[-1].append(attention_s)
            attention_s = 0.0
        segments[-1].append(float(linear.in_features * linear.out_features) * linear.rows_per_token)
        if linear.cut == "row":
            segments.append([])
    if attention_s:
        segments[-1].append(attention_s)
    total = sum(map(sum, segments))
    if not total:
        both = (Kernel(compute_s), Kernel(communicate_s, True))
        return tuple(kernel for kernel in both if kernel.seconds)
    kernels: list[Kernel] = []
    for i, segment in enumerate(segments):
        kernels += [Kernel(compute_s * flops / total) for flops in segment if compute_s and flops]
        if communicate_s and (i < num_cut or (num_cut == 0 and i == 0)):
            kernels.append(Kernel(communicate_s / max(1, num_cut), True))
    return tuple(kernels)


def _attention_flops(layer: LayerShape, load: Load) -> float:
    """In the unit of a linear's in x out: two FLOPs for each token."""
    if layer.attention is None or not load.tokens:
        return 0.0
    flops = layer_flops(layer).forward
    return max(0.0, flops.per_pair * load.pairs + flops.per_incoming_pair * load.incoming_pairs) / (2 * load.tokens)


def _reversed_segments(kernels: Kernels) -> Kernels:
    """The backward runs the segments in reverse, and each still ends with its communication."""
    bounds = [0, *(i + 1 for i, kernel in enumerate(kernels) if kernel.is_communication)]
    if bounds[-1] != len(kernels):
        bounds.append(len(kernels))
    result: list[Kernel] = []
    for first, last in reversed(list(pairwise(bounds))):
        segment = kernels[first:last]
        result += [kernel for kernel in reversed(segment) if not kernel.is_communication]
        result += [kernel for kernel in segment if kernel.is_communication]
    return tuple(result)
