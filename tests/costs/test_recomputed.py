"""Seconds of recomputed attention and of offloaded blocks, against shares and copies counted by hand."""

from dataclasses import replace

import pytest
from small_problem import small_problem
from tiny_configs import EVERY_MODEL

from motet.cluster import Cluster
from motet.costs.cost_model import LayerCost, Load, Quadratic
from motet.costs.memory import DEFAULT_MEMORY, saved_layer_bytes
from motet.costs.recomputed import layer_passes, recomputed_share
from motet.families.shape_reading.module_shapes import module_workload
from motet.shapes.module_shape import LayerShape

FORWARD = Quadratic(1e-4, per_token=3e-6, per_pair=2e-9)
COST = LayerCost(
    forward=FORWARD,
    forward_without_graph=FORWARD,
    input_gradient=FORWARD,
    weight_gradient=FORWARD,
    weight_gradient_alone=FORWARD,
)
LOAD = Load(tokens=100.0, pairs=5000.0)


def block(treatment: str | None) -> LayerShape:
    """Of a Llama of width 64 with 4 heads, 2 of keys and values, and 96 neurons."""
    return module_workload(EVERY_MODEL["llama"][0]).treated(treatment).layers[1]


def cluster_with(host_bytes_per_s: float) -> Cluster:
    cluster = small_problem().cluster
    return replace(cluster, device=replace(cluster.device, host_bytes_per_s=host_bytes_per_s))


def passes(layer: LayerShape, host_bytes_per_s: float = 1e9, *, weight_gradient: bool = True):
    cluster = cluster_with(host_bytes_per_s)
    return layer_passes(COST, layer, True, weight_gradient, tp_size=1, cluster=cluster, memory=DEFAULT_MEMORY)


def test_a_recomputed_attention_repeats_its_products_but_not_its_output():
    share = recomputed_share(block("attention"))
    queries_keys_values, output, mlp = 64 * (64 + 32 + 32), 64 * 64, 3 * 64 * 96
    assert share.per_token == pytest.approx(queries_keys_values / (queries_keys_values + output + mlp), rel=0.02)
    assert share.per_pair == 1.0
    repeated = passes(block("attention")).recomputation
    assert repeated.seconds(LOAD) == pytest.approx(
        share.constant * 1e-4 + share.per_token * 3e-6 * 100 + 2e-9 * 5000, rel=1e-12
    )


@pytest.mark.parametrize("weight_gradient", [True, False])
def test_an_offloaded_block_takes_what_its_copies_take_beyond_its_work(weight_gradient):
    layer = block("offload")
    kept = saved_layer_bytes(
        block(None), LOAD, input_gradient=True, weight_gradient=weight_gradient, tp_size=1, options=DEFAULT_MEMORY
    )
    fast = passes(layer, 1e15, weight_gradient=weight_gradient)
    assert fast.forward == FORWARD
    assert fast.recomputation.seconds(LOAD) == 0
    # 1 byte/s: work hides nothing that would show.
    slow = passes(layer, 1.0, weight_gradient=weight_gradient)
    assert slow.forward.seconds(LOAD) == pytest.approx(kept, rel=1e-5)
    assert slow.recomputation.seconds(LOAD) == pytest.approx(kept, rel=1e-5)
    # Twice as long as the work of the forward on tokens: half of the copies shows in it, none in its backward.
    rate = kept / (2 * 3e-6 * 100)
    middle = passes(layer, rate, weight_gradient=weight_gradient)
    assert middle.forward.seconds(LOAD) - FORWARD.seconds(LOAD) == pytest.approx(3e-6 * 100, rel=1e-5)
    beyond = 0.0 if weight_gradient else 3e-6 * 100
    assert middle.recomputation.seconds(LOAD) == pytest.approx(beyond, rel=1e-5, abs=1e-12)
