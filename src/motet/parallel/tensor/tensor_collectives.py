"""The collectives of tensor parallelism as differentiable functions, each with the conjugate collective as backward.

The sequence dimension is the last but one: [..., T, H]. A shard of the sequence has ceil(T / tp) rows on every rank;
the last ones end in padding (at most tp - 1 rows in all), so that T need not divide and all shapes are alike. Padding
is cut off whenever the sequence is gathered, and takes no part in any gradient.
(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from motet.parallel.tensor.tensor_plans import Shard, local_ranges

SEQUENCE_DIM = -2

_ALL_GATHER, _REDUCE_SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")  # their names in torch 2.11 and older
)


@dataclass(frozen=True)
class TensorParallel:
    """A tensor-parallel group, whose members share every layer of a stage, seen from one member."""

    group: dist.ProcessGroup | None
    """The process group; None: all processes."""
    rank: int
    """This member's rank in the group."""
    size: int
    sequence_parallel: bool = False
    """Whether norms, residuals and dropout between parallel regions compute a share of the sequence on each rank."""
    experts: "TensorParallel | None" = None
    """The group over which experts are distributed, each on one of its ranks; None: experts are cut as other weights
    are."""


def copy_to_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """The entry of a parallel region: identity, gradients are summed."""
    return _collective(x, lambda x: x.view_as(x), lambda grad: all_reduce(grad, tp))


def reduce_from_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """The exit of a parallel region: partial results are summed, gradients pass."""
    return _collective(x, lambda x: all_reduce(x, tp), lambda grad: grad)


def scatter_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """Takes this rank's shard of [..., T, H], which is equal on all ranks. The backward gathers gradients."""
    length = x.shape[SEQUENCE_DIM]
    return _collective(x, lambda x: sequence_shard(x, tp), lambda grad: all_gather_sequence(grad, length, tp))


def gather_sequence(x: Tensor, length: int, tp: TensorParallel) -> Tensor:
    """Gathers shards to [..., length, H], for what all ranks compute alike. In the backward each rank takes its
    share of the equal gradients."""
    return _collective(x, lambda x: all_gather_sequence(x, length, tp), lambda grad: sequence_shard(grad, tp))


def gather_to_group(x: Tensor, length: int, tp: TensorParallel) -> Tensor:
    """The entry of a parallel region under sequence parallelism: gather; gradients are summed and scattered."""
    return _collective(x, lambda x: all_gather_sequence(x, length, tp), lambda grad: reduce_scatter_sequence(grad, tp))


def reduce_scatter_from_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """The exit of a parallel region under sequence parallelism: sum and scatter; gradients are gathered."""
    length = x.shape[SEQUENCE_DIM]
    return _collective(x, lambda x: reduce_scatter_sequence(x, tp), lambda grad: all_gather_sequence(grad, length, tp))


def gather_outputs(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gathers this rank's outputs [..., n / tp] to [..., n], for what all ranks compute alike."""
    return _collective(x, lambda x: _gather_last(x, tp), lambda grad: _own_last(grad, tp))


def split_inputs(x: Tensor, tp: TensorParallel) -> Tensor:
    """Takes this rank's part [..., n / tp] of [..., n], which is equal on all ranks. The backward gathers gradients."""
    return _collective(x, lambda x: _own_last(x, tp), lambda grad: _gather_last(grad, tp))


def _gather_last(x: Tensor, tp: TensorParallel) -> Tensor:
    parts = x.new_empty((tp.size, *x.shape))
    getattr(dist, _ALL_GATHER)(parts.flatten(0, 1) if x.dim() > 1 else parts.flatten(), x.contiguous(), group=tp.group)
    return parts.movedim(0, -2).flatten(-2)


def _own_last(x: Tensor, tp: TensorParallel) -> Tensor:
    return x.chunk(tp.size, -1)[tp.rank].contiguous()


def exchange_rows(
    rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Rows [n, ...], `num_sent` of them to each rank of the group in order -> those from each rank in order. Gradients
    travel back."""
    return _collective(
        rows,
        lambda x: _all_to_all(x, num_sent, num_received, group),
        lambda grad: _all_to_all(grad, num_received, num_sent, group),
    )


def _all_to_all(
    rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    result = rows.new_empty((sum(num_received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), list(num_received), list(num_sent), group=group)
    return result


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Identity in the forward; the backward multiplies the gradient by a factor."""
    return _collective(x, lambda x: x.view_as(x), lambda grad: grad * factor)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.conjugate = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.conjugate(grad), None, None


def _collective(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    return _Collective.apply(x, forward, backward)


def all_reduce(x: Tensor, tp: TensorParallel, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Sums out of place: autograd may hand the same gradient tensor to several consumers."""
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=op, group=tp.group)
    return result


def shard_length(length: int, tp: TensorParallel) -> int:
    return -(-length // tp.size)


def sequence_shard(x: Tensor, tp: TensorParallel) -> Tensor:
    """[..., T, H] -> [..., ceil(T / tp), H]: this rank's rows, padded with zeros."""
    return rows_of_share(x, tp.rank, tp.size)


def rows_of_share(x: Tensor, share: int, num_shares: int) -> Tensor:
    """[..., T, H] -> [..., ceil(T / num_shares), H]: one share of the rows, padded with zeros."""
    size = -(-x.shape[SEQUENCE_DIM] // num_shares)
    start = min(share * size, x.shape[SEQUENCE_DIM])
    rows = x.narrow(SEQUENCE_DIM, start, min(size, x.shape[SEQUENCE_DIM] - start))
    return pad(rows, (0, 0, 0, size - rows.shape[SEQUENCE_DIM])).contiguous()


def all_gather_sequence(x: Tensor, length: int, tp: TensorParallel) -> Tensor:
    """[..., ceil(length / tp), H] -> [..., length, H]"""
    assert x.shape[SEQUENCE_DIM] == shard_length(length, tp), f"{tuple(x.shape)} is no shard of a sequence of {length}"
    shards = x.new_empty((tp.size, *x.shape))
    getattr(dist, _ALL_GATHER)(shards.flatten(0, 1), x.contiguous(), group=tp.group)
    return shards.movedim(0, SEQUENCE_DIM - 1).flatten(SEQUENCE_DIM - 1, SEQUENCE_DIM).narrow(SEQUENCE_DIM, 0, length)


def reduce_scatter_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """[..., T, H], partial sums -> [..., ceil(T / tp), H]: this rank's rows of the sum, padded with zeros."""
    length = x.shape[SEQUENCE_DIM]
    size = shard_length(length, tp)
    padded = pad(x, (0, 0, 0, tp.size * size - length))
    shards = padded.unflatten(SEQUENCE_DIM, (tp.size, size)).movedim(SEQUENCE_DIM - 1, 0).contiguous()
    result = torch.empty_like(shards[0])
    getattr(dist, _REDUCE_SCATTER)(result, shards.flatten(0, 1), group=tp.group)
    return result


def shard_parameter(full: Tensor, shard: Shard | None, rank: int, tp_size: int) -> Tensor:
    """Copies `rank`'s part of a whole parameter, gradient or optimizer state. `shard`: None for all of it."""
    if shard is None:
        return full.clone()
    ranges = local_ranges(full.shape[shard.dim], shard, rank, tp_size)
    return torch.cat([full.narrow(shard.dim, start, stop - start) for start, stop in ranges], shard.dim)


def unshard(parts: Sequence[Tensor], shard: Shard | None) -> Tensor:
    """Joins the parts of all ranks, in rank order, to the whole parameter: the exact inverse of `shard_parameter`."""
    if shard is None:
        return parts[0].clone()
    shape = list(parts[0].shape)
    shape[shard.dim] *= len(parts)
    full = parts[0].new_empty(shape)
    for rank, part in enumerate(parts):
        ranges = local_ranges(shape[shard.dim], shard, rank, len(parts))
        sections = part.split([stop - start for start, stop in ranges], shard.dim)
        for (start, stop), section in zip(ranges, sections, strict=True):
            full.narrow(shard.dim, start, stop - start).copy_(section)
    return full


def gather_full(local: Tensor, shard: Shard | None, tp: TensorParallel) -> Tensor:
    """Gathers a whole parameter, gradient or optimizer state on every rank.

    A collective over the group unless `shard` is None.
    """
    local = local.detach()
    if shard is None:
        return local.clone()
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(tp.size)]
    dist.all_gather(parts, local.contiguous(), group=tp.group)
    return unshard(parts, shard)
