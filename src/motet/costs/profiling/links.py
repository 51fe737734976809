"""Measures messages, all-reduces and the optimizer's step, and what processes that measure together need."""

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from motet.cluster import Device
from motet.costs.analytic import KernelTime, Speeds, fit_speeds
from motet.costs.communication import fit_link
from motet.costs.cost_model import LinkCost
from motet.costs.kernels import Kernel
from motet.devices import barrier, communication_device, device_name, has_own_memory, synchronize

LINK_ELEMENTS = (1, 2**10, 2**14, 2**16, 2**18, 2**20, 2**22)
"""float32 elements of the messages and sums that are measured: 4 bytes to 16 MiB."""
NUM_GRADIENTS = 8
"""Number of gradients that make up a bucket of a measured sum."""
OPTIMIZER_SHAPES = ((64, 64), (256, 256), (512, 1024))
NUM_PARAMETER_TENSORS = 8
NUM_SUMMED = 256
"""Values of a sum that ends an iteration."""


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def start_together(device: torch.device) -> None:
    """Waits for all ranks, so that they begin at the same time."""
    synchronize(device)
    if world_size() > 1:
        barrier()


def mean_over_ranks(value: float) -> float:
    if world_size() == 1:
        return value
    total = torch.tensor([value], dtype=torch.float64, device=communication_device())
    dist.all_reduce(total)
    return total.item() / world_size()


def any_rank(value: bool) -> bool:
    """Whether the value is true on any rank: one decision for all, so that they call the same collectives."""
    return value if world_size() == 1 else mean_over_ranks(float(value)) > 0


def hardware(device: torch.device) -> str:
    if has_own_memory(device):
        return device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s) of a CPU"


@dataclass(frozen=True)
class MeasuredLinks:
    message: LinkCost
    all_reduce: LinkCost
    collectives: dict[str, LinkCost]
    """By name."""


def measure_links(device: torch.device, repetitions: int = 15) -> MeasuredLinks:
    """Messages and collectives between ranks 0 and 1, while the others wait. Collective.

    They are as in training: the all-reduce is a gradient bucket's, flattened, summed and put back; what is gathered is
    copied to where it is used, and what is scattered is flattened before."""
    pair = dist.new_group([0, 1])
    is_member = dist.get_rank() < 2
    names = ("message", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    times: dict[str, list[float]] = {name: [] for name in names}
    sizes = []
    for num_elements in LINK_ELEMENTS:
        tensor = torch.zeros(num_elements, device=device)
        whole = torch.zeros(2 * num_elements, device=device)
        half = torch.zeros(len(whole) // 2, device=device)

        def one_way(tensor: torch.Tensor = tensor) -> None:
            if dist.get_rank() == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            else:
                dist.recv(tensor, 0)
                dist.send(tensor, 0)

        def add(tensor: torch.Tensor = tensor) -> None:
            gradients = tensor.chunk(NUM_GRADIENTS)
            flat = torch.cat(gradients)
            dist.all_reduce(flat, group=pair)
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total)

        def gather(whole: torch.Tensor = whole, half: torch.Tensor = half) -> None:
            gathered = torch.empty_like(whole)
            dist.all_gather_into_tensor(gathered, half, group=pair)
            whole.copy_(gathered)

        def scatter(whole: torch.Tensor = whole, half: torch.Tensor = half) -> None:
            dist.reduce_scatter_tensor(half, torch.cat(whole.chunk(NUM_GRADIENTS)), group=pair)

        def exchange(whole: torch.Tensor = whole) -> None:
            dist.all_to_all_single(torch.empty_like(whole), whole, group=pair)

        runs: tuple[Callable[[], object], ...] = (one_way, add, gather, scatter, exchange)
        for name, run in zip(names, runs, strict=True):
            seconds = _median_s(run if is_member else _nothing, repetitions, device)
            times[name].append(seconds / 2 if name == "message" else seconds)  # There and back are two messages.
        sizes.append(4.0 * num_elements)
    measured = torch.tensor(list(times.values()), dtype=torch.float64, device=communication_device())
    dist.broadcast(measured, 0)
    of_tensor, of_whole = sizes, [2 * size for size in sizes]
    fitted = {
        name: fit_link(of_whole if name in names[2:] else of_tensor, seconds)
        for name, seconds in zip(names, measured.tolist(), strict=True)
    }
    return MeasuredLinks(fitted.pop("message"), fitted.pop("all_reduce"), fitted)


def measure_optimizer(
    device: torch.device, repetitions: int = 7, *, dtype: torch.dtype = torch.float32
) -> tuple[float, float]:
    """(seconds of a step beside its parameters, seconds for each parameter) of AdamW as in training, gradient norm
    included."""
    norm_dtype = torch.float32 if has_own_memory(device) else torch.float64
    sizes, times = [], []
    for shape in OPTIMIZER_SHAPES:
        parameters = [
            torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for _ in range(NUM_PARAMETER_TENSORS)
        ]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, fused=True)

        def step(optimizer: torch.optim.Optimizer = optimizer, parameters: list = parameters) -> None:
            for parameter in parameters:
                assert parameter.grad is not None
                torch.linalg.vector_norm(parameter.grad, dtype=norm_dtype).square().cpu()
            optimizer.step()

        sizes.append(float(sum(parameter.numel() for parameter in parameters)))
        times.append(mean_over_ranks(_median_s(step, repetitions, device)))
    fitted = fit_link(sizes, times)
    return fitted.latency_s, 1 / fitted.bytes_per_s


def measure_end_of_step(device: torch.device, repetitions: int = 15) -> float:
    """Seconds of the two sums over all ranks with which an iteration ends: of the parameters that were reached, and of
    losses and norms. Collective."""
    if world_size() == 1:
        return 0.0
    values = torch.zeros(NUM_SUMMED, dtype=torch.float64, device=communication_device())

    def sums() -> None:
        for _ in range(2):
            dist.all_reduce(values)

    return mean_over_ranks(_median_s(sums, repetitions, device))


def _nothing() -> None:
    return None


def _median_s(function: Callable[[], object], repetitions: int, device: torch.device) -> float:
    times = []
    for i in range(repetitions + 2):
        start_together(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        if i >= 2:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


# Measures single kernels on this machine, to calibrate the speeds of computed costs (`motet.costs.analytic`).
#
# Matrix products, attention, convolutions and norms of sizes from tiny to large; each is run until it has taken a
# while, and the mean counts. Sizes that would take long at the peak are left out. Only forwards: a gradient's products
# are products of the same shapes. Limit: on a CPU a layer's Python takes as long as small kernels do, and is not
# measured here; `motet profile` without `--speeds` measures whole layers.


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
