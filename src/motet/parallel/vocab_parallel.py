"""Embedding, output head and cross-entropy cut by the vocabulary: logits are never gathered.

Every rank holds the rows of V / tp consecutive tokens. The embedding looks up the tokens that it holds, and the sum
over the ranks completes it; the head gives the logits of its tokens; the loss exchanges three numbers for each token:
the largest logit, the sum of exponentials and the target's logit (Shoeybi et al. 2019, section 3).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from motet.assignment.sample import IGNORED_LABEL
from motet.parallel.tensor_collectives import TensorParallel, all_reduce, copy_to_group, reduce_from_group


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

    Computed in float32, or in float64 if the logits are.
    """
    logits = logits.reshape(-1, logits.shape[-1])
    logits = logits if logits.dtype == torch.float64 else logits.float()
    labels = labels.reshape(-1)
    if tp is None:
        return cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return _VocabParallelCrossEntropy.apply(logits, labels, tp)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: TensorParallel) -> Tensor:
        num_local = logits.shape[1]
        counted = labels != IGNORED_LABEL
        local_labels = labels - tp.rank * num_local
        mine = counted & (local_labels >= 0) & (local_labels < num_local)
        # Labels of other ranks read some column of this one's and count as nothing: sizes must not depend on values.
        columns = local_labels.clamp(0, num_local - 1).unsqueeze(-1)

        largest = all_reduce(logits.amax(-1), tp, dist.ReduceOp.MAX)
        exponentials = (logits - largest.unsqueeze(-1)).exp()
        targets = (logits.gather(1, columns).squeeze(-1) - largest).masked_fill(~mine, 0.0)
        normalizers, targets = all_reduce(torch.stack([exponentials.sum(-1), targets]), tp)

        ctx.save_for_backward(exponentials.div_(normalizers.unsqueeze(-1)), counted, mine, columns)
        return (normalizers.log() - targets).masked_fill(~counted, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, counted, mine, columns = ctx.saved_tensors
        result = probabilities * counted.unsqueeze(-1)
        result.scatter_add_(1, columns, -mine.to(result.dtype).unsqueeze(-1))
        return result * grad, None, None
