"""The roofline, efficiency by size, and calibration from measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.cluster import DEVICES
from motet.costs.analytic import KernelTime, Speed, Speeds, default_speeds, fit_speeds, kernel_seconds
from motet.costs.kernels import Kernel
from motet.errors import UserError

H100 = DEVICES["h100"]
PEAK, BANDWIDTH = H100.peak("bfloat16"), H100.memory_bytes_per_s
TRUE = Speeds(
    gemm=Speed(limit=0.7, overhead_s=5e-6),
    convolution=Speed(limit=0.5, overhead_s=6e-6),
    attention=Speed(limit=0.4, overhead_s=8e-6),
    memory=Speed(limit=0.9, overhead_s=3e-6),
)


def gemm(rows, width_in, width_out):
    return Kernel(
        "gemm", "gemm", 2.0 * rows * width_in * width_out, 2.0 * (rows * (width_in + width_out) + width_in * width_out)
    )


@given(st.floats(0.01, 1), st.floats(0, 1e-3), st.floats(1, 1e15))
def test_efficiency_rises_with_size_up_to_its_limit(limit, overhead_s, work):
    speed = Speed(limit=limit, overhead_s=overhead_s)
    assert speed.efficiency(work, PEAK) <= speed.efficiency(2 * work, PEAK) * (1 + 1e-9)
    assert speed.efficiency(work, PEAK) <= limit * (1 + 1e-9)
    half = overhead_s * limit * PEAK
    if half > 1:
        assert speed.efficiency(half, PEAK) == pytest.approx(limit / 2)


@given(st.integers(1, 10_000), st.integers(64, 10_000), st.integers(64, 10_000))
def test_a_kernel_takes_the_longer_of_computing_and_moving(rows, width_in, width_out):
    kernel = gemm(rows, width_in, width_out)
    seconds = kernel_seconds(kernel, TRUE, peak_flops=PEAK, bytes_per_s=BANDWIDTH)
    computing = 5e-6 + kernel.flops / 0.7 / PEAK
    moving = 3e-6 + kernel.num_bytes / 0.9 / BANDWIDTH
    assert seconds == pytest.approx(max(computing, moving))


def test_one_token_is_bound_by_memory_and_many_are_not():
    few, many = (kernel_seconds(gemm(n, 8192, 8192), TRUE, peak_flops=PEAK, bytes_per_s=BANDWIDTH) for n in (1, 8192))
    assert few == pytest.approx(3e-6 + 2 * 8192**2 / 0.9 / BANDWIDTH, rel=1e-2)
    assert many == pytest.approx(5e-6 + 2 * 8192**3 / 0.7 / PEAK)


def test_collectives_have_no_speed_of_their_own():
    with pytest.raises(ValueError, match=r"ask motet\.costs\.communication"):
        kernel_seconds(Kernel("sum", "communication", 0, 1), TRUE, peak_flops=PEAK, bytes_per_s=BANDWIDTH)


def test_calibration_finds_the_speeds_that_made_the_measurements(tmp_path):
    kernels = [gemm(rows, width, width) for rows in (1, 16, 512, 4096) for width in (1024, 4096, 8192)]
    kernels += [Kernel("a", "attention", flops, flops / 300) for flops in (1e8, 1e10, 1e12)]
    kernels += [Kernel("c", "convolution", flops, flops / 500) for flops in (1e8, 1e10, 1e12)]
    kernels += [Kernel("n", "norm", 0, num_bytes) for num_bytes in (1e4, 1e6, 1e9)]
    measured = [
        KernelTime(kernel, kernel_seconds(kernel, TRUE, peak_flops=PEAK, bytes_per_s=BANDWIDTH)) for kernel in kernels
    ]
    fitted = fit_speeds(measured, H100, "bfloat16")
    for kind in ("gemm", "convolution", "attention", "memory"):
        assert getattr(fitted, kind).limit == pytest.approx(getattr(TRUE, kind).limit, rel=1e-3)
        assert getattr(fitted, kind).overhead_s == pytest.approx(getattr(TRUE, kind).overhead_s, rel=1e-2)
    (tmp_path / "speeds.json").write_text(fitted.to_json())
    assert Speeds.load(tmp_path / "speeds.json") == fitted


def test_kinds_that_nobody_measured_keep_the_assumed_speed():
    fitted = fit_speeds([KernelTime(gemm(n, 8192, 8192), n * 1e-6) for n in (4096, 8192)], H100, "bfloat16")
    assert fitted.attention == default_speeds(H100).attention
    assert fitted.gemm != default_speeds(H100).gemm


def test_mistakes_in_a_file_of_speeds(tmp_path):
    with pytest.raises(UserError, match=r"cluster\.speeds: .*absent\.json cannot be read"):
        Speeds.load(tmp_path / "absent.json")
    (tmp_path / "wrong.json").write_text('{"gemm": {"limit": 0.5}}')
    with pytest.raises(UserError, match=r"wrong\.json: gemm\.overhead_s: is missing"):
        Speeds.load(tmp_path / "wrong.json")
