"""Interval masks in the form that kernels read: for a batch, with the queries and keys of one rank, on its device.

Tokens keep their positions wherever they are computed, so intervals need no translation when blocks of tokens are
permuted over context-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.attention.masks.interval_mask import IntervalMask
from motet.attention.masks.tile_counts import EMPTY, FULL, block_map
from motet.devices import to_device

# Tasks: a block of queries is computed by as many programs as its non-empty tiles need, each with about equally many
# tiles (thesis 3.3.2.2). Compute units take tasks in order, so the longest come first.

Int32 = NDArray[np.int32]


MOST_HEAD_DIM = 256
"""Widest head that the GPU kernels compute."""


@dataclass(frozen=True, eq=False)
class TileMap:
    """The non-empty tiles of rows of blocks, row after row."""

    offsets: Int32
    """[rows + 1]: where each row's tiles begin."""
    blocks: Int32
    """[tiles]: place of the tile's other block, ascending within a row."""
    is_full: NDArray[np.bool_]
    """[tiles]: whether all pairs are allowed."""

    def transposed(self, num_columns: int) -> "TileMap":
        """The same tiles, with the other side's blocks as rows."""
        rows = np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int32), np.diff(self.offsets))
        order = np.argsort(self.blocks, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(self.blocks, minlength=num_columns))])
        return TileMap(offsets.astype(np.int32), rows[order], self.is_full[order])


def tile_map(mask: IntervalMask, query_blocks: Int32, key_blocks: Int32, block: int) -> TileMap:
    """Returns the map of the held blocks of queries and keys, in their order; `mask` has whole blocks."""
    kinds = block_map(mask, query_blocks, block)[:, key_blocks]
    rows, columns = np.nonzero(kinds != EMPTY)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(kinds)))])
    return TileMap(offsets.astype(np.int32), columns.astype(np.int32), kinds[rows, columns] == FULL)


@dataclass(frozen=True, eq=False)
class Tasks:
    """The tasks of one kernel over a batch of tile maps."""

    tasks: Int32
    """[tasks, 6]: batch row, block, first tile, first partial tile, end of the tiles, slot for the partial result (-1:
    the block is not shared out). Tiles are places in `tiles`, full ones before partial ones."""
    tiles: Int32
    """[tiles of the whole batch]: the other side's block of each tile."""
    split_blocks: Int32
    """[blocks that are distributed, 4]: batch row, block, first slot, end of the slots."""

    @property
    def num_slots(self) -> int:
        return int(self.split_blocks[-1, 3]) if len(self.split_blocks) else 0


def make_tasks(maps: Sequence[TileMap], max_tiles: int | None = None) -> Tasks:
    """Tasks for the rows of the maps, one map for each row of the batch. `max_tiles`: of one task; None: any number."""
    if max_tiles is not None and max_tiles < 1:
        raise ValueError(f"max_tiles must be at least 1, not {max_tiles}")
    tasks: list[tuple[int, int, int, int, int, int]] = []
    split_blocks: list[tuple[int, int, int, int]] = []
    tiles: list[Int32] = []
    num_before = num_slots = 0
    for batch, tile_map in enumerate(maps):
        counts = np.diff(tile_map.offsets)
        rows = np.repeat(np.arange(len(counts)), counts)
        full_first = np.lexsort((tile_map.blocks, ~tile_map.is_full, rows))
        tiles.append(tile_map.blocks[full_first])
        num_full = np.bincount(rows[tile_map.is_full], minlength=len(counts))
        for block, (first, count, full) in enumerate(zip(tile_map.offsets, counts, num_full, strict=False)):
            begin = num_before + int(first)
            partial = begin + int(full)
            parts = 1 if max_tiles is None else max(1, -(-int(count) // max_tiles))
            cuts = [begin + int(count) * part // parts for part in range(parts + 1)]
            if parts > 1:
                split_blocks.append((batch, block, num_slots, num_slots + parts))
            for start, stop in pairwise(cuts):
                slot = -1 if parts == 1 else num_slots
                num_slots += slot >= 0
                tasks.append((batch, block, start, min(max(partial, start), stop), stop, slot))
        num_before += len(tile_map.blocks)
    tasks.sort(key=lambda task: task[2] - task[4])
    return Tasks(
        np.array(tasks, np.int32).reshape(-1, 6),
        np.concatenate([*tiles, np.zeros(0, np.int32)]).astype(np.int32),
        np.array(split_blocks, np.int32).reshape(-1, 4),
    )


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
            tasks=to_device(torch.from_numpy(tasks.tasks), device),
            tiles=to_device(torch.from_numpy(tasks.tiles), device),
            split_blocks=to_device(torch.from_numpy(tasks.split_blocks), device),
            num_slots=tasks.num_slots,
        )


@dataclass(frozen=True, eq=False)
class DeviceMask:
    """Mask of B sequences with Q queries and K keys each."""

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
    num_classes: int
    """0: each query sees all classes."""
    block: int
    query_tasks: DeviceTasks
    """Blocks of queries, over the blocks of keys that they see."""
    key_tasks: DeviceTasks
    """Blocks of keys, over the blocks of queries that see them."""
    tile_maps: tuple[TileMap, ...]
    """Tiles of each sequence; rows are blocks of queries."""

    def dense(self) -> Tensor:
        """[B, Q, K], bool: for the oracle and short sequences."""
        position, lo, hi = self.position[:, None], self.lo[..., None], self.hi[..., None]
        inside = (lo[:, :, 0] <= position) & (position < hi[:, :, 0])
        inside |= (lo[:, :, 1] <= position) & (position < hi[:, :, 1])
        if self.num_classes:
            bits = torch.arange(self.num_classes, device=lo.device)
            sees_class = ((self.classes_seen[..., None] >> bits) & 1).bool()
            inside &= sees_class.gather(2, self.key_class.long()[:, None].expand(-1, lo.shape[1], -1))
        return inside


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
        max_tiles: a block's tiles beyond this number are distributed over several programs.
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
        return to_device(torch.from_numpy(np.stack(arrays)).to(dtype), torch.device(device))

    sees_all = all(mask.class_mask.all() for mask in masks)
    return DeviceMask(
        lo=stack([mask.lo[queries] for mask in masks], torch.int32),
        hi=stack([mask.hi[queries] for mask in masks], torch.int32),
        classes_seen=stack(
            [mask.visible_classes.view(np.int64)[mask.token_class[queries]] for mask in masks], torch.int64
        ),
        position=stack([keys] * len(masks), torch.int32),
        key_class=stack([mask.token_class[keys] for mask in masks], torch.int32),
        num_classes=0 if sees_all else max(len(mask.class_mask) for mask in masks),
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
