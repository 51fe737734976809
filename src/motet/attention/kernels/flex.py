"""Attention under an interval mask by torch's FlexAttention: the second path on GPUs, tiles from our own block map.

torch's own `create_block_mask` evaluates the mask for all pairs; here the tiles come from the tokens.
Limits: on the CPU torch has no backward for it (NotImplementedError).
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from motet.attention.kernels.device_mask import DeviceMask
from motet.attention.kernels.tasks import TileMap


def flex_mask(mask: DeviceMask) -> BlockMask:
    """The mask in FlexAttention's terms. Make it once per microbatch: all layers and heads share it."""

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = mask.position[batch, key]
        lo, hi = mask.lo[batch, query], mask.hi[batch, query]
        first = (lo[..., 0] <= position) & (position < hi[..., 0])
        second = (lo[..., 1] <= position) & (position < hi[..., 1])
        seen = (mask.classes_seen[batch, query] >> mask.key_class[batch, key].long()) & 1
        return (first | second) & (seen != 0)

    num_queries, num_keys = mask.lo.shape[1], mask.position.shape[1]
    num_columns = -(-num_keys // mask.block)
    partial = _padded_rows(mask.tile_maps, full=False, num_columns=num_columns, device=mask.lo.device)
    full = _padded_rows(mask.tile_maps, full=True, num_columns=num_columns, device=mask.lo.device)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=mask.block, mask_mod=allowed, seq_lengths=(num_queries, num_keys)
    )


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None = None) -> Tensor:
    """As `motet.attention.kernels.flash.flash_attention`, for the mask of `flex_mask`. Compiled on GPUs."""
    is_grouped = query.shape[1] != key.shape[1]
    if query.is_cuda:
        return _compiled()(query, key, value, block_mask=mask, scale=scale, enable_gqa=is_grouped)
    return flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=is_grouped)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


def _padded_rows(
    maps: tuple[TileMap, ...], *, full: bool, num_columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(number of tiles [B, 1, rows], their columns [B, 1, rows, columns]) of one kind."""
    num_rows = len(maps[0].offsets) - 1
    counts = torch.zeros(len(maps), 1, num_rows, dtype=torch.int32)
    columns = torch.zeros(len(maps), 1, num_rows, num_columns, dtype=torch.int32)
    for batch, tile_map in enumerate(maps):
        for row in range(num_rows):
            tiles = slice(tile_map.offsets[row], tile_map.offsets[row + 1])
            found = tile_map.blocks[tiles][tile_map.is_full[tiles] == full]
            counts[batch, 0, row] = len(found)
            columns[batch, 0, row, : len(found)] = torch.from_numpy(found)
    return counts.to(device), columns.to(device)
