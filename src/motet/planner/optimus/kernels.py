"""The kernels of a stage, with seconds, as Optimus' bubble scheduler places them.

Which kernels a layer has, what they communicate and how long that takes, is `motet.costs.kernels` and the cluster's
links. What the cost table says a layer takes, less its collectives, is shared out among its other kernels as they would
share it at the assumed speeds: a profiled table knows layers, not kernels.

Limits: a backward runs the gradients of a layer's inputs before those of its weights; kernels beside each other on one
device are not overlapped.
"""

from collections.abc import Sequence
from typing import NamedTuple

from motet.costs.analytic import AnalyticCosts
from motet.costs.kernel_speeds import default_speeds
from motet.costs.kernels import KernelShape, LayerKernels, layer_kernels
from motet.costs.layer_gradients import LayerGradients
from motet.plan import LayerRange
from motet.planner.cost_estimates.layer_times import layer_times
from motet.planner.cost_estimates.microbatch_loads import typical_load
from motet.planner.optimus.timeline import Kernel, Kernels
from motet.planner.problem import PlanningProblem
from motet.shapes.module_shape import LayerShape


class StageKernels(NamedTuple):
    """Of each stage, for a typical microbatch of the language model."""

    forward: list[Kernels]
    backward: list[Kernels]


def stage_kernels(problem: PlanningProblem, name: str, tp: int, dp: int, stages: Sequence[LayerRange]) -> StageKernels:
    """`dp`: of the language model."""
    assumed = _assumed_costs(problem)
    load = typical_load(problem, name, dp)
    known: dict[tuple[LayerShape, LayerGradients, float, float], tuple[Kernels, Kernels]] = {}
    layers = []
    for i, (layer, time) in enumerate(
        zip(problem.modules[name].workload.layers, layer_times(problem, name, tp, dp), strict=True)
    ):
        gradients = problem.gradients[name][i]
        key = (layer, gradients, time.forward_s, time.backward_s)
        if key not in known:
            shapes = layer_kernels(
                layer,
                tp_size=tp,
                element_bytes=problem.memory.computed_bytes,
                residual_bytes=problem.memory.activation_bytes,
            )
            recomputed = name in problem.recompute and layer.part == "block"

            def in_order(kernels: Sequence[KernelShape], total_s: float) -> Kernels:
                seconds = [assumed.kernel(kernel, tp_size=tp).seconds(load) for kernel in kernels]
                return _scaled(seconds, [kernel.kind == "communication" for kernel in kernels], total_s)

            known[key] = (
                in_order(shapes.forward, time.forward_s),
                in_order(_backward(shapes, gradients, recomputed=recomputed), time.backward_s),
            )
        layers.append(known[key])
    return StageKernels(
        [tuple(k for forward, _ in layers[first:last] for k in forward) for first, last in stages],
        [tuple(k for _, backward in reversed(layers[first:last]) for k in backward) for first, last in stages],
    )


def _assumed_costs(problem: PlanningProblem) -> AnalyticCosts:
    device, size = problem.cluster.device, problem.memory.computed_bytes
    dtype = "bfloat16" if size == 2 and "bfloat16" in device.peak_flops else next(iter(device.peak_flops))
    return AnalyticCosts(
        cluster=problem.cluster,
        dtype=dtype,
        message_bytes=problem.memory.activation_bytes,
        speeds=default_speeds(device),
    )


def _backward(shapes: LayerKernels, gradients: LayerGradients, *, recomputed: bool) -> tuple[KernelShape, ...]:
    if not gradients.any:
        return ()
    again = shapes.forward if recomputed else ()
    if not gradients.input_gradient:
        return again + shapes.weight_gradient_alone
    return again + shapes.input_gradient + (shapes.weight_gradient if gradients.weight_gradient else ())


def _scaled(seconds: Sequence[float], communicates: Sequence[bool], total_s: float) -> Kernels:
    """Kernels that take `total_s` together: the collectives as they are, as far as there is time for them."""
    collective_s = sum(s for s, flag in zip(seconds, communicates, strict=True) if flag)
    computed_s = sum(seconds) - collective_s
    if not total_s:
        return ()
    if not sum(seconds):
        return (Kernel(total_s),)
    of_collectives = min(1.0, total_s / collective_s) if collective_s else 0.0
    of_others = (total_s - of_collectives * collective_s) / computed_s if computed_s else 0.0
    if not computed_s:
        of_collectives = total_s / collective_s
    kernels = (
        Kernel(s * (of_collectives if flag else of_others), flag) for s, flag in zip(seconds, communicates, strict=True)
    )
    return tuple(kernel for kernel in kernels if kernel.seconds)
