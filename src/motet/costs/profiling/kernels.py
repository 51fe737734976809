"""Measures single kernels on this machine, to calibrate the speeds of computed costs (`motet.costs.kernel_speeds`).

Matrix products, attention, convolutions and norms of sizes from tiny to large; each is run until it has taken a while,
and the mean counts. Sizes that would take long at the peak are left out. Only forwards: a gradient's products are
products of the same shapes. Limit: on a CPU a layer's Python takes as long as small kernels do, and is not measured
here; `motet profile` without `--speeds` measures whole layers.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from motet.cluster.cluster import Device
from motet.costs.kernel_speeds import KernelTime, Speeds, fit_speeds
from motet.costs.kernels import Kernel
from motet.costs.profiling.links import hardware, synchronize

WIDTHS = (256, 1024, 4096, 8192)
ROWS = (1, 64, 512, 4096)
ATTENTION_LENGTHS = (64, 256, 1024, 4096)
HEADS, HEAD_DIM = 8, 64
CHANNELS, IMAGE_SIDES = 128, (8, 32, 128)
NORM_ROWS, NORM_WIDTH = (64, 1024, 16384), 1024


@dataclass(frozen=True)
class KernelCase:
    kernel: Kernel
    prepare: Callable[[], Callable[[], object]]
    """Makes the operands; what it returns runs the kernel."""


def kernel_cases(device: torch.device, dtype: torch.dtype) -> Iterator[KernelCase]:
    size = dtype.itemsize

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    for width in WIDTHS:
        for rows in ROWS:
            flops, moved = 2.0 * rows * width**2, size * (2.0 * rows * width + width**2)

            def product(rows: int = rows, width: int = width) -> Callable[[], object]:
                inputs, weights = random(rows, width), random(width, width)
                return lambda: functional.linear(inputs, weights)

            yield KernelCase(Kernel(f"{rows}x{width}x{width}", "gemm", flops, moved), product)
    for length in ATTENTION_LENGTHS:
        flops = 4.0 * HEADS * HEAD_DIM * length**2

        def attention(length: int = length) -> Callable[[], object]:
            query, key, value = (random(1, HEADS, length, HEAD_DIM) for _ in range(3))
            return lambda: functional.scaled_dot_product_attention(query, key, value)

        moved = 4.0 * size * HEADS * HEAD_DIM * length
        yield KernelCase(Kernel(f"attention of {length}", "attention", flops, moved), attention)
    for side in IMAGE_SIDES:
        flops = 2.0 * 9 * CHANNELS**2 * side**2

        def convolution(side: int = side) -> Callable[[], object]:
            image, weights = random(1, CHANNELS, side, side), random(CHANNELS, CHANNELS, 3, 3)
            return lambda: functional.conv2d(image, weights, padding=1)

        moved = size * (2.0 * CHANNELS * side**2 + 9 * CHANNELS**2)
        yield KernelCase(Kernel(f"convolution of {side}x{side}", "convolution", flops, moved), convolution)
    for rows in NORM_ROWS:

        def norm(rows: int = rows) -> Callable[[], object]:
            values = random(rows, NORM_WIDTH)
            return lambda: functional.layer_norm(values, (NORM_WIDTH,))

        yield KernelCase(Kernel(f"norm of {rows}", "norm", 0.0, 2.0 * size * rows * NORM_WIDTH), norm)


def measure_speeds(
    device: torch.device, described: Device, dtype: str, *, limit_s: float = 0.05, min_seconds: float = 0.1
) -> tuple[Speeds, list[KernelTime]]:
    """The calibrated speeds, and what was measured.

    `described`: the device of the catalogue, to whose peaks they refer. `limit_s`: kernels that would take longer at
    the assumed efficiency are left out. `min_seconds`: of each one."""
    bound = limit_s * described.flops_per_s(dtype)
    measured = []
    with torch.no_grad():
        for case in kernel_cases(device, getattr(torch, dtype)):
            if case.kernel.flops <= bound and case.kernel.num_bytes <= limit_s * described.memory_bytes_per_s:
                measured.append(KernelTime(case.kernel, _seconds(case.prepare(), device, min_seconds)))
    return fit_speeds(measured, described, dtype, source=f"measured on {hardware(device)}"), measured


def _seconds(run: Callable[[], object], device: torch.device, min_seconds: float) -> float:
    """The mean of as many repetitions as take `min_seconds`, after a warm-up."""
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    run()
    repetitions = 1
    while True:
        synchronize(device)
        start = clock()
        for _ in range(repetitions):
            run()
        synchronize(device)
        seconds = clock() - start
        if seconds >= min_seconds:
            return seconds / repetitions
        repetitions *= 2
