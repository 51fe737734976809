"""Cutting parameters into tensor-parallel shards, and putting them together again, exactly.

Used when a stage is built, and by checkpoints, export and verification, which know whole parameters only.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from motet.parallel.tensor_collectives import TensorParallel
from motet.parallel.tensor_plans import Shard, local_ranges


def shard_parameter(full: Tensor, shard: Shard | None, rank: int, tp_size: int) -> Tensor:
    """A copy of `rank`'s part of a whole parameter (of its gradient, or of its optimizer state); None: all of it."""
    if shard is None:
        return full.clone()
    ranges = local_ranges(full.shape[shard.dim], shard, rank, tp_size)
    return torch.cat([full.narrow(shard.dim, start, stop - start) for start, stop in ranges], shard.dim)


def unshard(parts: Sequence[Tensor], shard: Shard | None) -> Tensor:
    """The whole parameter from the parts of all ranks, in rank order: the exact inverse of `shard_parameter`."""
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
    """The whole, on every rank, of a parameter, its gradient or its optimizer state.

    A collective over the group unless `shard` is None.
    """
    local = local.detach()
    if shard is None:
        return local.clone()
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(tp.size)]
    dist.all_gather(parts, local.contiguous(), group=tp.group)
    return unshard(parts, shard)
