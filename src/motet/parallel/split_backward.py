"""Splits a backward into two halves: linear layers defer their weight gradients until the weight half runs.

The input half of a backward is what other stages wait for; the weight half can run at any later time and fill bubbles
(Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2). Nearly all of the weight half is one matrix product for
each linear layer. So in a forward that will be split each trainable linear layer runs as a function of ours. Its
backward returns the input's gradient and remembers the layer's input and its output's gradient, which `weight_half`
multiplies. The graph itself is freed by the input half.

What follows from this:

* The two halves do the same matrix products as a whole backward, none twice. On a stage without input gradient too: the
  chain through its layers is the input half, although no other stage waits for it.
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

from motet.parallel.main_gradients import gradient_dtype


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
    """A linear layer that respects the context of `SplitBackward`."""

    def forward(self, x: Tensor) -> Tensor:
        if SplitBackward.current is None:
            return functional.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


def make_splittable(stage: nn.Module) -> None:
    """Turns the stage's plain linear layers into splittable ones, in place."""
    for module in stage.modules():
        if type(module) is nn.Linear:
            module.__class__ = SplittableLinear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `nn.functional.linear`; its weight gradient is deferred to the current `SplitBackward`."""
    current = SplitBackward.current
    if current is None or not weight.requires_grad or not torch.is_grad_enabled():
        return functional.linear(x, weight, bias)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    # The output has to have a graph although its input may have none. Not by way of the weight: whatever waits for its
    # gradient would be told in the input half already.
    anchor = torch.empty(0, requires_grad=True)
    return _Linear.apply(x, anchor, _Layer(weight, bias), current)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: "_Layer", split: SplitBackward) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.split = layer, split
        weight, bias = layer
        if not torch.is_autocast_enabled(x.device.type):
            return functional.linear(x, weight, bias)
        # Autocast itself would keep copies of the weights that were made here, without graph, for later uses.
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.split.defer(_Product(ctx.layer, x.detach(), gradient))
        of_input = gradient @ ctx.layer.weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        return of_input, None, None, None


class _Layer(NamedTuple):
    """A layer's tensors, hidden from autograd in a tuple."""

    weight: Tensor
    """[m, n], trainable."""
    bias: Tensor | None
    """[m]"""


class _Product(NamedTuple):
    """The weight gradient of one linear layer."""

    layer: _Layer
    x: Tensor
    """[..., n]"""
    output_gradient: Tensor
    """[..., m]"""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        weight, bias = self.layer
        return (weight,) if bias is None or not bias.requires_grad else (weight, bias)

    def finish(self) -> None:
        weight, bias = self.layer
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
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        parameter.grad += gradient
