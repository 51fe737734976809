"""Computed costs: seconds of kernels and layers from the peaks of a device, without any measurement.

A kernel takes `overhead_s` + work / (limit x peak), where work is FLOPs against the device's peak or bytes against the
bandwidth of its memory, whichever takes longer (the roofline of Williams et al. 2009). Its efficiency rises with its
size: it is half of `limit` at the work that takes as long as the overhead. Because times are linear in the work, the
costs of layers stay quadratic in the lengths of sequences. `default_speeds` are assumptions; `fit_speeds` calibrates
them to measurements of `motet.costs.profiling.links`.

A roofline itself is not linear in the sums of a load. The table therefore uses, for each sum, the larger of the times
to compute and to move: a matrix product takes the time to read its weights, and for each row the longer of computing
and moving it. That is never less than the roofline (`kernel_seconds`) and at most twice as much, where both take
equally long and kernels do not come near either peak. Assumed speeds *add* the time to move what a computing kernel
reads and writes (`Speed.exposed`), so products of narrow matrices are less efficient than those of wide ones.

What a training stack adds to the kernels (passes over memory, its attention kernel) is `motet.costs.software`'s.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np

from motet.cluster import Cluster, Device
from motet.costs.communication import collective_terms
from motet.costs.cost_model import CostTable, LayerCost, ModuleCosts, Quadratic, total
from motet.costs.kernels import (
    AttentionCharge,
    Kernel,
    KernelKind,
    KernelShape,
    LayerKernels,
    layer_kernels,
    total_flops,
)
from motet.costs.memory import ADAMW_STATES
from motet.costs.software import MOTET, Software
from motet.errors import UserError
from motet.named_files import read_text
from motet.shapes.module_shape import LayerShape, ModuleWorkload


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of one kind of kernel."""

    limit: float
    """Share of the peak that the largest kernels reach."""
    overhead_s: float
    """Fixed time of every kernel: start, ramp, tail."""
    exposed: float = 0.0
    """Share of the time to move its operands that a computing kernel takes beside the time to compute; 0: the longer of
    both counts."""

    def seconds(self, work: float, peak: float) -> float:
        return self.overhead_s + work / (self.limit * peak)

    def efficiency(self, work: float, peak: float) -> float:
        """Share of the peak."""
        return work / peak / self.seconds(work, peak)


@dataclass(frozen=True, kw_only=True)
class Speeds:
    gemm: Speed
    convolution: Speed
    attention: Speed
    memory: Speed
    """Speed of memory-bound kernels (norms, elementwise functions), as a share of the memory's bandwidth."""
    source: str = "assumed"

    def compute(self, kind: KernelKind) -> Speed | None:
        """Speed relative to the peak FLOPs; None for kinds that only move bytes."""
        return {"gemm": self.gemm, "convolution": self.convolution, "attention": self.attention}.get(kind)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def load(path: str | Path) -> "Speeds":
        """Reads a file of `motet profile --speeds`. Raises `UserError` if it is unreadable or invalid."""
        from motet.strict_parsing import parse_strictly

        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise UserError(
                f"cluster.speeds: {path} cannot be read ({reason}); `motet profile --speeds` writes one"
            ) from None
        return parse_strictly(Speeds, text, what=str(path))


ATTENTION_SHARE = 0.7
"""Assumed: attention's limit over that of matrix products, for a kernel that the device says nothing of."""


def default_speeds(device: Device, dtype: str | None = None, software: Software = MOTET) -> Speeds:
    """The device's speeds by the catalogue, until they are measured (`fit_speeds`). `dtype`: None: the usual one."""

    def speed(limit: float, exposed: float = 0.0) -> Speed:
        return Speed(limit=limit, overhead_s=device.kernel_overhead_s, exposed=exposed)

    gemm = device.efficiency if dtype is None else device.gemm_efficiency(dtype)
    attention = device.attention_efficiency.get(software.attention, device.efficiency * ATTENTION_SHARE)
    if dtype == "float8":  # Only matrix products with weights are in float8.
        attention *= device.peak("bfloat16") / device.peak(dtype)
    return Speeds(
        gemm=speed(gemm, 1.0),
        convolution=speed(device.convolution_efficiency or gemm, 1.0),
        attention=speed(attention, 1.0),
        memory=speed(device.memory_efficiency),
    )


def kernel_seconds(kernel: Kernel, speeds: Speeds, *, peak_flops: float, bytes_per_s: float) -> float:
    """Seconds by the roofline. Raises `ValueError` for a collective (see `motet.costs.communication`)."""
    if kernel.kind == "communication":
        raise ValueError(f"{kernel.name} is a collective; ask motet.costs.communication")
    speed = speeds.compute(kernel.kind)
    moved = speeds.memory.seconds(kernel.num_bytes, bytes_per_s)
    if speed is None:
        return moved
    exposed = speed.exposed * kernel.num_bytes / (speeds.memory.limit * bytes_per_s)
    return max(moved, speed.seconds(kernel.flops, peak_flops) + exposed)


class KernelTime(NamedTuple):
    kernel: Kernel
    seconds: float


def fit_speeds(
    measured: Iterable[KernelTime], device: Device, dtype: str, *, source: str = "measured", rounds: int = 5
) -> Speeds:
    """Fits each kind by least squares of the relative error, with non-negative overhead and slope.

    The speeds of the previous round, initially the assumed ones, decide which kernels are memory-bound. Kinds with
    fewer than two measurements keep their assumed speed."""
    measured = tuple(measured)
    speeds = default_speeds(device)
    peak, bandwidth = device.peak(dtype), device.memory_bytes_per_s
    for _ in range(rounds):
        groups: dict[str, list[tuple[float, float]]] = {"gemm": [], "convolution": [], "attention": [], "memory": []}
        for kernel, seconds in measured:
            speed = speeds.compute(kernel.kind)
            moved = speeds.memory.seconds(kernel.num_bytes, bandwidth)
            if speed is None or moved > speed.seconds(kernel.flops, peak):
                groups["memory"].append((kernel.num_bytes / bandwidth, seconds))
            else:
                groups[kernel.kind].append((kernel.flops / peak, seconds))
        fitted = {kind: _fit(points) for kind, points in groups.items() if len({ideal for ideal, _ in points}) > 1}
        speeds = Speeds(**{kind: fitted.get(kind, getattr(speeds, kind)) for kind in groups}, source=source)
    return speeds


def _fit(points: list[tuple[float, float]]) -> Speed:
    """`points`: (seconds at the peak, seconds)."""
    from scipy.optimize import nnls

    ideal, seconds = np.array(points).T
    (overhead_s, slope), _ = nnls(np.stack([1 / seconds, ideal / seconds], axis=1), np.ones(len(points)))
    return Speed(limit=1 / max(float(slope), 1e-9), overhead_s=float(overhead_s))


ELEMENT_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 2}
"""Size of an element of a kernel's operands, by the dtype of the computation."""


def layer_flops(layer: LayerShape) -> LayerCost:
    """A layer's cost in FLOPs instead of seconds."""
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
    """Computes seconds of kernels and layers."""

    cluster: Cluster
    dtype: str
    message_bytes: int
    """Size of an element between layers; collectives that sum the outputs of linears carry `dtype`."""
    speeds: Speeds
    software: Software = MOTET

    def module(self, workload: ModuleWorkload, *, tp_size: int = 1, sequence_parallel: bool = False) -> ModuleCosts:
        """Costs at one tensor-parallel size, for tensor-parallel groups that fill one node after another."""
        charge = self.software.charge(is_causal=workload.kind == "language_model")
        by_shape = {
            layer: self._layer(layer, charge, tp_size, sequence_parallel) for layer in dict.fromkeys(workload.layers)
        }
        return ModuleCosts(layers=tuple(by_shape[layer] for layer in workload.layers))

    def kernel(self, shape: KernelShape, *, tp_size: int = 1) -> Quadratic:
        """Seconds of one kernel as a function of the load."""
        if shape.collective is not None:
            terms = collective_terms(self.cluster, shape.collective, range(tp_size))
            seconds = Quadratic(constant=terms.latency_s).plus(shape.num_bytes.times(1 / terms.bytes_per_s))
            return seconds.times(self.software.exposed_collectives)
        device, speed = self.cluster.device, self.speeds.compute(shape.kind)
        work = shape.num_bytes.times(1 / (self.speeds.memory.limit * device.memory_bytes_per_s))
        if shape.kind in ("norm", "elementwise"):
            work = work.times(self.software.memory_traffic)
        if speed is not None:
            computed = shape.flops.times(1 / (speed.limit * device.peak(self.dtype)))
            work = Quadratic(*map(max, work, computed.plus(work.times(speed.exposed))))
        return work.plus(Quadratic(constant=(speed or self.speeds.memory).overhead_s))

    def attention(self, layer: LayerShape, *, tp_size: int = 1, is_causal: bool = True) -> Quadratic:
        """Seconds of the attention of a layer's forward."""
        kernels = layer_kernels(
            layer,
            tp_size=tp_size,
            element_bytes=ELEMENT_BYTES[self.dtype],
            charge=self.software.charge(is_causal=is_causal),
        )
        return total(self.kernel(shape, tp_size=tp_size) for shape in kernels.forward if shape.kind == "attention")

    def _layer(self, layer: LayerShape, charge: AttentionCharge, tp_size: int, sequence_parallel: bool) -> LayerCost:
        kernels = layer_kernels(
            layer,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            element_bytes=ELEMENT_BYTES[self.dtype],
            residual_bytes=self.message_bytes,
            charge=charge,
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
    software: Software = MOTET,
) -> CostTable:
    """The computed costs of a model.

    `dtype_bytes`: size of an element between layers. `speeds`: None: those of the catalogue."""
    costs = AnalyticCosts(
        cluster=cluster,
        dtype=dtype,
        message_bytes=dtype_bytes,
        speeds=speeds or default_speeds(cluster.device, dtype, software),
        software=software,
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
            if workload.shares_sequences or not sequence_parallel
        }

    return CostTable(
        modules=modules(False),
        sequence_parallel=modules(True),
        source="analytic",
        hardware=cluster.device.name,
        date=date.today().isoformat(),
        message=None,
        # AdamW reads the gradient, and reads and writes the parameter and its moments.
        optimizer_s_per_parameter=(3 + 2 * ADAMW_STATES) * 4 / cluster.device.memory_bytes_per_s,
    )
