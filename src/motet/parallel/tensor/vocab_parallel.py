"""Embedding, output head and cross-entropy cut by the vocabulary: logits are never gathered.

Every rank holds the rows of V / tp consecutive tokens. The embedding looks up the tokens that it holds, and the sum
over the ranks completes it; the head gives the logits of its tokens; the loss exchanges three numbers for each token:
the largest logit, the sum of exponentials and the target's logit (Shoeybi et al. 2019, section 3).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from motet.assignment.sample import IGNORED_LABEL
from motet.parallel.tensor.tensor_collectives import TensorParallel, all_reduce, copy_to_group, reduce_from_group


def shard_embedding(embedding: nn.Embedding, tp: TensorParallel) -> None:
    """Makes an embedding, whose weight is already this rank's shard, complete its look-ups over the group.

    Its own forward stays, so whatever else it does must be linear (Gemma3's scale is).
    """
    num_rows = embedding.weight.shape[0]
    first = tp.rank * num_rows
    embedding.num_embeddings = num_rows
    padding = embedding.padding_idx
    # Reads as "no gradient for this row" in torch: only its holder may keep it.
    embedding.padding_idx = padding - first if padding is not None and first <= padding < first + num_rows else None
    elsewhere = [torch.empty(0)]

    def look_up_own(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        local = args[0] - first
        elsewhere[0] = (local < 0) | (local >= num_rows)
        return (local.masked_fill(elsewhere[0], 0), *args[1:])

    def complete(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return reduce_from_group(output.masked_fill(elsewhere[0].unsqueeze(-1), 0), tp)

    embedding.register_forward_pre_hook(look_up_own)
    embedding.register_forward_hook(complete)


def shard_head(head: nn.Linear, tp: TensorParallel) -> None:
    """Makes an output head, whose weight is already this rank's shard, give the logits of its own tokens."""
    head.out_features = head.weight.shape[0]
    head.vocabulary_group = tp  # type: ignore[assignment]
    head.register_forward_pre_hook(lambda module, args: (copy_to_group(args[0], tp), *args[1:]))


def vocabulary_group(head: nn.Module) -> TensorParallel | None:
    """Returns the group over which the head's logits are cut, for `cross_entropy_sum`; None if they are whole."""
    return getattr(head, "vocabulary_group", None)


def cross_entropy_sum(logits: Tensor, labels: Tensor, tp: TensorParallel | None) -> Tensor:
    """Computes the sum of the token losses, on every rank of the group.

    Args:
        logits: [..., V], or this rank's [..., V / tp] if `tp` is given (see `vocabulary_group`).
        labels: [...], token ids, -100 for tokens without loss.

    Computed in float32, or in float64 if the logits are, a few rows at a time: logits of less precision are never there
    as a whole in more.
    """
    return _CrossEntropySum.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), tp)


CHUNK_ELEMENTS = 2**24
"""Logits that are computed with at a time."""


class _CrossEntropySum(torch.autograd.Function):
    """(logits [T, V] or [T, V / tp], labels [T]) -> the sum of the losses. Keeps the logits as they are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: TensorParallel | None) -> Tensor:
        counted, mine, columns = _places(logits, labels, tp)
        wide = torch.promote_types(logits.dtype, torch.float32)
        largest = logits.amax(-1).to(wide)
        if tp is not None:
            largest = all_reduce(largest, tp, dist.ReduceOp.MAX)
        sums = torch.empty_like(largest)
        for rows in _chunks(logits):
            sums[rows] = (logits[rows].to(wide) - largest[rows, None]).exp_().sum(-1)
        targets = (logits.gather(1, columns[:, None])[:, 0].to(wide) - largest).where(mine, 0)
        if tp is not None:
            sums, targets = all_reduce(torch.stack([sums, targets]), tp)
        ctx.tp = tp
        ctx.save_for_backward(logits, labels, largest, sums)
        return (sums.log() - targets).where(counted, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, largest, sums = ctx.saved_tensors
        counted, mine, columns = _places(logits, labels, ctx.tp)
        scale = (grad / sums).where(counted, 0)
        result = torch.empty_like(logits)
        for rows in _chunks(logits):
            part = (logits[rows].to(sums.dtype) - largest[rows, None]).exp_().mul_(scale[rows, None])
            part.scatter_add_(1, columns[rows, None], -(grad * mine[rows])[:, None])
            result[rows] = part
        return result, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    num_rows, width = logits.shape
    size = max(1, CHUNK_ELEMENTS // width)
    return (slice(first, first + size) for first in range(0, num_rows, size))


def _places(logits: Tensor, labels: Tensor, tp: TensorParallel | None) -> tuple[Tensor, Tensor, Tensor]:
    """For each token: whether it has a loss, whether its target's logit is here, and in which column (any, if not)."""
    num_local = logits.shape[1]
    local = labels if tp is None else labels - tp.rank * num_local
    counted = labels != IGNORED_LABEL
    return counted, counted & (local >= 0) & (local < num_local), local.clamp(0, num_local - 1)
