"""What each program of the kernels works off: blocks with long rows of tiles are shared out, longest tasks first.

A block is computed by as many tasks as its non-empty tiles need, each of about equally many (thesis 3.3.2.2); compute
units take tasks in order, so the longest come first and the short ones fill the end. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from motet.attention.masks.interval_mask import IntervalMask
from motet.attention.masks.tile_counts import EMPTY, FULL, block_map

Int32 = NDArray[np.int32]


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
    """Of the blocks of queries and keys that are held, in their order; `mask` of whole blocks."""
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
    """[blocks that are shared out, 4]: batch row, block, first slot, end of the slots."""

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
