"""A backward in two halves: linear layers put their weights' gradients off until they are asked for.

The input half of a backward is what other stages wait for; the weight half can run at any later time and fill bubbles
(Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2). Nearly all of the weight half is one matrix product for
each linear layer. So in a forward that will be split each trainable linear layer runs as a function of ours. Its
backward returns the input's gradient and remembers the layer's input and its output's gradient, which `weight_half`
multiplies. The graph itself is freed by the input half.

What follows from this:

* The two halves do the same matrix products as a whole backward, none twice. On a stage without input gradient too: the
  chain through its layers is the input half, although nobody waits for it.
* All other weights (of norms, embeddings, convolutions, of anything but linear layers) get their gradients in the input
  half. They cost little, and a parameter that is used in both ways is right: gradients add up.
* With recomputation the layers are run again once, in the input half; from then on their inputs are kept.
* Inside a tensor-parallel group the weight half has no communication.

Limits: hooks on parameters do not see what the weight half adds; it tells its caller instead.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Layer(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class _Product(NamedTuple):
    """One linear layer's share: weight [m, n], bias [m] gets a gradient from x [..., n] and the output's [..., m]."""

    layer: _Layer
    x: Tensor
    output_gradient: Tensor


class SplitBackward:
    """Of one microbatch on one stage. The forward runs in its context, then come `input_half` and `weight_half`."""

    def __init__(self) -> None:
        self._products: deque[_Product] = deque()
        self._outer: SplitBackward | None = None

    def __enter__(self) -> None:
        global _current
        self._outer, _current = _current, self

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._outer

    @property
    def parameters(self) -> set[Tensor]:
        """After the input half: those that still get a gradient."""
        return {p for product in self._products for p in product.layer if _is_trainable(p)}

    def input_half(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """All of `torch.autograd.backward(roots, gradients)` but what is left to the weight half."""
        with self:  # Layers that are recomputed must meet the same functions as in the forward.
            torch.autograd.backward(roots, gradients)

    def weight_half(self) -> Iterator[Tensor]:
        """Adds to the weights' `.grad`, the last layers' first, and lets go of what was kept for it.

        Yields each parameter when it has got what this microbatch brings."""
        while self._products:
            (weight, bias), x, gradient = self._products.popleft()
            rows = gradient.reshape(-1, gradient.shape[-1])
            inputs = x.reshape(-1, x.shape[-1])
            if weight.grad is not None and weight.grad.dtype == rows.dtype:
                weight.grad.addmm_(rows.T, inputs)
            else:
                _add(weight, rows.T @ inputs)
            yield weight
            if _is_trainable(bias):
                _add(bias, rows.sum(0))
                yield bias


_current: SplitBackward | None = None
"""Whose context this process is in. Not a thread's own: autograd may recompute layers in threads that it starts."""


class SplittableLinear(nn.Linear):
    """Like any linear layer, but for the contexts of `SplitBackward`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def make_splittable(stage: nn.Module) -> None:
    """Turns the stage's plain linear layers into splittable ones, in place."""
    for module in stage.modules():
        if type(module) is nn.Linear:
            module.__class__ = SplittableLinear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`nn.functional.linear`, whose weight gradient the current `SplitBackward` takes."""
    if _current is None or not weight.requires_grad or not torch.is_grad_enabled():
        return functional.linear(x, weight, bias)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    # The output has to have a graph although its input may have none. Not by way of the weight: whatever waits for its
    # gradient would be told in the input half already.
    anchor = torch.empty(0, requires_grad=True)
    return _Linear.apply(x, anchor, _Layer(weight, bias), _current._products)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: _Layer, products: deque[_Product]) -> Tensor:
        ctx.save_for_backward(x)
        # The weight as it stands, not its copy in autocast's dtype.
        ctx.layer, ctx.products = layer, products
        weight, bias = layer
        if not torch.is_autocast_enabled(x.device.type):
            return functional.linear(x, weight, bias)
        # Autocast itself would keep copies of the weights that were made here, without graph, for later uses.
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.products.append(_Product(ctx.layer, x.detach(), gradient))
        of_input = gradient @ ctx.layer.weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        return of_input, None, None, None


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient


def _is_trainable(parameter: Tensor | None) -> TypeGuard[Tensor]:
    return parameter is not None and parameter.requires_grad
