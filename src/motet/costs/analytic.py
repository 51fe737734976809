"""FLOPs of layers, and times from them: FLOPs / (peak x efficiency).

Counted are matrix products: a linear is 2 x rows x in x out, attention 4 x heads x head_dim x pairs (scores, and
weighted values), a convolution over patches or mel frames is the linear that it is. Their input gradient and their
weight gradient cost as much as the forward each; attention has no weights, its backward is two of its forwards. Causal
and sliding-window masks do not reduce the count: kernels that compute masked scores are what runs everywhere.
"""

from collections.abc import Iterable, Mapping
from datetime import date

from motet.cluster import Cluster, Link
from motet.costs.cost_model import CostTable, LayerCost, ModuleCosts, Quadratic
from motet.workload import LayerShape, Linear, ModuleWorkload


def layer_flops(layer: LayerShape) -> LayerCost:
    """Like a layer's cost, but in FLOPs instead of seconds."""
    forward, input_gradient, weight_gradient, inner = ([0.0] * len(Quadratic._fields) for _ in range(4))
    for linear in layer.linears:
        term, flops = _linear_term(linear)
        for part in (forward, input_gradient, weight_gradient):
            part[term] += flops
        if not linear.reads_layer_input:
            inner[term] += flops
    if layer.attention is not None:
        attention = layer.attention
        per_pair = 4.0 * attention.num_heads * attention.head_dim
        if attention.reads_encoder:
            term, flops = Quadratic._fields.index("per_incoming_pair"), per_pair
        elif attention.window is not None:
            term, flops = Quadratic._fields.index("per_token"), per_pair * attention.window
        else:
            term, flops = Quadratic._fields.index("per_pair"), per_pair
        forward[term] += flops
        for part in (input_gradient, inner):
            part[term] += 2 * flops
    return LayerCost(
        forward=Quadratic(*forward),
        forward_without_graph=Quadratic(*forward),
        input_gradient=Quadratic(*([0.0] * len(forward) if layer.part == "embed" else input_gradient)),
        weight_gradient=Quadratic(*weight_gradient),
        weight_gradient_alone=Quadratic(*inner).plus(Quadratic(*weight_gradient)),
    )


_TERM_OF_ROWS = {"tokens": "per_token", "outputs": "per_output", "incoming": "per_incoming"}


def _linear_term(linear: Linear) -> tuple[int, float]:
    """Which coefficient it counts in, and with how much."""
    term = Quadratic._fields.index(_TERM_OF_ROWS[linear.rows])
    return term, 2.0 * linear.in_features * linear.out_features * linear.rows_per_token


def analytic_module_costs(
    workload: ModuleWorkload, *, flops_per_s: float, dtype_bytes: int, tp_size: int, link: Link
) -> ModuleCosts:
    """Costs at one tensor-parallel size.

    A block's linears and attention are divided among the group, and two all-reduces of its tokens close each forward
    and each backward (Shoeybi et al. 2019, section 3), one those of the vocabulary's layers; embeddings of patches,
    merger and projector are computed by all.
    """
    return ModuleCosts(
        layers=tuple(_layer_seconds(layer, flops_per_s, dtype_bytes, tp_size, link) for layer in workload.layers)
    )


def _layer_seconds(layer: LayerShape, flops_per_s: float, dtype_bytes: int, tp_size: int, link: Link) -> LayerCost:
    flops = layer_flops(layer)
    is_cut = tp_size > 1 and (bool(layer.vocabulary) or any(linear.cut for linear in layer.linears))
    scale = 1 / flops_per_s / (tp_size if is_cut else 1)
    num_all_reduces = (2 if layer.part == "block" else 1) if is_cut else 0
    num_steps = 2 * (tp_size - 1)
    all_reduce = Quadratic(
        constant=num_all_reduces * num_steps * link.latency_s,
        per_token=num_all_reduces * num_steps / tp_size * layer.hidden_size * dtype_bytes / link.bytes_per_s,
    )
    return LayerCost(
        forward=flops.forward.times(scale).plus(all_reduce),
        forward_without_graph=flops.forward.times(scale).plus(all_reduce),
        input_gradient=flops.input_gradient.times(scale).plus(all_reduce),
        weight_gradient=flops.weight_gradient.times(scale),
        weight_gradient_alone=flops.weight_gradient_alone.times(scale).plus(all_reduce),
    )


def analytic_table(
    workloads: Mapping[str, ModuleWorkload],
    cluster: Cluster,
    *,
    dtype: str = "float32",
    dtype_bytes: int = 4,
    tp_sizes: Iterable[int] = (1,),
) -> CostTable:
    """The costs of a model that nobody has measured. Tensor-parallel groups are taken to lie within a node."""
    flops_per_s = cluster.device.flops_per_s(dtype)
    sizes = tuple(tp_sizes)
    return CostTable(
        modules={
            name: {
                size: analytic_module_costs(
                    workload,
                    flops_per_s=flops_per_s,
                    dtype_bytes=dtype_bytes,
                    tp_size=size,
                    link=cluster.link(0, size - 1),
                )
                for size in sizes
            }
            for name, workload in workloads.items()
        },
        source="analytic",
        hardware=cluster.device.name,
        date=date.today().isoformat(),
        message=None,
        # AdamW reads and writes a parameter, its gradient and its two moments.
        optimizer_s_per_parameter=7 * 4 / cluster.device.memory_bytes_per_s,
    )
