"""How fast kernels run: the roofline, and how much of it kernels of a given size reach. It can be calibrated.

A kernel takes `overhead_s` + work / (limit x peak), where work is FLOPs against the device's peak, or bytes against its
memory's bandwidth, whichever takes longer (Williams et al. 2009). So its efficiency rises with its size: half of
`limit` at the work that takes as long as the overhead. Times are linear in the work, so layers' costs stay quadratic in
the lengths of sequences.

`default_speeds` are assumptions, not measurements: `Device.efficiency` for matrix products. `fit_speeds` calibrates
them; `motet.costs.profiling.links` measures what it needs.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from motet.cluster import Device
from motet.costs.kernels import Kernel, KernelKind
from motet.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of one kind of kernel."""

    limit: float
    """Share of the peak that the largest kernels reach."""
    overhead_s: float
    """Of every kernel, however small: start, ramp, tail."""

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
    """Of bytes against the memory's bandwidth: norms, elementwise functions, whatever else is bound by it."""
    source: str = "assumed"

    def compute(self, kind: KernelKind) -> Speed | None:
        """Of FLOPs against the peak; None: kernels of this kind only move bytes."""
        return {"gemm": self.gemm, "convolution": self.convolution, "attention": self.attention}.get(kind)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def load(path: str | Path) -> "Speeds":
        """Raises `UserError`."""
        from motet.strict_parsing import parse_strictly

        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise UserError(
                f"cluster.speeds: {path} cannot be read ({reason}); `motet profile --speeds` writes one"
            ) from None
        return parse_strictly(Speeds, text, what=str(path))


ATTENTION_SHARE = 0.7
"""Assumed: attention's limit over that of matrix products."""
MEMORY_LIMIT = 0.8
"""Assumed: share of the memory's bandwidth."""
GPU_OVERHEAD_S, CPU_OVERHEAD_S = 3e-6, 20e-6
"""Assumed: of one kernel on a GPU, of PyTorch's operators for it on a CPU."""


def default_speeds(device: Device) -> Speeds:
    """Those that are assumed until they are measured (`fit_speeds`)."""
    overhead_s = CPU_OVERHEAD_S if device.name == "cpu" else GPU_OVERHEAD_S

    def speed(limit: float) -> Speed:
        return Speed(limit=limit, overhead_s=overhead_s)

    return Speeds(
        gemm=speed(device.efficiency),
        convolution=speed(device.efficiency),
        attention=speed(device.efficiency * ATTENTION_SHARE),
        memory=speed(MEMORY_LIMIT),
    )


def kernel_seconds(kernel: Kernel, speeds: Speeds, *, peak_flops: float, bytes_per_s: float) -> float:
    """The roofline. Raises `ValueError` for a collective, which links decide (`motet.costs.communication`)."""
    if kernel.kind == "communication":
        raise ValueError(f"{kernel.name} is a collective; ask motet.costs.communication")
    speed = speeds.compute(kernel.kind)
    moved = speeds.memory.seconds(kernel.num_bytes, bytes_per_s)
    return moved if speed is None else max(moved, speed.seconds(kernel.flops, peak_flops))


class KernelTime(NamedTuple):
    kernel: Kernel
    seconds: float


def fit_speeds(
    measured: Iterable[KernelTime], device: Device, dtype: str, *, source: str = "measured", rounds: int = 5
) -> Speeds:
    """Least squares of the relative error for each kind, with neither overhead nor slope below zero.

    Which kernels are bound by memory is decided by the speeds of the round before, beginning with the assumed ones.
    Kinds with fewer than two measurements keep their assumed speed."""
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
