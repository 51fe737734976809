"""An interval mask as the kernels read it: of a batch, for the queries and keys that one rank holds, on its device.

Tokens keep their positions wherever they are computed, so intervals need no translation when blocks of tokens are
permuted over context-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.attention.kernels.tasks import Tasks, TileMap, make_tasks, tile_map
from motet.attention.masks.interval_mask import IntervalMask

BLOCK = 128
"""Tokens on either side of a tile."""


@dataclass(frozen=True, eq=False)
class DeviceTasks:
    """`Tasks` as tensors."""

    tasks: Tensor
    tiles: Tensor
    split_blocks: Tensor
    num_slots: int

    @staticmethod
    def on(device: torch.device, tasks: Tasks) -> "DeviceTasks":
        return DeviceTasks(
            tasks=torch.from_numpy(tasks.tasks).to(device),
            tiles=torch.from_numpy(tasks.tiles).to(device),
            split_blocks=torch.from_numpy(tasks.split_blocks).to(device),
            num_slots=tasks.num_slots,
        )


@dataclass(frozen=True, eq=False)
class DeviceMask:
    """Of B sequences, Q queries and K keys of each."""

    lo: Tensor
    """[B, Q, 2], int32: where the intervals of positions begin that a query sees."""
    hi: Tensor
    """[B, Q, 2], int32: where they end."""
    classes_seen: Tensor
    """[B, Q], int64: bit b says whether the query sees keys of class b."""
    position: Tensor
    """[B, K], int32: of the keys, in the whole sequence."""
    key_class: Tensor
    """[B, K], int32."""
    block: int
    query_tasks: DeviceTasks
    """Blocks of queries, over the blocks of keys that they see."""
    key_tasks: DeviceTasks
    """Blocks of keys, over the blocks of queries that see them."""
    tile_maps: tuple[TileMap, ...]
    """Of each sequence, rows are blocks of queries."""

    def dense(self) -> Tensor:
        """[B, Q, K], bool: for the oracle and short sequences."""
        position = self.position[:, None, :, None]
        inside = ((self.lo[:, :, None] <= position) & (position < self.hi[:, :, None])).any(-1)
        return inside & ((self.classes_seen[:, :, None] >> self.key_class[:, None, :].long()) & 1).bool()


def device_mask(
    masks: Sequence[IntervalMask],
    *,
    query_blocks: Sequence[int] | NDArray | None = None,
    key_blocks: Sequence[int] | NDArray | None = None,
    device: torch.device | str = "cpu",
    block: int = BLOCK,
    max_tiles: int | None = None,
) -> DeviceMask:
    """The masks of a batch of sequences of equal length.

    Args:
        query_blocks, key_blocks: the blocks of tokens that are held here, in their order; None: all, in order. If they
            are given, the length must be a multiple of `block` (`IntervalMask.padded`).
        max_tiles: what more tiles a block has than this is shared out over several programs.
    """
    lengths = {mask.num_tokens for mask in masks}
    if len(lengths) != 1:
        raise ValueError(f"sequences of one batch must have one length, not {sorted(lengths)}")
    length = lengths.pop()
    if length % block and not (query_blocks is None and key_blocks is None):
        raise ValueError(f"{length} tokens are not whole blocks of {block}; pad the masks")
    blocks = np.arange(-(-length // block), dtype=np.int32)
    rows = blocks if query_blocks is None else np.asarray(query_blocks, np.int32)
    columns = blocks if key_blocks is None else np.asarray(key_blocks, np.int32)
    queries, keys = _tokens(rows, block, length), _tokens(columns, block, length)
    maps = [tile_map(mask.padded(len(blocks) * block), rows, columns, block) for mask in masks]

    def stack(arrays: Sequence[NDArray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.stack(arrays)).to(device, dtype)

    return DeviceMask(
        lo=stack([mask.lo[queries] for mask in masks], torch.int32),
        hi=stack([mask.hi[queries] for mask in masks], torch.int32),
        classes_seen=stack(
            [mask.visible_classes.view(np.int64)[mask.token_class[queries]] for mask in masks], torch.int64
        ),
        position=stack([keys] * len(masks), torch.int32),
        key_class=stack([mask.token_class[keys] for mask in masks], torch.int32),
        block=block,
        query_tasks=DeviceTasks.on(torch.device(device), make_tasks(maps, max_tiles)),
        key_tasks=DeviceTasks.on(
            torch.device(device), make_tasks([m.transposed(len(columns)) for m in maps], max_tiles)
        ),
        tile_maps=tuple(maps),
    )


def _tokens(blocks: NDArray[np.int32], block: int, length: int) -> NDArray[np.int64]:
    tokens = (blocks.astype(np.int64)[:, None] * block + np.arange(block)).reshape(-1)
    return tokens[tokens < length]
