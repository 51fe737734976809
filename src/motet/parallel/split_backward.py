"""Splits a backward into two halves: linear layers defer their weight gradients until the weight half runs.

The input half of a backward is what other stages wait for; the weight half can run at any later time and fill bubbles
(Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2). Nearly all of the weight half is one matrix product for
each linear layer. So in a forward that will be split each trainable linear layer runs as a function of ours. Its
backward returns the input's gradient and remembers the layer's input and its output's gradient, which `weight_half`
multiplies. The graph itself is freed by the input half.

What follows from this:

* The two halves do the same matrix products as a whole backward, none twice. On a stage without input gradient too: the
  chain through its layers is the input half, although nobody waits for it.
* All other weights (of norms, embeddings, convolutions, of anything but linear layers) get their gradients in the input
  half. They cost little, and a parameter that is used in both ways is right: gradients add up. GPT-2's blocks have no
  linear layers but transformers' `Conv1D`: right too, but zero-bubble schedules gain nothing there.
* With recomputation the layers are run again once, in the input half; from then on their inputs are kept.
* Inside a tensor-parallel group the weight half has no communication.

Limits: hooks on parameters do not see what the weight half adds; it tells its caller instead.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence, Set
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D


class Ambient:
    """A context that code inside unmodified models reads as `current` of its class, within a `with` block.

    It belongs to the process, not to a thread: autograd may recompute layers in threads that it starts."""

    current: ClassVar[Self | None]  # Each subclass has its own.

    def __init_subclass__(cls) -> None:
        cls.current = None

    def __init__(self) -> None:
        self._outer: Any = None

    def __enter__(self) -> None:
        self._outer, type(self).current = type(self).current, self

    def __exit__(self, *_: object) -> None:
        type(self).current = self._outer


class CastWeights(Ambient):
    """Copies of one stage's weights in autocast's dtype, shared by all microbatches of a step.

    The graph of a linear layer keeps the weight that it multiplied with. Autocast drops its copies at the end of every
    forward, so each microbatch in flight would keep its own: 2 bytes per parameter. Here the first forward of a step
    makes the copy, and later ones and recomputed blocks use it until the step ends. Gradients are the same: the cast
    is part of the graph, and each backward passes through it and adds to the weight. A weight is shared if the graph
    would keep it, that is if the layer's input requires a gradient; frozen layers are among them, which autocast never
    shares. The stage's forwards and backwards run in this context.

    Limits: linear layers and transformers' `Conv1D` only; not on fully sharded stages, whose sharding it would undo.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[Tensor, Tensor] = {}

    def clear(self) -> None:
        """Called when a step begins or ends, because the weights change between steps."""
        self._copies.clear()

    def copy(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if weight not in self._copies:
            self._copies[weight] = weight.to(dtype)
        return self._copies[weight]


def shared_weight(weight: Tensor, x: Tensor) -> Tensor:
    """Returns the weight that a linear layer multiplies this input with: under autocast, the step's shared copy."""
    current = CastWeights.current
    if current is None or not x.requires_grad or not torch.is_grad_enabled():
        return weight
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or weight.dtype != torch.float32:
        return weight
    return current.copy(weight, torch.get_autocast_dtype(kind))


class Deferred(Protocol):
    """Work that a function's backward leaves to the weight half."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Parameters that get a gradient from this work."""

    def finish(self) -> None:
        """Computes the gradients and adds them to the parameters' `.grad`."""


class SplitBackward(Ambient):
    """The split backward of one microbatch on one stage. The forward runs in its context, then come `input_half` and
    `weight_half`."""

    def __init__(self) -> None:
        super().__init__()
        self._deferred: deque[Deferred] = deque()

    @property
    def parameters(self) -> set[Tensor]:
        """Parameters that still get a gradient after the input half."""
        return {parameter for work in self._deferred for parameter in work.parameters}

    def defer(self, work: Deferred) -> None:
        """Called by the backward of functions that ran in this context."""
        self._deferred.append(work)

    def input_half(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Runs `torch.autograd.backward(roots, gradients)` except for the part that is left to the weight half."""
        with self:  # Layers that are recomputed must meet the same functions as in the forward.
            torch.autograd.backward(roots, gradients)

    def weight_half(self, of: Set[Tensor] | None = None) -> Iterator[Tensor]:
        """Adds to the weights' `.grad`, the last layers' first, and lets go of what was kept for it.

        `of`: these parameters only; the others' part can be asked for later. Yields each parameter when it has got all
        that this microbatch brings."""
        here: deque[Deferred] = deque()
        later: deque[Deferred] = deque()
        for work in self._deferred:
            (later if of is not None and of.isdisjoint(work.parameters) else here).append(work)
        self._deferred = later
        uses = Counter(parameter for work in here for parameter in work.parameters)
        while here:
            work = here.popleft()
            work.finish()
            for parameter in work.parameters:
                uses[parameter] -= 1
                if not uses[parameter]:
                    yield parameter


class SplittableLinear(nn.Linear):
    """A linear layer that respects the contexts of `SplitBackward` and `CastWeights`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class CastingConv1D(Conv1D):
    """transformers' `Conv1D` that respects the context of `CastWeights`."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), shared_weight(self.weight, x))
        return rows.view(*x.shape[:-1], self.nf)


def make_splittable(stage: nn.Module) -> None:
    """Turns the stage's plain linear layers into splittable ones, in place."""
    for module in stage.modules():
        if type(module) is nn.Linear:
            module.__class__ = SplittableLinear
        elif type(module) is Conv1D:
            module.__class__ = CastingConv1D


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `nn.functional.linear`; its weight gradient is deferred to the current `SplitBackward`."""
    cast = shared_weight(weight, x)
    current = SplitBackward.current
    if current is None or not weight.requires_grad or not torch.is_grad_enabled():
        return functional.linear(x, cast, bias)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    # The output has to have a graph although its input may have none. Not by way of the weight: whatever waits for its
    # gradient would be told in the input half already.
    anchor = torch.empty(0, requires_grad=True)
    return _Linear.apply(x, anchor, _Layer(weight, bias, cast), current)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: "_Layer", split: SplitBackward) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.split = layer, split
        _, bias, cast = layer
        if not torch.is_autocast_enabled(x.device.type):
            return functional.linear(x, cast, bias)
        # Autocast itself would keep copies of the weights that were made here, without graph, for later uses.
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, cast.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.split.defer(_Product(ctx.layer, x.detach(), gradient))
        of_input = gradient @ ctx.layer.cast.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        return of_input, None, None, None


class _Layer(NamedTuple):
    """A layer's tensors, hidden from autograd in a tuple."""

    weight: Tensor
    """[m, n], trainable."""
    bias: Tensor | None
    """[m]"""
    cast: Tensor
    """The weight, or the copy of it that all microbatches share."""


class _Product(NamedTuple):
    """The weight gradient of one linear layer."""

    layer: _Layer
    x: Tensor
    """[..., n]"""
    output_gradient: Tensor
    """[..., m]"""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        weight, bias, _ = self.layer
        return (weight,) if bias is None or not bias.requires_grad else (weight, bias)

    def finish(self) -> None:
        weight, bias, _ = self.layer
        rows = self.output_gradient.reshape(-1, self.output_gradient.shape[-1])
        x = self.x.reshape(-1, self.x.shape[-1])
        if weight.grad is not None and weight.grad.dtype == rows.dtype:
            weight.grad.addmm_(rows.T, x)
        else:
            _add(weight, rows.T @ x)
        if bias is not None and bias.requires_grad:
            _add(bias, rows.sum(0))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient
