"""Bytes: parameters, gradients, optimizer state, and what a forward saves for its backward.

A linear saves its input if its weights have a gradient; linears that read the same tensor share it. Attention saves
queries, keys, values and its output (fused kernels keep no scores), a norm its input, an activation function its input,
a gated MLP both branches and their product's factors, the loss over a vocabulary a float32 for each logit. With
recomputation a block saves its input alone. With sequence parallelism what norms save is shared by the tensor-parallel
group, but not the linears' inputs: each rank gathers them.

Under autocast, norms and what is between layers stay in float32; all else is in bfloat16. There each linear makes its
own copy of its input; of each weight there is one copy for all microbatches (`motet.parallel.split_backward`), but of
convolutions and in fully sharded stages one for each.

Limits: temporary memory inside an action and the allocator's fragmentation are not counted; `RESERVE` stands for them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from motet.costs.cells import CellKind, Cells
from motet.costs.contrastive import loss_saved_bytes, loss_share
from motet.costs.layer_gradients import LayerGradients, gradients_of_plan
from motet.costs.load import Load
from motet.plan import LayerRange, ModulePlan
from motet.ragged_arrays import Ints
from motet.schedule.routes import Cell
from motet.shapes.module_shape import LayerShape, Linear

ADAMW_STATES = 2
"""Moments for each parameter, of its own precision."""
RESERVE = 0.1
"""Share of a device's memory that a plan leaves free."""
LOGIT_BYTES = 4
"""The loss over a vocabulary is never computed in less than float32."""
NUM_BUFFERS = 8
"""Schedules that go by memory leave room for so many of the largest message: what a rank waits to send, or has received
and not yet read, is known only when the schedule is. In plans simulated so far it came to six at most."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    parameter_bytes: int = 4
    """Of each parameter, gradient and moment: float32 (bfloat16 training is autocast)."""
    activation_bytes: int = 4
    """Of each element between and within layers."""
    autocast_bytes: int | None = None
    """Of each element that is computed in autocast's dtype; None: no autocast."""
    zero1: bool = False
    """What the optimizer keeps is sharded over the ranks that hold the same layers."""
    state_copies: int = 1
    """With `zero1`: so many of them keep the same; several where nodes may fail
    (`motet.resilience.state_transfer`)."""
    optimizer_bytes: int | None = None
    """Of what the optimizer keeps for each parameter; None: its moments. In half precision also a float32 parameter."""

    @property
    def computed_bytes(self) -> int:
        """Of each element of linears, attention and activation functions."""
        return self.activation_bytes if self.autocast_bytes is None else self.autocast_bytes

    def num_keepers(self, num_holders: int) -> int:
        """Of so many ranks that hold the same, how many keep what the optimizer does of each parameter."""
        return min(self.state_copies, num_holders) if self.zero1 else num_holders

    @property
    def state_bytes(self) -> int:
        """`optimizer_bytes`, or of the moments."""
        return ADAMW_STATES * self.parameter_bytes if self.optimizer_bytes is None else self.optimizer_bytes


DEFAULT_MEMORY = MemoryOptions()


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
) -> int:
    """Parameters, gradients, optimizer state and casts of one layer on one rank.

    `num_holders`: ranks that hold the same shard. `has_backward`: autocast's copy of the weights stays for all
    microbatches, unless the stage is fully sharded. `num_shares`: ranks of a fully sharded stage, each of which keeps
    an equal share of the rest."""
    cast = cast_weight_bytes(layer, tp_size=tp_size, options=options) if has_backward and not fully_sharded else 0
    size = layer.num_parameters_per_rank(tp_size) * options.parameter_bytes
    if not trainable:
        return -(-size // num_shares) + cast
    state = layer.num_parameters_per_rank(tp_size) * options.state_bytes * options.num_keepers(num_holders)
    return -(-(2 * size - (-state // num_holders)) // num_shares) + cast


def cast_weight_bytes(layer: LayerShape, *, tp_size: int, options: MemoryOptions) -> int:
    """The copy of one layer's weights that all microbatches of a step share, if the layer has a backward."""
    return _cast_bytes((linear for linear in layer.linears if linear.kernel_area == 1), layer, tp_size, options)


def _cast_bytes(linears: Iterable[Linear], layer: LayerShape, tp_size: int, options: MemoryOptions) -> int:
    if options.autocast_bytes is None or not layer.runs:
        return 0
    elements = sum(linear.in_features * linear.out_features // (tp_size if linear.cut else 1) for linear in linears)
    return elements * options.autocast_bytes


def gathered_bytes(
    layers: Sequence[tuple[LayerShape, bool]], *, tp_size: int, num_shares: int, options: MemoryOptions
) -> int:
    """What a fully sharded stage has of others' parameters and gradients while it computes: of one block, and of all
    that is in none. `layers`: and whether each is trainable."""
    sizes = [
        (layer.part == "block", layer.num_parameters_per_rank(tp_size) * (1 + trainable)) for layer, trainable in layers
    ]
    block = max((size for is_block, size in sizes if is_block), default=0)
    whole = (block + sum(size for is_block, size in sizes if not is_block)) * options.parameter_bytes
    return whole - whole // num_shares


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
    """What one rank keeps of one layer for one microbatch. `input_gradient`, `weight_gradient`: as the layer needs.

    `load`: that of the rank, which with context parallelism is a share of the microbatch's (`Load.share`)."""
    if not (input_gradient or weight_gradient):
        return 0
    tokens = load.outputs if layer.part == "projector" else load.tokens * layer.resolution
    shared = tp_size if sequence_parallel and layer.part == "block" else 1
    if recompute and layer.part == "block" and layer.runs:
        return round(tokens * layer.hidden_size * options.activation_bytes / shared)
    vectors = layer.saved_vectors + weight_gradient * layer.saved_vectors_for_weights
    kept = tokens * layer.hidden_size * vectors / shared
    computed = 0.0
    if weight_gradient:
        for linear in _inputs(layer, options):
            # What a row-cut linear reads is cut, what a column-cut one reads is whole on every rank.
            width = linear.in_features / linear.kernel_area
            computed += _rows(linear, layer, load) * width / (tp_size if linear.cut == "row" else 1)
    for attention in layer.attentions:
        keys = load.incoming if attention.reads_encoder else tokens
        heads = attention.num_heads * tokens + attention.num_key_value_heads * keys
        computed += 2 * heads * attention.head_dim / tp_size
        if attention.normalizes:
            kept += heads * attention.head_dim / tp_size
            computed += weight_gradient * heads * attention.head_dim / tp_size
    if layer.part == "block" and layer.runs and len(layer.linears) > 1:
        # The activation function's input; gated: also its output and the other branch.
        last = layer.linears[-1]
        computed += tokens * last.in_features / last.kernel_area * (3 if layer.gated else 1) / tp_size
    own_weights = (linear for linear in layer.linears if fully_sharded or linear.kernel_area > 1)
    return (
        round(kept * options.activation_bytes + computed * options.computed_bytes)
        + _logit_bytes(layer, load, tp_size=tp_size, options=options)
        + _cast_bytes(own_weights, layer, tp_size, options)
    )


def _logit_bytes(layer: LayerShape, load: Load, *, tp_size: int, options: MemoryOptions) -> int:
    """The probabilities over a vocabulary, which the loss keeps."""
    if layer.part != "head":
        return 0
    logits = sum(
        _rows(linear, layer, load) * linear.out_features / tp_size
        for linear in layer.linears
        if linear.rows == "outputs" and linear.cut == "column"
    )
    return round(logits * max(LOGIT_BYTES, options.activation_bytes))


def half_saved_layer_bytes(
    layer: LayerShape, load: Load, *, weight_gradient: bool, tp_size: int, options: MemoryOptions
) -> int:
    """What one rank still keeps after the input half of a backward: for its linears' weights, their different inputs
    and the gradient of each output."""
    if not weight_gradient or not layer.runs:
        return 0
    elements = 0.0
    for linear in _inputs(layer, options):
        width = linear.in_features / linear.kernel_area
        elements += _rows(linear, layer, load) * width / (tp_size if linear.cut == "row" else 1)
    for linear in layer.linears:
        elements += _rows(linear, layer, load) * linear.out_features / (tp_size if linear.cut == "column" else 1)
    return round(elements * options.computed_bytes)


def _inputs(layer: LayerShape, options: MemoryOptions) -> Sequence[Linear]:
    """One linear for each tensor that linears save: those of equal width side by side read the same. Under autocast
    each has made its own copy."""
    if options.autocast_bytes is not None:
        return layer.linears
    groups = groupby(layer.linears, key=lambda x: (x.in_features, x.cut, x.rows, x.rows_per_token))
    return [next(members) for _, members in groups]


def _rows(linear: Linear, layer: LayerShape, load: Load) -> float:
    rows = {
        "tokens": load.tokens * layer.resolution,
        "outputs": load.outputs,
        "incoming": load.incoming,
        "sequences": load.sequences,
    }
    return rows[linear.rows] * linear.rows_per_token


# The bytes that ranks hold in one iteration: what forwards save for backwards, and what is there all the time.
#
# Saved: activations, by kind of cell and load (`motet.costs.cells`); of features that are recomputed, a stage's input
# alone. Static: parameters, gradients, optimizer state and casts of weights, and what is gathered or made again for
# the moment. What a single layer takes is `motet.costs.memory`'s; the buffers of messages are
# `motet.costs.iteration`'s.
#
# Limits: the members of a context-parallel group are taken to hold equal shares. Of features that are recomputed, the
# largest graph is counted for the whole iteration, though it is there for one backward at a time.


class RankMemory:
    """Of the ranks of a plan. `saved_bytes` and `static_bytes` are as `motet.simulator.costs.Costs` has them."""

    def __init__(self, cells: Cells, options: MemoryOptions) -> None:
        self.cells, self.routes, self.plan, self.options = cells, cells.routes, cells.plan, options
        self._saved: dict[tuple[int, int], tuple[int, int]] = {}
        self._static: dict[tuple[str, LayerRange, int, int], int] = {}

    def saved_bytes(self, cell: Cell, half: bool) -> int:
        number = self.routes.number_of_cell[cell]
        return self._saved_sizes(int(self.cells.kind[number]), int(self.cells.load[number]))[half]

    def saved_sizes(self) -> Ints:
        """`saved_bytes` of each cell, in row 0 the whole and in row 1 the half."""
        cells = self.cells
        pairs, place = np.unique(np.stack([cells.kind, cells.load]), axis=1, return_inverse=True)
        sizes = [self._saved_sizes(kind, load) for kind, load in pairs.T.tolist()]
        return np.array(sizes, dtype=np.int64).reshape(-1, 2)[place.reshape(-1)].T

    def _saved_sizes(self, kind_number: int, load_number: int) -> tuple[int, int]:
        """The whole and the half."""
        key = (kind_number, load_number)
        if key not in self._saved:
            kind, load = self.cells.kinds[kind_number], self.cells.loads[load_number]
            if kind.is_loss:
                self._saved[key] = self._saved_loss(kind, load), 0
            elif kind.module in self.plan.recompute_features:
                self._saved[key] = self._saved_input(kind, load), self._saved_half(kind, load)
            else:
                self._saved[key] = self._saved_whole(kind, load), self._saved_half(kind, load)
        return self._saved[key]

    def _saved_loss(self, kind: CellKind, load: Load) -> int:
        workload = self.cells.workload(kind.module)
        share = loss_share(self.plan, kind.module, workload)
        return loss_saved_bytes(share, workload, load.tokens, self.options.activation_bytes)

    def _saved_input(self, kind: CellKind, load: Load) -> int:
        rows, width = self.cells.workload(kind.module).boundary(kind.stage.layers[0])
        has_input = bool(kind.stage.layers[0]) and any(needs.any for needs in kind.gradients)
        carried = load.share(kind.num_shares).tokens if rows == "tokens" else load.outputs
        stage_input = carried * width if has_input else 0
        return round(stage_input * self.options.activation_bytes)

    def _saved_whole(self, kind: CellKind, load: Load) -> int:
        module = self.plan.modules[kind.module]
        return self._saved_input(kind, load) + sum(
            count
            * saved_layer_bytes(
                layer,
                self._load_on_rank(kind, layer, load),
                input_gradient=needs.input_gradient,
                weight_gradient=needs.weight_gradient,
                recompute=kind.module in self.plan.recompute,
                tp_size=kind.stage.tp_size,
                options=self.options,
                sequence_parallel=module.sequence_parallel,
                fully_sharded=module.fully_sharded,
            )
            for layer, needs, count in kind.different
        )

    def _saved_half(self, kind: CellKind, load: Load) -> int:
        return sum(
            count
            * half_saved_layer_bytes(
                layer,
                self._load_on_rank(kind, layer, load),
                weight_gradient=needs.weight_gradient,
                tp_size=kind.stage.tp_size,
                options=self.options,
            )
            for layer, needs, count in kind.different
        )

    def _load_on_rank(self, kind: CellKind, layer: LayerShape, load: Load) -> Load:
        """What a rank of the stage computes of the layer."""
        return load.share(kind.num_shares) if self.cells.workload(kind.module).is_shared(layer) else load

    def static_bytes(self, rank: int) -> int:
        num_bytes = 0
        for name, _, _, stage in self.plan.stages_of_rank(rank):
            run = (name, stage.layers, stage.tp_size, stage.cp_size)
            if run not in self._static:
                self._static[run] = self._static_of_run(*run)
            num_bytes += self._static[run]
        return num_bytes + self._recomputed_bytes.get(rank, 0)

    @cached_property
    def _recomputed_bytes(self) -> Mapping[int, int]:
        """For each rank, the largest graph that a backward makes again there: it is all there at once."""
        result: dict[int, int] = {}
        for number in np.unique(np.stack([self.cells.kind, self.cells.load]), axis=1).T.tolist():
            kind, load = self.cells.kinds[number[0]], self.cells.loads[number[1]]
            if kind.module in self.plan.recompute_features:
                graph = self._saved_whole(kind, load)
                stages = [
                    s for s in self.routes.stages if (s.module, s.planned.layers) == (kind.module, kind.stage.layers)
                ]
                for rank in {rank for stage in stages for rank in stage.planned.ranks}:
                    result[rank] = max(result.get(rank, 0), graph)
        return result

    def _static_of_run(self, name: str, layers: LayerRange, tp_size: int, cp_size: int) -> int:
        module, workload = self.plan.modules[name], self.cells.workload(name)
        num_holders, num_shares = holders_and_shares(module, cp_size)
        static = sum(
            static_layer_bytes(
                workload.layers[index],
                trainable=module.is_trainable((index, index + 1)),
                has_backward=self._gradients[self.cells.owner(name)][index].any,
                tp_size=tp_size,
                num_holders=num_holders,
                options=self.options,
                num_shares=num_shares,
                fully_sharded=module.fully_sharded,
            )
            for index in range(*layers)
        )
        of_stage = [(workload.layers[index], module.is_trainable((index, index + 1))) for index in range(*layers)]
        return static + gathered_bytes(of_stage, tp_size=tp_size, num_shares=num_shares, options=self.options)

    @cached_property
    def _gradients(self) -> Mapping[str, tuple[LayerGradients, ...]]:
        """When every modality is there."""
        return gradients_of_plan(self.plan)


def holders_and_shares(module: ModulePlan, cp_size: int) -> tuple[int, int]:
    """Ranks that hold the same of a module's stage, and those that keep a share each of what it holds."""
    num_replicas = len(module.replicas)
    return (num_replicas, cp_size) if module.fully_sharded else (num_replicas * cp_size, 1)
