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
    return vars(head).get("vocabulary_group")  # A module takes long to say that it has no such attribute.


def cross_entropy_sum(logits: Tensor, labels: Tensor, tp: TensorParallel | None) -> Tensor:
    """Computes the sum of the token losses, on every rank of the group.

    Args:
        logits: [..., V], or this rank's [..., V / tp] if `tp` is given (see `vocabulary_group`).
        labels: [...], token ids, -100 for tokens without loss.

    Computed in float32, or in float64 if the logits are, a few rows at a time: logits of less precision are never there
    as a whole in more. Few logits that are whole, and need no other precision, are left to torch.
    """
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if tp is None and logits.dtype in (torch.float32, torch.float64) and logits.numel() <= CHUNK_ELEMENTS:
        return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return _CrossEntropySum.apply(logits, labels, tp)


CHUNK_ELEMENTS = 2**24
"""Logits that are computed with at a time."""


class _CrossEntropySum(torch.autograd.Function):
    """(logits [T, V] or [T, V / tp], labels [T]) -> the sum of the losses. Keeps the logits as they are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: TensorParallel | None) -> Tensor:
        counted, mine, columns = _places(logits, labels, tp)
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_sums = logits.new_empty(len(logits), dtype=wide)
        for rows in _chunks(logits):
            log_sums[rows] = logits[rows].to(wide).logsumexp(-1)
        targets = logits.gather(1, columns[:, None])[:, 0].to(wide).where(mine, 0)
        if tp is not None:
            largest = all_reduce(log_sums, tp, dist.ReduceOp.MAX)
            sums, targets = all_reduce(torch.stack([(log_sums - largest).exp(), targets]), tp)
            log_sums = largest + sums.log()
        ctx.save_for_backward(logits, log_sums, counted, mine, columns)
        return (log_sums - targets).where(counted, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, log_sums, counted, mine, columns = ctx.saved_tensors
        scale = grad.to(log_sums.dtype) * counted
        result = torch.empty_like(logits)
        for rows in _chunks(logits):
            part = (logits[rows].to(log_sums.dtype) - log_sums[rows, None]).exp_().mul_(scale[rows, None])
            part.scatter_add_(1, columns[rows, None], -(scale[rows] * mine[rows])[:, None])
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
