"""Amount of attention work: pairs of each token, full and partial tiles of each block of queries, and the block map.

The sequence is cut into blocks of 128 tokens. A tile is a block of queries by a block of keys: *full* if all its pairs
are seen (the last block may be short: all pairs that exist), *empty* if none is, *partial* otherwise. The attention
kernel skips empty tiles and needs no mask in full ones. (Thesis 3.3.2: a block's workload is its number of tiles;
Cornstarch 4.3.2: a row's workload is the sum of its row of the mask.)

Nothing here takes T x T time or memory. Intervals become ranges of key blocks, equal ones of neighbouring queries are
taken once, and a sweep over their ends gives disjoint ranges. Adding those up gives the workloads; writing them out
gives the map, one byte a tile, of those rows that are asked for. Where classes matter, a set of classes is a 64-bit
word, and how many keys of a set stand before a token is a prefix sum.

Limits: the number of distinct sets that meet in a sequence should be small, each costs a pass over it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.attention.masks.interval_mask import Bool, Int32, IntervalMask, UInt64

BLOCK_SIZE = 128
MOST_BLOCK_ELEMENTS = 128 * 128
"""Largest number of tokens x head dimension of a block: more would not fit into a GPU's shared memory
(`benchmarks/attention_kernel_resources.py`)."""
EMPTY, PARTIAL, FULL = 0, 1, 2
Int64 = NDArray[np.int64]
Integers = NDArray[np.integer]

_EVERY_CLASS = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_ROWS_AT_A_TIME = 256
"""Largest number of tiles of a block map; each needs 8 bytes while it is written."""
_FEW = 16
"""Keys that are fewer than the tokens by this factor are searched for, instead of counting through all tokens."""


def most_block_tokens(head_dim: int) -> int:
    """Most tokens of a block for kernels on a GPU, which hold heads in powers of two."""
    return MOST_BLOCK_ELEMENTS // (1 << (head_dim - 1).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class TileCounts:
    """Numbers of full and partial key blocks and of pairs for each block of queries [N]."""

    full: Int64
    partial: Int64
    pairs: Int64
    num_tokens: int
    block_size: int

    @property
    def empty(self) -> Int64:
        return len(self.full) - self.full - self.partial


def num_blocks(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    return -(-num_tokens // block_size)


def row_pairs(mask: IntervalMask) -> Int64:
    """[T]: how many keys each token sees."""
    pairs = np.zeros(mask.num_tokens, np.int64)
    limited = [(_keys_before(mask, keys), rows) for keys, rows in _limited(mask, _visible(mask))]
    for lo, hi in _intervals(mask):
        sizes = hi - lo
        for before, rows in limited:
            sizes[rows] = before(hi[rows]) - before(lo[rows])
        pairs += sizes
    return pairs


def tile_counts(mask: IntervalMask, block_size: int = BLOCK_SIZE) -> TileCounts:
    """The workload of every block of queries."""
    queries = _queries(mask, None, block_size)
    if not mask.num_tokens:
        nothing = np.zeros(0, np.int64)
        return TileCounts(nothing, nothing, nothing, 0, block_size)
    present = _classes_present(mask, block_size)
    touched = _lengths(_touched(queries), queries, lambda keys: _has_some(present, keys))
    full = _lengths(_covered(queries), queries, lambda keys: _has_only(present, keys))
    pairs = np.add.reduceat(row_pairs(mask), queries.row_start[:-1])
    return TileCounts(full, touched - full, pairs, mask.num_tokens, block_size)


def block_map(
    mask: IntervalMask, query_blocks: Integers | None = None, block_size: int = BLOCK_SIZE
) -> NDArray[np.uint8]:
    """[number of query blocks, N] of `EMPTY`, `PARTIAL`, `FULL`: all rows, or those asked for, in their order."""
    columns = num_blocks(mask.num_tokens, block_size)
    rows = np.arange(columns) if query_blocks is None else query_blocks
    tiles = np.zeros((len(rows), columns), np.uint8)
    present = _classes_present(mask, block_size)
    for first in range(0, len(rows), _ROWS_AT_A_TIME):
        queries = _queries(mask, rows[first : first + _ROWS_AT_A_TIME], block_size)
        part = tiles[first : first + _ROWS_AT_A_TIME]
        part[_has_some(present, _written_out(_touched(queries), part.shape))] = PARTIAL
        part[_has_only(present, _written_out(_covered(queries), part.shape))] = FULL
    return tiles


def blocks_seen(mask: IntervalMask, group_of_block: Int64, num_groups: int, block_size: int = BLOCK_SIZE) -> Bool:
    """[num_groups, N]: which blocks of keys some query of each group sees; `group_of_block` [N] of queries."""
    columns = num_blocks(mask.num_tokens, block_size)
    seen = np.zeros((num_groups, columns), bool)
    present = _classes_present(mask, block_size)
    touched = _touched(_queries(mask, None, block_size))
    group = group_of_block[touched.row]
    for keys in np.unique(touched.keys):
        chosen = touched.keys == keys
        ends = np.zeros((num_groups, columns + 1), np.int64)
        np.add.at(ends, (group[chosen], touched.start[chosen]), 1)
        np.add.at(ends, (group[chosen], touched.stop[chosen]), -1)
        seen |= (np.cumsum(ends, axis=1)[:, :-1] > 0) & _has_some(present, keys)
    return seen


# Sets of classes ------------------------------------------------------------------------------------------------------


def _visible(mask: IntervalMask) -> UInt64 | None:
    """[T]: the classes that each token may see; None if every token may see all."""
    return None if mask.class_mask.all() else _sets(mask)[mask.token_class]


def _sets(mask: IntervalMask) -> UInt64:
    """[C]: the classes that each class may see."""
    return np.where(mask.class_mask.all(axis=1), _EVERY_CLASS, mask.visible_classes)


def _limited(mask: IntervalMask, visible: UInt64 | None) -> Iterator[tuple[np.uint64, Int64]]:
    """The sets of classes that some of the queries are limited to, and which queries these are."""
    if visible is not None:
        for keys in np.unique(_sets(mask)):
            if keys != _EVERY_CLASS:
                yield keys, np.flatnonzero(visible == keys)


def _classes_present(mask: IntervalMask, block_size: int) -> UInt64:
    """[N]: the classes of the tokens of each block."""
    if mask.class_mask.all():  # Which ones does not matter.
        return np.ones(num_blocks(mask.num_tokens, block_size), np.uint64)
    bits = _bit(np.arange(len(mask.class_mask)))[mask.token_class]
    return np.bitwise_or.reduceat(bits, np.arange(0, len(bits), block_size)) if len(bits) else bits


def _bit(token_class: Integers) -> UInt64:
    return np.left_shift(np.uint64(1), token_class.astype(np.uint64))


def _has_some(present: UInt64, keys: UInt64 | np.uint64) -> Bool:
    return (present & keys) != 0


def _has_only(present: UInt64, keys: UInt64 | np.uint64) -> Bool:
    return (present & ~keys) == 0


def _keys_before(mask: IntervalMask, keys: np.uint64) -> Callable[[Int32], Integers]:
    """Number of tokens of the classes in `keys` before each of some places, 0 to T."""
    counted = ((_bit(np.arange(len(mask.class_mask))) & keys) != 0)[mask.token_class]
    positions = np.flatnonzero(counted)
    if len(positions) * _FEW < mask.num_tokens:
        return lambda places: np.searchsorted(positions, places)
    before = np.zeros(mask.num_tokens + 1, np.int32)
    np.cumsum(counted, out=before[1:])
    return lambda places: before[places]


# Queries, and the ranges of key blocks that they see ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Queries:
    """n queries whose tiles are wanted, in rows of one block each."""

    mask: IntervalMask
    lo: Int32
    hi: Int32
    visible: UInt64 | None
    row: Int32
    """[n]."""
    row_start: Int64
    """[rows + 1]: where in these arrays each row begins."""
    block_size: int

    @property
    def num_blocks(self) -> int:
        return num_blocks(self.mask.num_tokens, self.block_size)


@dataclass(frozen=True, slots=True, eq=False)
class _Ranges:
    """Key blocks [start, stop) in a row, of which only keys of the classes in `keys` count."""

    row: Int64
    start: Int64
    stop: Int64
    keys: UInt64
    weight: Int64
    """Number of queries that the row stands for."""


def _queries(mask: IntervalMask, blocks: Integers | None, block_size: int) -> _Queries:
    lo, hi, visible, length = mask.lo, mask.hi, _visible(mask), mask.num_tokens
    if blocks is None:
        blocks = np.arange(num_blocks(length, block_size))
    else:
        places = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
        places = places[places < length]
        lo, hi, visible = lo[places], hi[places], None if visible is None else visible[places]
    sizes = np.minimum(block_size, length - blocks * block_size)
    row = np.repeat(np.arange(len(blocks), dtype=np.int32), sizes)
    return _Queries(mask, lo, hi, visible, row, np.concatenate([[0], np.cumsum(sizes)]), block_size)


def _touched(queries: _Queries) -> _Ranges:
    """Disjoint ranges, such that a tile is not empty iff it holds a key of its range's classes."""
    parts: list[_Ranges] = []
    size = queries.block_size
    everything = slice(None) if queries.visible is None else np.flatnonzero(queries.visible == _EVERY_CLASS)
    for lo, hi in _intervals(queries):
        parts.append(_merged(queries.row[everything], lo[everything] // size, -(-hi[everything] // size)))
        for keys, rows in _limited(queries.mask, queries.visible):
            rows = rows[lo[rows] < hi[rows]]
            row, begin, end = queries.row[rows], lo[rows], hi[rows]
            first, last = begin // size, (end - 1) // size
            parts.append(_merged(row, first + 1, last, keys))
            before = _keys_before(queries.mask, keys)  # In the tiles at both ends, only some keys lie in the interval.
            for tile in (first, last):
                inside = before(np.minimum(end, (tile + 1) * size)) - before(np.maximum(begin, tile * size))
                parts.append(_merged(row, tile, tile + (inside > 0)))
    return _union(_joined(parts), queries.num_blocks)


def _covered(queries: _Queries) -> _Ranges:
    """Disjoint ranges that lie in an interval of every query of the row, with the classes that all of them may see."""
    size, length = queries.block_size, queries.mask.num_tokens
    parts = [
        _merged(queries.row, -(-lo // size), np.where(hi == length, queries.num_blocks, hi // size))
        for lo, hi in _intervals(queries)
    ]
    if queries.visible is None or not len(queries.row):
        seen_by_all = np.full(len(queries.row_start) - 1, _EVERY_CLASS)
    else:
        seen_by_all = np.bitwise_and.reduceat(queries.visible, queries.row_start[:-1])
    return _intersection(_joined(parts), queries.num_blocks, np.diff(queries.row_start), seen_by_all)


def _intervals(rows: "IntervalMask | _Queries") -> Iterator[tuple[Int32, Int32]]:
    """The first interval of each row, and the second if any row has one."""
    yield rows.lo[:, 0], rows.hi[:, 0]
    if rows.hi[:, 1].any():
        yield rows.lo[:, 1], rows.hi[:, 1]


def _merged(row: Integers, start: Integers, stop: Integers, keys: np.uint64 = _EVERY_CLASS) -> _Ranges:
    """Ranges of queries one after the other; those of equal neighbours become one."""
    changes = np.ones(len(row), bool)
    changes[1:] = (row[1:] != row[:-1]) | (start[1:] != start[:-1]) | (stop[1:] != stop[:-1])
    first = np.flatnonzero(changes)
    weight = np.diff(first, append=len(row))
    filled = start[first] < stop[first]
    first, weight = first[filled], weight[filled]
    row, start, stop = (column[first].astype(np.int64) for column in (row, start, stop))
    return _Ranges(row, start, stop, np.full(len(first), keys), weight)


def _joined(parts: list[_Ranges]) -> _Ranges:
    def column(name: str) -> NDArray:
        return np.concatenate([getattr(part, name) for part in parts])

    return _Ranges(column("row"), column("start"), column("stop"), column("keys"), column("weight"))


# Disjoint ranges ------------------------------------------------------------------------------------------------------


def _union(ranges: _Ranges, columns: int) -> _Ranges:
    """Union of ranges; classes of overlapping ranges add up."""
    order, ends = _ends_in_order(ranges, columns)
    keys = np.zeros(len(ends), np.uint64)
    for word in np.unique(ranges.keys):
        one = (ranges.keys == word).astype(np.int64)
        covering = np.cumsum(np.concatenate([one, -one])[order])
        keys |= np.where(covering > 0, word, np.uint64(0))
    return _between(ends, keys, columns)


def _intersection(ranges: _Ranges, columns: int, num_queries: Int64, seen_by_all: UInt64) -> _Ranges:
    """Number of queries of a row whose ranges cover each place. No query may cover a place twice."""
    order, ends = _ends_in_order(ranges, columns)
    covering = np.cumsum(np.concatenate([ranges.weight, -ranges.weight])[order])
    row = ends // (columns + 1)
    return _between(ends, np.where(covering == num_queries[row], seen_by_all[row], np.uint64(0)), columns)


def _ends_in_order(ranges: _Ranges, columns: int) -> tuple[Int64, Int64]:
    line = ranges.row * (columns + 1)
    ends = np.concatenate([line + ranges.start, line + ranges.stop])
    order = np.argsort(ends, kind="stable")
    return order, ends[order]


def _between(ends: Int64, keys: UInt64, columns: int) -> _Ranges:
    """The ranges from each end to the next, with what holds after it; without those where nothing does."""
    first = np.flatnonzero((keys[:-1] != 0) & (ends[:-1] < ends[1:]))
    row = ends[first] // (columns + 1)
    start, stop = ends[first] - row * (columns + 1), ends[first + 1] - row * (columns + 1)
    return _Ranges(row, start, stop, keys[first], np.ones(len(first), np.int64))


def _lengths(ranges: _Ranges, queries: _Queries, holds: Callable[[np.uint64], Bool]) -> Int64:
    """[rows]: how many tiles of disjoint ranges fulfil what `holds` [N] says for their classes."""
    total = np.zeros(len(queries.row_start) - 1, np.int64)
    for keys in np.unique(ranges.keys):
        chosen = ranges.keys == keys
        before = np.concatenate([[0], np.cumsum(holds(keys))])
        np.add.at(total, ranges.row[chosen], before[ranges.stop[chosen]] - before[ranges.start[chosen]])
    return total


def _written_out(ranges: _Ranges, shape: tuple[int, int]) -> UInt64:
    """[rows, N]: the classes of the disjoint range that a tile lies in, 0 outside."""
    line = ranges.row * shape[1]
    ends = np.stack([line + ranges.start, line + ranges.stop], axis=1).ravel()
    values = np.stack([np.zeros(len(line), np.uint64), ranges.keys], axis=1).ravel()
    lengths = np.diff(ends, prepend=0, append=shape[0] * shape[1])
    return np.repeat(np.append(values, np.uint64(0)), lengths).reshape(shape)
