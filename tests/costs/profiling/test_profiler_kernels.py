"""What is measured is what the kernels' FLOPs and bytes say, and speeds come of it."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from motet.cluster import DEVICES
from motet.costs.analytic import kernel_seconds
from motet.costs.profiling import links as profiler_kernels
from motet.costs.profiling.links import kernel_cases, measure_speeds

CPU = torch.device("cpu")


@pytest.fixture
def small_sizes(monkeypatch):
    for name, values in {
        "WIDTHS": (32, 128),
        "ROWS": (1, 64),
        "ATTENTION_LENGTHS": (16, 64),
        "CHANNELS": 8,
        "IMAGE_SIDES": (8, 16),
        "NORM_ROWS": (8, 64),
    }.items():
        monkeypatch.setattr(profiler_kernels, name, values)


@pytest.mark.usefixtures("small_sizes")
def test_flops_are_those_that_torch_counts():
    cases = list(kernel_cases(CPU, torch.float32))
    assert {case.kernel.kind for case in cases} == {"gemm", "attention", "convolution", "norm"}
    for case in cases:
        run = case.prepare()
        # The fused kernel of CPUs is not among those that torch counts.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run()
        assert case.kernel.flops == counter.get_total_flops(), case.kernel.name


@pytest.mark.usefixtures("small_sizes")
def test_speeds_are_fitted_to_what_was_measured():
    device = DEVICES["cpu"]
    speeds, measured = measure_speeds(CPU, device, "float32", min_seconds=2e-3)
    assert len(measured) == len(list(kernel_cases(CPU, torch.float32)))
    assert speeds.source.startswith("measured on")
    peaks = {"peak_flops": device.peak("float32"), "bytes_per_s": device.memory_bytes_per_s}
    for kernel, seconds in measured:
        assert seconds > 0
        assert kernel_seconds(kernel, speeds, **peaks) > 0


@pytest.mark.usefixtures("small_sizes")
def test_large_kernels_are_left_out():
    _, measured = measure_speeds(CPU, DEVICES["cpu"], "float32", limit_s=1e-6, min_seconds=1e-3)
    assert measured
    assert all(kernel.flops <= 1e-6 * 4e10 for kernel, _ in measured)
