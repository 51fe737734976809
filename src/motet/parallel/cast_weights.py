"""Under autocast: one copy of each weight in the low precision for all microbatches of a step.

The graph of a linear layer keeps the weight that it multiplied with. Autocast forgets its copies at the end of every
forward, so each microbatch in flight would keep its own: 2 bytes for each parameter. Here the first forward of a step
makes the copy, later ones and recomputed blocks take it, and it goes with the step, before the weights change. Its
gradients come out the same: the cast is part of the graph, each backward passes through it and adds to the weight.

Weights are shared where the graph would keep them: where the layer's input has a gradient. Frozen layers that a
gradient passes through are among them; autocast never shares those.

Limits: linear layers (and transformers' `Conv1D`) only. Convolutions and other uses of weights are left to autocast,
and so are fully sharded stages: a copy that lasts would undo the sharding.
"""

import torch
from torch import Tensor

from motet.parallel.ambient import Ambient


class CastWeights(Ambient):
    """Of one stage. Its forwards and backwards run in its context."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[Tensor, Tensor] = {}

    def clear(self) -> None:
        """When a step begins or ends: the weights will have changed."""
        self._copies.clear()

    def copy(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if weight not in self._copies:
            self._copies[weight] = weight.to(dtype)
        return self._copies[weight]


def shared_weight(weight: Tensor, x: Tensor) -> Tensor:
    """What a linear layer with this input multiplies with: the weight, or in autocast the copy that the step shares."""
    current = CastWeights.current
    if current is None or not x.requires_grad or not torch.is_grad_enabled():
        return weight
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or weight.dtype != torch.float32:
        return weight
    return current.copy(weight, torch.get_autocast_dtype(kind))
