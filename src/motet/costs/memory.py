"""Bytes of one layer on one rank: parameters, gradients, optimizer state, and activations saved for the backward.

A linear saves its input if its weights or its adapter have a gradient; linears that read the same tensor share it.
Attention saves queries, keys, values and its output (fused kernels keep no scores), a norm its input, an activation
function its input, a gated MLP both branches and the factors of their product, the loss over a vocabulary its
logits. With recomputation a block saves its input only. With sequence parallelism the tensor-parallel group shares
what norms save, but not the inputs of linears, which each rank gathers.

Under autocast, norms and tensors between layers stay in float32; everything else is in bfloat16. Each linear makes its
own copy of its input. All microbatches share one copy of each weight (`motet.parallel.split_backward`), except weights
of convolutions and of fully sharded stages, which each microbatch copies.

Limits: temporary memory of an action and fragmentation of the allocator are not counted; `RESERVE` stands for them. Nor
are masks, and the keys and values that transformers' plain attention repeats for grouped heads under a mask (6% of the
activations of a narrow Llama).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil
from typing import NamedTuple

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
    """Size of a parameter, gradient and moment: float32 (bfloat16 training is autocast)."""
    activation_bytes: int = 4
    """Size of an element between and within layers."""
    autocast_bytes: int | None = None
    """Size of an element in autocast's dtype; None: no autocast."""
    zero1: bool = False
    """The optimizer state is sharded over the ranks that hold the same layers."""
    state_copies: int = 1
    """Number of ranks that keep the same shard, with `zero1`; several if nodes may fail
    (`motet.resilience.state_transfer`)."""
    optimizer_bytes: int | None = None
    """Optimizer state per parameter; None: its moments. In half precision it includes a float32 parameter."""

    @property
    def message_bytes(self) -> int:
        """Size of an element between stages: autocast's dtype, where there is one."""
        return self.computed_bytes

    @property
    def computed_bytes(self) -> int:
        """Size of an element in linears, attention and activation functions."""
        return self.activation_bytes if self.autocast_bytes is None else self.autocast_bytes

    def num_keepers(self, num_holders: int) -> int:
        """Number of ranks, of `num_holders` with the same layers, that keep the optimizer state of a parameter."""
        return min(self.state_copies, num_holders) if self.zero1 else num_holders

    def of(self, workload: ModuleWorkload) -> "MemoryOptions":
        """With the moving average as a further optimizer state, where the module has one."""
        if not workload.is_averaged:
            return self
        return replace(self, optimizer_bytes=self.state_bytes + self.parameter_bytes)

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
    """Optimizer state."""
    casts: int = 0
    """Autocast's copies of weights."""

    def plus(self, other: "StaticBytes") -> "StaticBytes":
        return StaticBytes(*(a + b for a, b in zip(self, other, strict=True)))


def static_layer_bytes(
    layer: LayerShape,
    *,
    trainable: bool,
    tp_size: int,
    num_holders: int,
    options: MemoryOptions,
    has_backward: bool = False,
    num_shares: int = 1,
    fully_sharded: bool = False,
    ep: int = 1,
) -> StaticBytes:
    """Parameters, gradients, optimizer state and casts of one layer on one rank.

    `num_holders`: ranks that hold the same shard. `has_backward`: autocast's copy of the weights stays for all
    microbatches, unless the stage is fully sharded. `num_shares`: ranks of a fully sharded stage, each of which keeps
    an equal share of the rest. `ep`: ranks that share the experts."""
    cast = cast_weight_bytes(layer, tp_size=tp_size, options=options) if has_backward and not fully_sharded else 0
    number = layer.num_parameters_per_rank(tp_size, ep)
    size = number * options.parameter_bytes
    if not trainable:
        return StaticBytes(weights=-(-size // num_shares), casts=cast)
    num_trained = layer.num_trained_per_rank(tp_size, ep)
    num_experts = layer.num_expert_weights // ep if ep > 1 and not layer.num_adapter_parameters() else 0
    state = _state_bytes(num_trained - num_experts, num_holders, options)
    state += _state_bytes(num_experts, max(1, num_holders * tp_size // ep), options)
    gradients = num_trained * options.parameter_bytes
    weights, of_gradients = size // num_shares, gradients // num_shares
    # Rounded up as one.
    moments = -(-(size + gradients + state) // num_shares) - weights - of_gradients
    return StaticBytes(weights, of_gradients, moments, cast)


def _state_bytes(num_parameters: int, num_holders: int, options: MemoryOptions) -> int:
    """Optimizer state on one of the ranks that hold these parameters."""
    return -(-num_parameters * options.state_bytes * options.num_keepers(num_holders) // num_holders)


def cast_weight_bytes(layer: LayerShape, *, tp_size: int, options: MemoryOptions) -> int:
    """Autocast's copy of one layer's weights, which all microbatches of a step share if the layer has a backward."""
    return _cast_bytes((linear for linear in layer.linears if linear.kernel_area == 1), layer, tp_size, options)


def _cast_bytes(linears: Iterable[Linear], layer: LayerShape, tp_size: int, options: MemoryOptions) -> int:
    if options.autocast_bytes is None or not layer.runs:
        return 0
    elements = sum(linear.num_weights // (tp_size if linear.cut else 1) for linear in linears)
    return elements * options.autocast_bytes


def gathered_bytes(
    layers: Sequence[tuple[LayerShape, bool]],
    *,
    tp_size: int,
    num_shares: int,
    options: MemoryOptions,
    by_rows: bool = False,
    by_block: bool = True,
) -> int:
    """Other ranks' parameters and gradients on a rank of a fully sharded stage while it computes: those of the largest
    block and of all layers outside of blocks. `layers`: with whether each is trainable. `by_rows`: replicas share the
    parameters; the rank's own rows are there twice then. Without `by_block` all layers are gathered for the step."""
    if num_shares == 1:
        return 0
    sizes = [
        (
            layer.part == "block",
            layer.num_parameters_per_rank(tp_size) + trainable * layer.num_trained_per_rank(tp_size),
        )
        for layer, trainable in layers
    ]
    blocks = [size for is_block, size in sizes if is_block]
    rest = sum(size for is_block, size in sizes if not is_block)
    whole = (rest + (max(blocks, default=0) if by_block else sum(blocks))) * options.parameter_bytes
    return whole if by_rows else whole - whole // num_shares


def saved_layer_bytes(
    layer: LayerShape,
    load: Load,
    *,
    input_gradient: bool,
    weight_gradient: bool,
    recompute: bool,
    tp_size: int,
    options: MemoryOptions,
    sequence_parallel: bool = False,
    fully_sharded: bool = False,
) -> int:
    """Activations that one layer saves on one rank for the backward of one microbatch.

    `load`: that of the rank, which with context parallelism is a share of the microbatch's (`Load.share`)."""
    if not (input_gradient or weight_gradient):
        return 0
    tokens = load.outputs if layer.part == "projector" else load.tokens * layer.resolution
    shared = tp_size if sequence_parallel and layer.part == "block" else 1
    if recompute and layer.part == "block" and layer.runs:
        return round(tokens * layer.hidden_size * options.activation_bytes / shared)
    trains_own = weight_gradient and not layer.num_adapter_parameters()
    vectors = layer.saved_vectors + trains_own * layer.saved_vectors_for_weights
    kept = tokens * layer.hidden_size * vectors / shared
    computed = 0.0
    if weight_gradient:
        for linear in _inputs(layer, options):
            # The input of a row-cut linear is cut; that of a column-cut linear is whole on every rank.
            width = linear.in_features / linear.kernel_area
            computed += _rows(linear, layer, load) * width / (tp_size if linear.cut == "row" else 1)
        computed += sum(_rows(linear, layer, load) * linear.adapter_rank for linear in layer.linears)
    for attention in layer.attentions:
        keys = load.incoming if attention.reads_encoder else tokens
        heads = attention.num_heads * tokens + attention.num_key_value_heads * keys
        computed += 2 * heads * attention.mean_dim / tp_size
        if attention.normalizes:
            kept += heads * attention.head_dim / tp_size
            computed += trains_own * heads * attention.head_dim / tp_size
    if layer.part == "block" and layer.runs and len(layer.linears) > 1:
        # The activation function's input; gated: also its output and the other branch.
        last = layer.linears[-1]
        width = last.rows_per_token * last.in_features / last.kernel_area
        computed += tokens * width * (3 if layer.gated else 1) / tp_size
    own_weights = (linear for linear in layer.linears if fully_sharded or linear.kernel_area > 1)
    return (
        round(kept * options.activation_bytes + computed * options.computed_bytes)
        + logit_bytes(layer, load, tp_size=tp_size, options=options)
        + _cast_bytes(own_weights, layer, tp_size, options)
    )


def logit_bytes(layer: LayerShape, load: Load, *, tp_size: int, options: MemoryOptions) -> int:
    """The logits, which the loss saves as the head has made them."""
    if layer.part != "head":
        return 0
    logits = sum(
        _rows(linear, layer, load) * linear.out_features / tp_size
        for linear in layer.linears
        if linear.rows == "outputs" and linear.cut == "column"
    )
    return round(logits * options.computed_bytes)


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
    and the gradient of each output."""
    if not weight_gradient or not layer.runs:
        return 0
    elements = 0.0
    for linear in _inputs(layer, options):
        width = linear.in_features / linear.kernel_area
        elements += _rows(linear, layer, load) * width / (tp_size if linear.cut == "row" else 1)
    for linear in layer.trained_linears:
        elements += _rows(linear, layer, load) * linear.out_features / (tp_size if linear.cut == "column" else 1)
        # An adapter's second matrix has an input of its own, and the first an output gradient.
        elements += 2 * _rows(linear, layer, load) * linear.adapter_rank
    return round(elements * options.computed_bytes)


def _inputs(layer: LayerShape, options: MemoryOptions) -> Sequence[Linear]:
    """One linear for each tensor that linears save. Adjacent linears of equal width share their input, except under
    autocast, where each makes its own copy. Of linears with adapters it is the adapters that save it."""
    if options.autocast_bytes is not None:
        return layer.trained_linears
    groups = groupby(layer.trained_linears, key=lambda x: (x.in_features, x.cut, x.rows, x.rows_per_token))
    return [next(members) for _, members in groups]


def _rows(linear: Linear, layer: LayerShape, load: Load) -> float:
    rows = {
        "tokens": load.tokens * layer.resolution,
        "outputs": load.outputs,
        "incoming": load.incoming,
        "sequences": load.sequences,
    }
    return rows[linear.rows] * linear.rows_per_token
