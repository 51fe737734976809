"""The kernels of a layer: their FLOPs and bytes as functions of a microbatch's load.

A layer's forward, input gradient and weight gradient are each a list of `KernelShape`s: matrix products, attention,
norms, elementwise functions and the collectives of tensor parallelism. Schedules that fill bubbles with kernels
(Optimus, section 4.2) read the lists; computed costs of layers (`motet.costs.analytic`) are sums over them.

FLOPs are counted as torch's `FlopCounterMode` counts them: a linear is 2 x rows x in x out, attention 4 x heads x
head_dim x pairs, a convolution the linear over its kernel's pixels; input gradient and weight gradient cost as much as
the forward each; attention has no weights, its backward is two of its forwards. Causal and sliding-window masks do not
reduce the count; `AttentionCharge` says what kernels take that leave hidden pairs out. Bytes: each operand is read once
and each result is written once (fused attention writes no scores).

Limits: rotary positions, dropout, casts and layout changes are left out; a norm is one kernel, and so is a residual.
A layer with adapters computes weight gradients of these alone, and a backward ends at the first of them.
Norms, residuals and losses are charged elements of the linears' width, though inside they are float32.
Gathers of sequence parallelism at the ends of a stage belong to no layer and are not counted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from motet.costs.communication import Collective
from motet.costs.cost_model import Load, Quadratic, total
from motet.shapes.module_shape import Attention, LayerShape, Linear, Rows

KernelKind = Literal["gemm", "convolution", "attention", "norm", "elementwise", "communication"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of one microbatch."""

    name: str
    kind: KernelKind
    flops: float
    num_bytes: float
    """Read and written; of a collective: one rank's whole tensor."""
    collective: Collective | None = None


@dataclass(frozen=True, slots=True)
class KernelShape:
    """A kernel as a function of the load, on each rank of a tensor-parallel group."""

    name: str
    kind: KernelKind
    flops: Quadratic
    num_bytes: Quadratic
    collective: Collective | None = None
    leaves_layer: bool = False
    """It computes the gradient of the layer's own input, which is not needed if everything before is frozen."""
    in_attention: bool = False
    """Whether a recomputed attention runs it again: all of its forward except the output's linear layer, whose result
    is not saved."""

    def at(self, load: Load) -> Kernel:
        return Kernel(self.name, self.kind, self.flops.seconds(load), self.num_bytes.seconds(load), self.collective)


@dataclass(frozen=True, slots=True)
class AttentionCharge:
    """What attention is charged for. The default is what is counted as FLOPs by convention: all pairs, and a backward
    of two forwards."""

    share_of_pairs: float = 1.0
    """Share of a sequence's pairs that the kernel computes: half where it leaves out what a causal mask hides."""
    backward: float = 2.0
    """FLOPs of a backward over those of a forward: 2.5 where it computes the scores once more (Dao et al. 2022)."""
    score_bytes: float = 0.0
    """Bytes of each score that a forward reads and writes; 0 for fused kernels, which write none."""


COUNTED = AttentionCharge()


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """A layer's kernels in the order of execution."""

    forward: tuple[KernelShape, ...]
    input_gradient: tuple[KernelShape, ...]
    """Gradients within the layer and of its input."""
    weight_gradient: tuple[KernelShape, ...]
    recomputed: tuple[KernelShape, ...] = ()
    """The part of the forward that the backward repeats, by the layer's treatment."""

    @property
    def weight_gradient_alone(self) -> tuple[KernelShape, ...]:
        """If nothing trainable lies before: the gradient passes through the layer, but not out of it."""
        return (*(kernel for kernel in self.input_gradient if not kernel.leaves_layer), *self.weight_gradient)

    def backward(self, input_gradient: bool, weight_gradient: bool) -> tuple[KernelShape, ...]:
        """The backward of a layer that computes these gradients, with what it recomputes first."""
        if not (input_gradient or weight_gradient):
            return ()
        if not input_gradient:
            return self.recomputed + self.weight_gradient_alone
        return self.recomputed + self.input_gradient + (self.weight_gradient if weight_gradient else ())


def layer_kernels(
    layer: LayerShape,
    *,
    tp_size: int = 1,
    sequence_parallel: bool = False,
    element_bytes: int = 2,
    residual_bytes: int | None = None,
    charge: AttentionCharge = COUNTED,
) -> LayerKernels:
    """The kernels on each rank of a tensor-parallel group of this size.

    `element_bytes`: size of an element of activations and weights in kernels. `residual_bytes`: size of an element
    between layers; None: the same. `charge`: what attention is charged for.

    A block's linears and attention are divided among the group; two all-reduces of its tokens close each forward and
    each backward (Shoeybi et al. 2019, section 3), one those of the vocabulary's layers. With sequence parallelism each
    all-reduce is a reduce-scatter and an all-gather, and norms and residuals are divided too (Korthikanti et al. 2022,
    section 4.2.2). Embeddings of patches, merger and projector are computed by all."""
    if not layer.runs:
        return LayerKernels((), (), ())
    residual = element_bytes if residual_bytes is None else residual_bytes
    make = _Maker(layer, tp_size, sequence_parallel, element_bytes, residual, charge)
    forward = tuple(make.forward("forward"))
    return LayerKernels(
        forward=forward,
        recomputed={"recomputed": forward, "attention": tuple(make.recomputed_attention(forward))}.get(
            layer.treatment, ()
        ),
        input_gradient=tuple(reversed(make.forward("input_gradient"))),
        weight_gradient=tuple(make.weight_gradients()),
    )


def adapter_linears(linear: Linear) -> tuple[Linear, Linear]:
    """The two matrices of a linear's adapter: of a column-cut linear the second is cut by its outputs, of a row-cut one
    the first by its inputs."""
    plain = replace(linear, bias=False, adapter_rank=0, name="", reads_layer_input=False, kernel_area=1)
    first = replace(plain, out_features=linear.adapter_rank, cut="row" if linear.cut == "row" else None)
    second = replace(plain, in_features=linear.adapter_rank, cut="column" if linear.cut == "column" else None)
    return first, second


def total_flops(kernels: Iterable[KernelShape]) -> Quadratic:
    return total(kernel.flops for kernel in kernels)


Pass = Literal["forward", "input_gradient", "weight_gradient"]

_TERMS: dict[Rows, tuple[str, ...]] = {
    "tokens": ("per_token",),
    "outputs": ("per_output",),
    "incoming": ("per_incoming",),
    "joint": ("per_token", "per_incoming"),
    "sequences": ("per_sequence",),
}


@dataclass(frozen=True, slots=True)
class _Maker:
    layer: LayerShape
    tp_size: int
    sequence_parallel: bool
    element_bytes: int
    residual_bytes: int
    charge: AttentionCharge

    def forward(self, direction: Pass) -> list[KernelShape]:
        """The kernels of a forward, or of the gradients of their inputs, in the order of the forward."""
        inside = self._linears_in_attention()
        linears = [
            replace(self.linear(linear, direction), in_attention=index in inside)
            for index, linear in enumerate(self.layer.linears)
        ]
        kernels = self._ordered(linears, direction)
        if not self.layer.num_adapter_parameters():
            return kernels
        adapted = {
            id(kernel): linear
            for kernel, linear in zip(linears, self.layer.linears, strict=True)
            if linear.adapter_rank
        }
        # Nothing before the first adapter is trained, nor what reads the same input as it.
        first = next(place for place, kernel in enumerate(kernels) if id(kernel) in adapted)
        while first < len(kernels) and any(kernels[first] is kernel for kernel in linears):
            first += 1
        result: list[KernelShape] = []
        for place, kernel in enumerate(kernels):
            leaves = direction == "input_gradient" and place < first
            result.append(replace(kernel, leaves_layer=kernel.leaves_layer or leaves))
            if id(kernel) in adapted:
                added = self._adapter(adapted[id(kernel)], direction, leaves_layer=leaves)
                result += [replace(own, in_attention=kernel.in_attention) for own in added]
        return result

    def _linears_in_attention(self) -> set[int]:
        """Indices of the linears that stand before an attention and belong to it."""
        found: set[int] = set()
        first = 0
        for attention in self.layer.attentions:
            found |= set(range(first, first + attention.num_linears - 1))
            first += attention.num_linears
        return found

    def recomputed_attention(self, forward: Sequence[KernelShape]) -> list[KernelShape]:
        """The kernels of a forward that a backward repeats where the attention keeps its input only."""
        gathers = [kernel for kernel in self._closing(1, "forward") if kernel.collective == "all_gather"]
        return [*gathers * len(self.layer.attentions), *(kernel for kernel in forward if kernel.in_attention)]

    def _adapter(self, linear: Linear, direction: Pass, *, leaves_layer: bool) -> list[KernelShape]:
        """The products of an adapter's matrices, and the scaling and adding of what comes out. Of a row-cut linear the
        group sums the first product, or gathers its gradient."""
        first, second = adapter_linears(linear)
        shards = {"column": (1, self.tp_size), "row": (self.tp_size, 1)}.get(linear.cut or "", (1, 1))
        width_in, width_out = linear.in_features // shards[0], linear.out_features // shards[1]
        is_input_gradient = direction == "input_gradient"
        added = KernelShape(
            "adapter",
            "elementwise",
            Quadratic(),
            self._terms(
                linear.rows,
                (2 * width_out + 3 * (width_in if is_input_gradient else width_out))
                * linear.rows_per_token
                * self.element_bytes,
            ),
        )
        summed = []
        if linear.cut == "row" and self.tp_size > 1 and (direction == "forward" or self.sequence_parallel):
            of_forward: Collective = "reduce_scatter" if self.sequence_parallel else "all_reduce"
            kind: Collective = of_forward if direction == "forward" else "all_gather"
            size = linear.adapter_rank * linear.rows_per_token * self.element_bytes
            summed = [KernelShape(kind, "communication", Quadratic(), self._terms(linear.rows, size), collective=kind)]
        product = replace(self.linear(first, direction), leaves_layer=leaves_layer and is_input_gradient)
        return [product, *summed, self.linear(second, direction), added]

    def weight_gradients(self) -> list[KernelShape]:
        """In the order of the backward."""
        kernels = []
        for linear in reversed(self.layer.trained_linears):
            own = reversed(adapter_linears(linear)) if linear.adapter_rank else [linear]
            kernels += [self.linear(matrix, "weight_gradient") for matrix in own]
        return kernels

    def _ordered(self, linears: list[KernelShape], direction: Pass) -> list[KernelShape]:
        """The kernels around those of the linears, and these, without adapters."""
        layer = self.layer
        if layer.num_comparisons:
            return self._comparisons(direction)
        if layer.part == "embed" and layer.vocabulary:
            table = self._whole("embedding", "elementwise", 2 * layer.hidden_size)
            # Its gradient only updates the table, so no collective follows.
            if direction == "forward":
                return [table, *linears, *self._closing(1, direction)]
            return [replace(table, leaves_layer=True), *linears]
        if layer.attention is None:
            return [*self._norms(direction), *linears, *self._functions(direction), *self._closing(1, direction)]
        # The linears of each attention, its output's last, stand before those of the MLP.
        norms, kernels, mlp, first = self._norms(direction), [], linears, 0
        closing: list[KernelShape] = []
        for i, attention in enumerate(layer.attentions):
            *queries_keys_values, output = mlp[: attention.num_linears]
            mlp = mlp[attention.num_linears :]
            kernels += [*closing, self._residual()] if i else []
            kernels += [*norms[i : i + 1], *queries_keys_values, self._attention(attention, direction), output]
            first += attention.num_linears
            closing = self._closing_of(layer.linears[first - 1], direction)
        rest = norms[len(layer.attentions) :]
        if not mlp:
            return [*kernels, *rest, self._residual(), *closing]
        after = [*rest, *mlp[:-1], *self._functions(direction), mlp[-1]]
        kernels += [*closing, self._residual(), *after]
        for linear in layer.linears[first:-1]:
            kernels += self._closing_of(linear, direction) if linear.rows == "incoming" else []
        return [*kernels, *self._closing(1, direction), self._residual()]

    def linear(self, linear: Linear, direction: Pass) -> KernelShape:
        shards = self.tp_size if linear.cut else 1
        rows = linear.rows_per_token
        width_in = linear.in_features / (shards if linear.cut == "row" else 1)
        width_out = linear.out_features / (shards if linear.cut == "column" else 1)
        moved = rows * (width_in / linear.kernel_area + width_out)
        return KernelShape(
            name=f"{linear.in_features}x{linear.out_features}",
            kind="gemm" if linear.kernel_area == 1 else "convolution",
            flops=self._terms(linear.rows, 2.0 * linear.in_features * linear.out_features * rows / shards),
            num_bytes=self._terms(
                linear.rows,
                moved * self.element_bytes,
                constant=linear.num_copies * width_in * width_out * self.element_bytes,
            ),
            leaves_layer=direction == "input_gradient" and linear.reads_layer_input,
        )

    def _attention(self, attention: Attention, direction: Pass) -> KernelShape:
        times = 2 if direction == "input_gradient" else 1
        of_heads = 4.0 * attention.num_heads * attention.mean_dim
        of_pass = self.charge.backward if direction == "input_gradient" else 1.0
        is_whole = attention.reads_encoder or attention.window is not None
        share = 1.0 if is_whole else self.charge.share_of_pairs
        per_pair = of_pass * share * (of_heads + attention.flops_per_pair) / self.tp_size
        size = attention.mean_dim * self.element_bytes * times / self.tp_size
        queries, keys = 2 * attention.num_heads * size, 2 * attention.num_key_value_heads * size
        if attention.reads_encoder:
            flops = self._quadratic(per_incoming_pair=per_pair)
            num_bytes = self._quadratic(per_token=queries, per_incoming=keys)
        else:
            window = attention.window
            beside = times * attention.flops_per_token / self.tp_size
            of_pairs = {"per_pair": per_pair} if window is None else {"per_token": per_pair * window}
            flops = self._quadratic(**of_pairs).plus(self._quadratic(per_token=beside))
            scores = times * attention.num_heads * self.charge.score_bytes / self.tp_size
            num_bytes = self._quadratic(per_token=queries + keys, per_pair=scores)
        return KernelShape("attention", "attention", flops, num_bytes, in_attention=True)

    def _comparisons(self, direction: Pass) -> list[KernelShape]:
        """Similarities, block by block. The backward recomputes them and multiplies them with the features of the other
        tower, which receives no gradient."""
        times = 2 if direction == "input_gradient" else 1
        per_pair = 2.0 * self.layer.hidden_size * self.layer.num_comparisons
        # The product writes a block; the softmax or sigmoid reads and writes it; it is read again.
        size = 4.0 * self.element_bytes * self.layer.num_comparisons
        products = KernelShape(
            "similarity", "gemm", self._quadratic(per_pair=times * per_pair), self._quadratic(per_pair=size / 4)
        )
        return [products, KernelShape("softmax", "elementwise", Quadratic(), self._quadratic(per_pair=size * times))]

    def _norms(self, direction: Pass) -> list[KernelShape]:
        """A norm reads and writes a token; its gradient reads two and writes one."""
        accesses = 3 if direction == "input_gradient" else 2
        return [self._whole("norm", "norm", self.layer.hidden_size * accesses) for _ in range(self._num_norms)]

    @property
    def _num_norms(self) -> int:
        """The saved vector of a projector belongs to its GELU."""
        return 0 if self.layer.part == "projector" else self.layer.saved_vectors

    def _functions(self, direction: Pass) -> list[KernelShape]:
        """An activation function between the last two linears, or the loss over the vocabulary."""
        linears, backward = self.layer.linears, direction == "input_gradient"
        if not linears or len(linears) < 2:
            loss = [
                linear for linear in linears if linear.rows == "outputs" and linear.cut and self.layer.part == "head"
            ]
            return [self._rowwise("cross_entropy", linear, linear.out_features, 2) for linear in loss]
        last = linears[-1]
        return [self._rowwise("activation", last, last.in_features, (3 if self.layer.gated else 2) + backward)]

    def _rowwise(self, name: str, linear: Linear, width: int, accesses: int) -> KernelShape:
        shards = self.tp_size if linear.cut else 1
        size = width / linear.kernel_area * linear.rows_per_token * accesses * self.element_bytes / shards
        return KernelShape(name, "elementwise", Quadratic(), self._terms(linear.rows, size))

    def _residual(self) -> KernelShape:
        return self._whole("residual", "elementwise", 3 * self.layer.hidden_size)

    def _whole(self, name: str, kind: KernelKind, elements: float) -> KernelShape:
        """A kernel that every rank of the group runs on the whole sequence, or on its share of it."""
        is_shared = self.sequence_parallel and self.tp_size > 1 and self.layer.part == "block"
        size = elements * self.element_bytes / (self.tp_size if is_shared else 1)
        return KernelShape(name, kind, Quadratic(), self._quadratic(per_token=size))

    def _closing_of(self, linear: Linear, direction: Pass) -> list[KernelShape]:
        """The collectives after an attention's last linear. Where the conditions of a generator go through blocks of
        their own, only a row-cut linear has any."""
        if linear.rows == "incoming" and linear.cut != "row":
            return []
        return self._closing(1, direction, linear.rows if linear.rows in ("incoming", "joint") else "tokens")

    def _closing(self, num_sums: int, direction: Pass, rows: Rows = "tokens") -> list[KernelShape]:
        """The collectives after a row-cut linear or a table cut by the vocabulary, or in the backward before them.

        The forward sums the outputs of a linear, the backward the gradients of the input of all linears behind a norm.
        With sequence parallelism the other direction gathers them."""
        layer = self.layer
        is_cut = self.tp_size > 1 and (bool(layer.vocabulary) or any(linear.cut for linear in layer.linears))
        if not is_cut:
            return []
        summed, gathered = self.element_bytes, self.residual_bytes
        if direction != "forward" or layer.part != "block":
            summed, gathered = gathered, summed
        together: dict[Collective, int] = {"all_reduce": summed}
        if self.sequence_parallel and layer.part == "block":
            together = {"reduce_scatter": summed, "all_gather": gathered}
        sizes = {kind: self._terms(rows, layer.hidden_size * size) for kind, size in together.items()}
        return [KernelShape(k, "communication", Quadratic(), sizes[k], collective=k) for k in [*sizes] * num_sums]

    def _terms(self, rows: Rows, value: float, constant: float = 0.0) -> Quadratic:
        return self._quadratic(constant=constant, **dict.fromkeys(_TERMS[rows], value))

    def _quadratic(self, **terms: float) -> Quadratic:
        """Converts terms of the layer's sequence into terms of the module's sequence."""
        at = self.layer.resolution
        scale = {"per_token": at, "per_pair": at**2, "per_incoming_pair": at}
        return Quadratic(**{name: value * scale.get(name, 1.0) for name, value in terms.items()})
