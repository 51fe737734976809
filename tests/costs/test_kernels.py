"""Kernels of layers: by hand, against what torch computes and moves, and under tensor and sequence parallelism."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_configs import EVERY_MODEL
from torch.utils._python_dispatch import TorchDispatchMode

from motet.costs.cost_model import Load
from motet.costs.kernels import layer_kernels, total_flops
from motet.families.shape_reading.module_shapes import module_workload
from motet.shapes.module_shape import LayerShape, Linear, projector_layer

LOADS = st.builds(
    Load,
    tokens=st.integers(1, 500),
    pairs=st.integers(1, 10_000),
    sequences=st.integers(1, 5),
    incoming=st.integers(0, 100),
    incoming_pairs=st.integers(0, 10_000),
    outputs=st.integers(0, 100),
    tokens_squared=st.just(0.0),
)


@st.deferred
def LAYERS():
    """Of all models; read where a test needs them, not where tests are collected."""
    layers = [layer for config, _ in EVERY_MODEL.values() for layer in dict.fromkeys(module_workload(config).layers)]
    return st.sampled_from([*layers, projector_layer("mlp", 24, 40)])


class Products(TorchDispatchMode):
    """Counts the matrix products and the bytes of their operands and results."""

    def __init__(self):
        super().__init__()
        self.num_bytes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            operands = args[-2:]
            self.num_bytes.append(sum(x.numel() * x.element_size() for x in (*operands, output)))
        return output


@pytest.mark.parametrize("projector", ["linear", "mlp"])
def test_products_and_their_bytes_are_those_that_torch_computes(projector):
    from motet.models.stages.projector import build_projector

    built, given = build_projector(projector, 24, 40), torch.randn(64, 24, requires_grad=True)
    kernels = layer_kernels(projector_layer(projector, 24, 40), element_bytes=4)
    load = Load(outputs=64)
    with Products() as forward:
        output = built(given)
    with Products() as backward:
        output.sum().backward()
    products = [kernel.at(load).num_bytes for kernel in kernels.forward if kernel.kind == "gemm"]
    assert products == forward.num_bytes
    gradients = [
        kernel.at(load).num_bytes
        for kernel in (*kernels.input_gradient, *kernels.weight_gradient)
        if kernel.kind == "gemm"
    ]
    assert sorted(gradients) == sorted(backward.num_bytes)


def test_a_blocks_kernels_run_in_order():
    block = module_workload(EVERY_MODEL["llama"][0]).layers[1]
    names = [kernel.kind for kernel in layer_kernels(block, tp_size=2).forward]
    attention = ["norm", "gemm", "gemm", "gemm", "attention", "gemm", "communication", "elementwise"]
    assert names == [*attention, "norm", "gemm", "gemm", "elementwise", "gemm", "communication", "elementwise"]
    backward = [kernel.kind for kernel in layer_kernels(block, tp_size=2).input_gradient]
    assert backward == names[::-1]


@given(layer=LAYERS, load=LOADS, tp_size=st.sampled_from([2, 4, 8]))
def test_a_group_computes_what_one_rank_would(layer, load, tp_size):
    one, cut = layer_kernels(layer), layer_kernels(layer, tp_size=tp_size)
    is_cut = any(linear.cut for linear in layer.linears)
    for whole, shard in ((one.forward, cut.forward), (one.input_gradient, cut.input_gradient)):
        expected = total_flops(whole).seconds(load) / (tp_size if is_cut else 1)
        assert total_flops(shard).seconds(load) == pytest.approx(expected)
    assert total_flops(one.weight_gradient) == total_flops(
        kernel for kernel in one.forward if kernel.kind in ("gemm", "convolution")
    )


@given(layer=LAYERS, load=LOADS, tp_size=st.sampled_from([2, 4]))
def test_sequence_parallelism_moves_as_much_and_shares_norms(layer, load, tp_size):
    def volume(kernels):
        """Bytes that a ring carries: an all-reduce counts twice."""
        return sum(
            kernel.at(load).num_bytes * (2 if kernel.collective == "all_reduce" else 1)
            for kernel in kernels
            if kernel.collective
        )

    def norms(kernels):
        return sum(kernel.at(load).num_bytes for kernel in kernels if kernel.name in ("norm", "residual"))

    plain = layer_kernels(layer, tp_size=tp_size)
    shared = layer_kernels(layer, tp_size=tp_size, sequence_parallel=True)
    assert volume(shared.forward) == volume(plain.forward)
    share = tp_size if layer.part == "block" else 1
    assert norms(shared.forward) == pytest.approx(norms(plain.forward) / share)
    assert total_flops(shared.forward) == total_flops(plain.forward)


def test_a_convolution_reads_each_pixel_once():
    layer = LayerShape("block", 8, (Linear(9 * 4, 8, kernel_area=9),), resolution=0.25)
    (kernel,) = layer_kernels(layer, element_bytes=2).forward
    assert kernel.kind == "convolution"
    at = kernel.at(Load(tokens=400))
    assert at.flops == 2 * 100 * 36 * 8
    assert at.num_bytes == 2 * (100 * (4 + 8) + 36 * 8)


def test_layers_that_do_not_run_have_no_kernels():
    kernels = layer_kernels(LayerShape("block", 8, (Linear(8, 8),), runs=False))
    assert not any((kernels.forward, kernels.input_gradient, kernels.weight_gradient))
