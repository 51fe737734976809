"""Costs of layers that nobody has measured: their kernels' FLOPs and bytes over what the device reaches of its peaks.

Which kernels are bound by memory is decided once, at a reference load (a typical microbatch); around it times are
linear in the load's sums, as the costs of a table must be. Without a reference matrix products, convolutions and
attention are taken to be bound by their FLOPs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date

from motet.cluster import Cluster
from motet.costs.collectives import collective_terms
from motet.costs.cost_model import CostTable, LayerCost, ModuleCosts, Quadratic, total
from motet.costs.kernels import KernelShape, layer_kernels, total_flops
from motet.costs.load import Load
from motet.costs.speeds import Speed, Speeds, default_speeds
from motet.workload import LayerShape, ModuleWorkload

ELEMENT_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Of the operands of kernels, by the dtype of the computation."""


def layer_flops(layer: LayerShape) -> LayerCost:
    """Like a layer's cost, but in FLOPs instead of seconds."""
    kernels = layer_kernels(layer)
    forward = total_flops(kernels.forward)
    return LayerCost(
        forward=forward,
        forward_without_graph=forward,
        input_gradient=Quadratic() if layer.part == "embed" else total_flops(kernels.input_gradient),
        weight_gradient=total_flops(kernels.weight_gradient),
        weight_gradient_alone=total_flops(kernels.weight_gradient_alone),
    )


@dataclass(frozen=True, kw_only=True)
class AnalyticCosts:
    """What seconds are computed from."""

    cluster: Cluster
    dtype: str
    message_bytes: int
    """Of each element that collectives carry."""
    speeds: Speeds

    def module(
        self,
        workload: ModuleWorkload,
        *,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        reference: Load | None = None,
    ) -> ModuleCosts:
        """Costs at one tensor-parallel size. Tensor-parallel groups are taken to fill a node before the next."""
        by_shape = {
            layer: self._layer(layer, tp_size, sequence_parallel, reference) for layer in dict.fromkeys(workload.layers)
        }
        return ModuleCosts(layers=tuple(by_shape[layer] for layer in workload.layers))

    def _layer(self, layer: LayerShape, tp_size: int, sequence_parallel: bool, reference: Load | None) -> LayerCost:
        kernels = layer_kernels(
            layer,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            element_bytes=ELEMENT_BYTES[self.dtype],
        )

        def seconds(shapes: Iterable[KernelShape]) -> Quadratic:
            return total(self.kernel(shape, tp_size, reference) for shape in shapes)

        forward = seconds(kernels.forward)
        return LayerCost(
            forward=forward,
            forward_without_graph=forward,
            input_gradient=Quadratic() if layer.part == "embed" else seconds(kernels.input_gradient),
            weight_gradient=seconds(kernels.weight_gradient),
            weight_gradient_alone=seconds(kernels.weight_gradient_alone),
        )

    def kernel(self, shape: KernelShape, tp_size: int, reference: Load | None) -> Quadratic:
        """Seconds of one kernel as a function of the load."""
        if shape.collective is not None:
            scale = self.message_bytes / ELEMENT_BYTES[self.dtype]
            terms = collective_terms(self.cluster, shape.collective, tuple(range(tp_size)))
            return Quadratic(constant=terms.latency_s).plus(shape.num_bytes.times(scale / terms.bytes_per_s))
        moved = self._terms(shape.num_bytes, self.cluster.device.memory_bytes_per_s, self.speeds.memory)
        speed = self.speeds.compute(shape.kind)
        if speed is None:
            return moved
        computed = self._terms(shape.flops, self.cluster.device.peak(self.dtype), speed)
        if reference is not None and moved.seconds(reference) > computed.seconds(reference):
            return moved
        return computed

    def _terms(self, work: Quadratic, peak: float, speed: Speed) -> Quadratic:
        return Quadratic(constant=speed.overhead_s).plus(work.times(1 / (speed.limit * peak)))


def analytic_table(
    workloads: Mapping[str, ModuleWorkload],
    cluster: Cluster,
    *,
    dtype: str = "float32",
    dtype_bytes: int = 4,
    tp_sizes: Iterable[int] = (1,),
    references: Mapping[str, Load] | None = None,
    speeds: Speeds | None = None,
) -> CostTable:
    """The costs of a model that nobody has measured.

    `dtype_bytes`: of what travels. `references`: by module, a typical microbatch. `speeds`: None: the assumed ones.
    """
    costs = AnalyticCosts(
        cluster=cluster, dtype=dtype, message_bytes=dtype_bytes, speeds=speeds or default_speeds(cluster.device)
    )
    sizes = tuple(tp_sizes)

    def modules(sequence_parallel: bool) -> dict[str, dict[int, ModuleCosts]]:
        return {
            name: {
                size: costs.module(
                    workload,
                    tp_size=size,
                    sequence_parallel=sequence_parallel,
                    reference=(references or {}).get(name),
                )
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
