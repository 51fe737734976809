"""A backward in two halves: linear layers put their weights' gradients off until they are asked for.

The input half of a backward is what other stages wait for; the weight half can run at any later time and fill bubbles
(Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2). Nearly all of the weight half is one matrix product for
each linear layer. So a forward that will be split runs each `nn.functional.linear` with a trainable weight as a
function of ours. Its backward returns the input's gradient and remembers the layer's input and its output's gradient,
which `weight_half` multiplies. The graph itself is freed by the input half.

What follows from this:

* The two halves do the same matrix products as a whole backward, none twice. On a stage without input gradient too: the
  chain through its layers is the input half, although nobody waits for it.
* All other weights (of norms, embeddings, convolutions, of any function but `linear`) get their gradients in the input
  half. They cost little, and a parameter that is used in both ways is right: gradients add up.
* With recomputation the layers are run again once, in the input half; from then on their inputs are kept.
* Inside a tensor-parallel group the weight half has no communication.

Limits: `linear` inside of other functions of torch (`nn.MultiheadAttention`) is not seen; it stays in the input half.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


class _Product(NamedTuple):
    """One linear layer's share: weight [m, n], bias [m] gets a gradient from x [..., n] and the output's [..., m]."""

    layer: "_Layer"
    x: Tensor
    output_gradient: Tensor


class _Layer(NamedTuple):
    weight: nn.Parameter
    bias: nn.Parameter | None


class SplitBackward(TorchFunctionMode):
    """Of one microbatch on one stage. The forward runs in its context, then come `input_half` and `weight_half`."""

    def __init__(self) -> None:
        super().__init__()
        self._products: deque[_Product] = deque()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is linear and torch.is_grad_enabled():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _is_trainable(weight) or not (bias is None or isinstance(bias, nn.Parameter)):
            return linear(input, weight, bias)
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        elif input.dtype != weight.dtype:
            return linear(input, weight, bias)  # It says what is wrong.
        # The output has to have a graph although its input may have none. Not by way of the weight: what waits for its
        # gradient would be told in the input half already.
        anchor = torch.empty(0, requires_grad=True)
        return _Linear.apply(input, anchor, _Layer(weight, bias), self._products)

    @property
    def parameters(self) -> set[Tensor]:
        """After the input half: those that still get a gradient."""
        found: set[Tensor] = set()
        for product in self._products:
            found.update(filter(_is_trainable, product.layer))
        return found

    def input_half(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """All of `torch.autograd.backward(roots, gradients)` but what is left to the weight half."""
        edges = [get_gradient_edge(root) for root in roots]
        given = [torch.ones_like(r) if g is None else g for r, g in zip(roots, gradients, strict=True)]
        # Layers that are recomputed must meet the same functions as in the forward. Edges instead of tensors, because
        # a call with tensors is a torch function itself, and within those this mode is off.
        with self:
            torch.autograd.backward(edges, given)

    @torch.no_grad()
    def weight_half(self) -> None:
        """Adds to the weights' `.grad`, the last layers' first, and lets go of what was kept for it."""
        while self._products:
            (weight, bias), x, gradient = self._products.popleft()
            rows = gradient.flatten(0, -2) if gradient.dim() > 1 else gradient[None]
            inputs = x.flatten(0, -2) if x.dim() > 1 else x[None]
            # By autograd's own way of adding, so that whatever waits for a parameter's gradient is told.
            weight.backward((rows.T @ inputs).to(weight.dtype))
            if _is_trainable(bias):
                bias.backward(rows.sum(0).to(bias.dtype))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: _Layer, products: deque[_Product]) -> Tensor:
        ctx.save_for_backward(x)
        # The weight as it stands, not its copy in autocast's dtype.
        ctx.layer, ctx.products = layer, products
        weight, bias = layer
        # Without autocast: it would keep copies of the weights that were made here, without graph, for later uses.
        with torch.autocast(x.device.type, enabled=False):
            return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.products.append(_Product(ctx.layer, x, gradient))
        of_input = gradient @ ctx.layer.weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        return of_input, None, None, None


def _is_trainable(parameter: Tensor | None) -> TypeGuard[nn.Parameter]:
    return isinstance(parameter, nn.Parameter) and parameter.requires_grad
