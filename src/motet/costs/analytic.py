"""Costs of layers that nobody has measured: their kernels' FLOPs and bytes over what the device reaches of its peaks.

The costs of a table are linear in the sums of a load; a roofline is not. What stands in for it is the larger of the two
for every sum by itself: a matrix product takes the time to read its weights, and for each row the longer of computing
and moving it. That is never less than the roofline (`motet.costs.kernel_speeds.kernel_seconds`) and at most twice as
much, where both take equally long; kernels come near neither peak there.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date

from motet.cluster import Cluster
from motet.costs.communication import collective_terms
from motet.costs.cost_model import CostTable, LayerCost, ModuleCosts, Quadratic, total
from motet.costs.kernel_speeds import Speeds, default_speeds
from motet.costs.kernels import KernelShape, LayerKernels, layer_kernels, total_flops
from motet.shapes.module_shape import LayerShape, ModuleWorkload

ELEMENT_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Of the operands of kernels, by the dtype of the computation."""


def layer_flops(layer: LayerShape) -> LayerCost:
    """Like a layer's cost, but in FLOPs instead of seconds."""
    return _cost_of(layer, layer_kernels(layer), total_flops)


def _cost_of(
    layer: LayerShape, kernels: LayerKernels, total_of: Callable[[Iterable[KernelShape]], Quadratic]
) -> LayerCost:
    forward = total_of(kernels.forward)
    return LayerCost(
        forward=forward,
        forward_without_graph=forward,
        input_gradient=Quadratic() if layer.part == "embed" else total_of(kernels.input_gradient),
        weight_gradient=total_of(kernels.weight_gradient),
        weight_gradient_alone=total_of(kernels.weight_gradient_alone),
    )


@dataclass(frozen=True, kw_only=True)
class AnalyticCosts:
    """What seconds are computed from."""

    cluster: Cluster
    dtype: str
    message_bytes: int
    """Of each element that goes from layer to layer; collectives that sum what linears have computed carry `dtype`."""
    speeds: Speeds

    def module(self, workload: ModuleWorkload, *, tp_size: int = 1, sequence_parallel: bool = False) -> ModuleCosts:
        """Costs at one tensor-parallel size. Tensor-parallel groups are taken to fill a node before the next."""
        by_shape = {layer: self._layer(layer, tp_size, sequence_parallel) for layer in dict.fromkeys(workload.layers)}
        return ModuleCosts(layers=tuple(by_shape[layer] for layer in workload.layers))

    def kernel(self, shape: KernelShape, *, tp_size: int = 1) -> Quadratic:
        """Seconds of one kernel as a function of the load."""
        if shape.collective is not None:
            terms = collective_terms(self.cluster, shape.collective, range(tp_size))
            return Quadratic(constant=terms.latency_s).plus(shape.num_bytes.times(1 / terms.bytes_per_s))
        device, speed = self.cluster.device, self.speeds.compute(shape.kind)
        work = shape.num_bytes.times(1 / (self.speeds.memory.limit * device.memory_bytes_per_s))
        if speed is not None:
            computed = shape.flops.times(1 / (speed.limit * device.peak(self.dtype)))
            work = Quadratic(*map(max, work, computed))
        return work.plus(Quadratic(constant=(speed or self.speeds.memory).overhead_s))

    def _layer(self, layer: LayerShape, tp_size: int, sequence_parallel: bool) -> LayerCost:
        kernels = layer_kernels(
            layer,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            element_bytes=ELEMENT_BYTES[self.dtype],
            residual_bytes=self.message_bytes,
        )

        def seconds(shapes: Iterable[KernelShape]) -> Quadratic:
            return total(self.kernel(shape, tp_size=tp_size) for shape in shapes)

        return _cost_of(layer, kernels, seconds)


def analytic_table(
    workloads: Mapping[str, ModuleWorkload],
    cluster: Cluster,
    *,
    dtype: str = "float32",
    dtype_bytes: int = 4,
    tp_sizes: Iterable[int] = (1,),
    speeds: Speeds | None = None,
) -> CostTable:
    """The costs of a model that nobody has measured.

    `dtype_bytes`: of each element that goes from layer to layer (under autocast 4). `speeds`: None: the assumed ones.
    """
    costs = AnalyticCosts(
        cluster=cluster, dtype=dtype, message_bytes=dtype_bytes, speeds=speeds or default_speeds(cluster.device)
    )
    sizes = tuple(tp_sizes)

    def modules(sequence_parallel: bool) -> dict[str, dict[int, ModuleCosts]]:
        return {
            name: {
                size: costs.module(workload, tp_size=size, sequence_parallel=sequence_parallel)
                for size in sizes
                if size > 1 or not sequence_parallel
            }
            for name, workload in workloads.items()
        }

    return CostTable(
        modules=modules(False),
        sequence_parallel=modules(True),
        source="analytic",
        hardware=cluster.device.name,
        date=date.today().isoformat(),
        message=None,
        # AdamW reads and writes a parameter, its gradient and its two moments.
        optimizer_s_per_parameter=7 * 4 / cluster.device.memory_bytes_per_s,
    )
