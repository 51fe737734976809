"""Bytes of one layer on one rank: parameters, gradients, optimizer state, and activations saved for the backward.

A linear saves its input if its weights or its adapter have a gradient; linears that read the same tensor share it.
Attention saves queries, keys, values and its output (fused kernels keep no scores), a norm its input, an activation
function its input, a gated MLP both branches and the factors of their product, the loss over a vocabulary its
logits. A recomputed block keeps its input only, and so does a recomputed attention. An offloaded block keeps nothing
on its device. With sequence parallelism the tensor-parallel group shares
what norms save, but not the inputs of linears, which each rank gathers.

In bfloat16, parameters and activations have 2 bytes, gradients 4, and the optimizer's state includes a float32 master
(`motet.runtime.training.master_weights`). Root-mean-square norms compute in float32, but neither that nor the outputs
of activation functions are kept (`motet.parallel.saved_tensors`).

Limits: temporary memory of an action and fragmentation of the allocator are not counted; `RESERVE` stands for them. Nor
are masks, the keys and values that transformers' plain attention repeats for grouped heads under a mask (6% of the
activations of a narrow Llama), and queries and keys that stay beside the values of one product after they are rotated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from motet.cluster import Cluster
from motet.costs.cost_model import Load
from motet.shapes.module_shape import LayerShape, Linear, ModuleWorkload

ADAMW_STATES = 2
"""Moments for each parameter, of its own precision."""
RESERVE = 0.1
"""Share of a device's memory that a plan leaves free."""
NUM_BUFFERS = 8
"""Number of largest messages for which schedules under a memory limit leave room. The messages that a rank holds are
known only when the schedule is. In plans simulated so far there were six at most."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    parameter_bytes: int = 4
    """Size of a parameter, and of a moment unless `optimizer_bytes` says otherwise."""
    gradient_bytes: int | None = None
    """Size of a parameter's gradient; None: that of the parameter."""
    activation_bytes: int = 4
    """Size of an element between and within layers."""
    saves_less: bool = False
    """`motet.parallel.saved_tensors.save_less`: neither products in float32 nor results of activation functions are
    saved."""
    fused: bool = False
    """Root-mean-square norms and gated MLPs are kernels of their own (`train.kernels`), which save their inputs
    alone."""
    zero1: bool = False
    """The optimizer state is sharded over the ranks that hold the same layers."""
    state_copies: int = 1
    """Number of ranks that keep the same shard, with `zero1`; several if nodes may fail
    (`motet.resilience.state_transfer`)."""
    optimizer_bytes: int | None = None
    """Optimizer state per parameter; None: its moments. In half precision it includes a float32 parameter."""

    @property
    def summed_bytes(self) -> int:
        """Size of an element of a gradient, as replicas sum it."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes

    def num_keepers(self, num_holders: int) -> int:
        """Number of ranks, of `num_holders` with the same layers, that keep the optimizer state of a parameter."""
        return min(self.state_copies, num_holders) if self.zero1 else num_holders

    def of(self, workload: ModuleWorkload) -> "MemoryOptions":
        """With the moving average as a further optimizer state, as wide as a gradient, where the module has one."""
        if not workload.is_averaged:
            return self
        return replace(self, optimizer_bytes=self.state_bytes + self.summed_bytes)

    @property
    def state_bytes(self) -> int:
        """Optimizer state per parameter."""
        return ADAMW_STATES * self.parameter_bytes if self.optimizer_bytes is None else self.optimizer_bytes


DEFAULT_MEMORY = MemoryOptions()


def usable_bytes(cluster: Cluster) -> float:
    """Memory of one device that a plan may use."""
    return cluster.device.memory_bytes * (1 - RESERVE)


class StaticBytes(NamedTuple):
    """Bytes of layers that one rank holds for the whole iteration, by kind."""

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    """Optimizer state, masters included."""

    def plus(self, other: "StaticBytes") -> "StaticBytes":
        return StaticBytes(*(a + b for a, b in zip(self, other, strict=True)))


def static_layer_bytes(
    layer: LayerShape,
    *,
    trainable: bool,
    tp_size: int,
    num_holders: int,
    options: MemoryOptions,
    num_shares: int = 1,
    ep: int = 1,
) -> StaticBytes:
    """Parameters, gradients and optimizer state of one layer on one rank.

    `num_holders`: ranks that hold the same shard. `num_shares`: ranks of a fully sharded stage, each of which keeps
    an equal share of the rest. `ep`: ranks that share the experts."""
    number = layer.num_parameters_per_rank(tp_size, ep)
    size = number * options.parameter_bytes
    if not trainable:
        return StaticBytes(weights=-(-size // num_shares))
    num_trained = layer.num_trained_per_rank(tp_size, ep)
    num_experts = layer.num_expert_weights // ep if ep > 1 and not layer.num_adapter_parameters() else 0
    state = _state_bytes(num_trained - num_experts, num_holders, options)
    state += _state_bytes(num_experts, max(1, num_holders * tp_size // ep), options)
    gradients = num_trained * options.summed_bytes
    weights, of_gradients = size // num_shares, gradients // num_shares
    # Rounded up as one.
    moments = -(-(size + gradients + state) // num_shares) - weights - of_gradients
    return StaticBytes(weights, of_gradients, moments)


def _state_bytes(num_parameters: int, num_holders: int, options: MemoryOptions) -> int:
    """Optimizer state on one of the ranks that hold these parameters."""
    return -(-num_parameters * options.state_bytes * options.num_keepers(num_holders) // num_holders)


def gathered_bytes(
    layers: Sequence[tuple[LayerShape, bool]],
    *,
    tp_size: int,
    num_shares: int,
    options: MemoryOptions,
    by_rows: bool = False,
    by_block: bool = True,
    whole_parameters: bool = False,
) -> int:
    """Other ranks' parameters and gradients on a rank of a fully sharded stage while it computes: those of the largest
    block and of all layers outside of blocks. `layers`: with whether each is trainable. `by_rows`: replicas share the
    parameters; the rank's own rows are there twice then. Without `by_block` all layers are gathered for the step, and
    with `whole_parameters` the parameters of all layers, but not their gradients."""
    if num_shares == 1:
        return 0
    sizes = [
        (
            layer.part == "block",
            layer.num_parameters_per_rank(tp_size) * options.parameter_bytes,
            trainable * layer.num_trained_per_rank(tp_size) * options.summed_bytes,
        )
        for layer, trainable in layers
    ]
    blocks = [(weights, gradients) for is_block, weights, gradients in sizes if is_block]
    whole = sum(weights + gradients for is_block, weights, gradients in sizes if not is_block)
    if not by_block:
        whole += sum(weights + gradients for weights, gradients in blocks)
    elif whole_parameters:
        whole += sum(weights for weights, _ in blocks) + max((gradients for _, gradients in blocks), default=0)
    else:
        whole += max((weights + gradients for weights, gradients in blocks), default=0)
        # The next block's rows arrive while one computes.
        whole += max((weights for weights, _ in blocks), default=0) if by_rows and len(blocks) > 1 else 0
    return whole if by_rows else whole - whole // num_shares


def saved_layer_bytes(
    layer: LayerShape,
    load: Load,
    *,
    input_gradient: bool,
    weight_gradient: bool,
    tp_size: int,
    options: MemoryOptions,
    sequence_parallel: bool = False,
) -> int:
    """Activations that one layer keeps on one rank for the backward of one microbatch.

    `load`: that of the rank, which with context parallelism is a share of the microbatch's (`Load.share`). Of several
    microbatches at once: arrays in its fields, for which the bytes are an array too."""
    if not (input_gradient or weight_gradient):
        return 0
    tokens = load.outputs if layer.part == "projector" else load.tokens * layer.resolution
    shared = tp_size if sequence_parallel and layer.part == "block" else 1
    if layer.treatment == "offloaded":
        return 0
    if layer.treatment == "recomputed":
        return rounded(tokens * layer.hidden_size * options.activation_bytes / shared)
    keeps_attention = layer.treatment != "attention"
    trains_own = weight_gradient and not layer.num_adapter_parameters()
    keeps_inputs_alone = options.saves_less or options.fused
    vectors_for_weights = layer.saved_vectors_for_weights - keeps_inputs_alone * layer.float32_vectors
    vectors = layer.saved_vectors + trains_own * max(0, vectors_for_weights)
    elements = tokens * layer.hidden_size * vectors / shared
    if weight_gradient:
        num_attention_linears = sum(attention.num_linears for attention in layer.attentions)
        kept = layer if keeps_attention else replace(layer, linears=layer.linears[num_attention_linears:])
        for linear in _inputs(kept):
            # The input of a row-cut linear is cut; that of a column-cut linear is whole on every rank.
            width = linear.in_features / linear.kernel_area
            elements += _rows(linear, layer, load) * width / (tp_size if linear.cut == "row" else 1)
        elements += sum(_rows(linear, layer, load) * linear.adapter_rank for linear in kept.linears)
    if not keeps_attention:  # Each attention keeps its input.
        elements += len(layer.attentions) * tokens * layer.hidden_size / shared
    for attention in layer.attentions if keeps_attention else ():
        keys = load.incoming if attention.reads_encoder else tokens
        heads = attention.num_heads * tokens + attention.num_key_value_heads * keys
        elements += 2 * heads * attention.mean_dim / tp_size
        if attention.normalizes:
            elements += (1 + (trains_own and not keeps_inputs_alone)) * heads * attention.head_dim / tp_size
    if layer.part == "block" and layer.runs and len(layer.linears) > 1:
        # The activation function's input; gated: also its output and the other branch.
        last = layer.linears[-1]
        width = last.rows_per_token * last.in_features / last.kernel_area
        num_tensors = 3 if layer.gated else 1
        is_last_input = options.saves_less and weight_gradient and last in layer.trained_linears
        if (keeps_inputs_alone and layer.gated) or is_last_input:
            num_tensors -= 1  # The function's output, or what is counted above as the last linear's input.
        elements += tokens * width * num_tensors / tp_size
    logits = logit_bytes(layer, load, tp_size=tp_size, options=options)
    return rounded(elements * options.activation_bytes) + logits


def logit_bytes(layer: LayerShape, load: Load, *, tp_size: int, options: MemoryOptions) -> int:
    """The logits, which the loss saves as the head has made them."""
    if layer.part != "head":
        return 0
    logits = sum(
        _rows(linear, layer, load) * linear.out_features / tp_size
        for linear in layer.linears
        if linear.rows == "outputs" and linear.cut == "column"
    )
    return rounded(logits * options.activation_bytes)


def boundary_bytes(
    workload: ModuleWorkload,
    border: int,
    load: Load,
    element_bytes: int,
    *,
    num_shares: int = 1,
    num_row_shares: int = 1,
) -> float:
    """The tensor before layer `border` of a microbatch; of tokens, one of `num_shares` equal shares.

    The output of an encoder's head is whole on every rank. `num_row_shares`: number of shares, of whole rows, in which
    the members of a tensor-parallel group get it; a padded sequence is cut by its columns. Between stages of a
    generator an image's conditions and the vectors of its time step travel too; behind the connector its conditions do,
    and the pooled one."""
    rows, width = workload.boundary(border)
    if workload.num_time_vectors and border == 1:
        sizes = workload.config["condition_size"], workload.config["pooled_size"]
        return (load.incoming + bool(sizes[1]) * load.sequences) * max(sizes) * element_bytes
    carried = load.tokens / num_shares if rows == "tokens" else load.outputs
    if workload.num_time_vectors:
        carried += load.incoming + workload.num_time_vectors * load.sequences
    if num_row_shares > 1:
        num_sequences = load.sequences if rows == "tokens" and workload.arrangement == "padded" else 1
        carried = num_sequences * ceil(carried / max(1, num_sequences) / num_row_shares)
    return carried * width * element_bytes


def half_saved_layer_bytes(
    layer: LayerShape, load: Load, *, weight_gradient: bool, tp_size: int, options: MemoryOptions
) -> int:
    """Tensors that one rank keeps after the input half of a backward for the weights of linears: their distinct inputs
    and the gradient of each output. `load`: as for `saved_layer_bytes`."""
    if not weight_gradient or not layer.runs:
        return 0
    elements = 0.0
    for linear in _inputs(layer):
        width = linear.in_features / linear.kernel_area
        elements += _rows(linear, layer, load) * width / (tp_size if linear.cut == "row" else 1)
    for linear in layer.trained_linears:
        elements += _rows(linear, layer, load) * linear.out_features / (tp_size if linear.cut == "column" else 1)
        # An adapter's second matrix has an input of its own, and the first an output gradient.
        elements += 2 * _rows(linear, layer, load) * linear.adapter_rank
    return rounded(elements * options.activation_bytes)


def rounded(number_of_bytes: Any) -> Any:
    """The nearest integer, or an array of them."""
    return (
        np.rint(number_of_bytes).astype(np.int64) if isinstance(number_of_bytes, np.ndarray) else round(number_of_bytes)
    )


def _inputs(layer: LayerShape) -> Sequence[Linear]:
    """One linear for each tensor that linears save. Adjacent linears of equal width share their input, except a
    projector's, which follow one another. Of linears with adapters it is the adapters that save it."""
    if layer.part == "projector":
        return layer.trained_linears
    groups = groupby(layer.trained_linears, key=lambda x: (x.in_features, x.cut, x.rows, x.rows_per_token))
    return [next(members) for _, members in groups]


def _rows(linear: Linear, layer: LayerShape, load: Load) -> float:
    match linear.rows:
        case "tokens":
            rows = load.tokens * layer.resolution
        case "outputs":
            rows = load.outputs
        case "incoming":
            rows = load.incoming
        case "joint":
            rows = load.tokens * layer.resolution + load.incoming
        case "sequences":
            rows = load.sequences
    return rows * linear.rows_per_token
