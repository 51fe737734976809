"""Time of the attention of a distributed sequence, inside a device and across devices.

*Inside a device* (thesis 3.3.2.2) a launch computes some heads. Its tasks, a row of tiles of one head each, start in
order on whichever of the device's units is free, and the next launch waits for the last of them. So a row that is much
longer than the others leaves units idle however even the devices' sums are. Rows may be split into pieces of at most so
many tiles; each piece then costs something for writing down and merging a partial result.

*Across devices* keys and values are gathered a few heads at a time while those before are computed (Cornstarch 5.3), or
they go round in a ring and every round waits for its slowest device.

Limits: forward only; tiles take the same time on every unit; no memory bandwidth, no caches.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.attention.masks.distribution import Distribution, TileCost
from motet.attention.masks.interval_mask import IntervalMask
from motet.attention.masks.tile_counts import FULL, PARTIAL, Int64, TileCounts, block_map

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """An attention kernel on one kind of device."""

    num_units: int
    """Tasks that run at the same time."""
    cost: TileCost
    """Seconds of a tile and of a row on one unit."""
    heads_per_launch: int = 1
    tiles_per_piece: int | None = None
    """Rows with more tiles are split into equal pieces; None: they are not."""
    piece_s: float = 0.0
    """Writing and merging the partial result of a piece of a split row."""

    def tasks(self, full: Int64, partial: Int64) -> Float64:
        """Seconds of every task of one head of rows with so many tiles; if rows are split, the longest first."""
        rows = self.cost.of_rows(full, partial)
        if self.tiles_per_piece is None:
            return rows
        pieces = np.maximum(1, -(-(full + partial) // self.tiles_per_piece))
        seconds = rows / pieces + np.where(pieces > 1, self.piece_s, 0.0)
        return np.sort(np.repeat(seconds, pieces))[::-1]

    def device_s(self, full: Int64, partial: Int64, num_heads: int) -> float:
        """Seconds of all heads of rows with so many tiles on one device."""
        return self._launches_s(self.tasks(full, partial).tolist(), num_heads)

    def ring_round_s(self, full: Int64, partial: Int64, num_heads: int) -> float:
        """The same for a round of a ring: rows without tiles are left out, all others leave a partial result."""
        rows = (full + partial) > 0
        tasks = self.cost.of_rows(full[rows], partial[rows]) + self.piece_s
        return self._launches_s(np.sort(tasks)[::-1].tolist(), num_heads)

    def _launches_s(self, tasks: list[float], num_heads: int) -> float:
        launches, rest = divmod(num_heads, self.heads_per_launch)
        whole = launches * makespan_s(tasks * self.heads_per_launch, self.num_units) if launches else 0.0
        return whole + makespan_s(tasks * rest, self.num_units)


def devices_s(counts: TileCounts, shares: Distribution, kernel: AttentionKernel, num_heads: int) -> Float64:
    """[G]: seconds that each rank computes."""
    owned = (shares.blocks_of(rank) for rank in range(shares.num_ranks))
    return np.array([kernel.device_s(counts.full[rows], counts.partial[rows], num_heads) for rows in owned])


def makespan_s(tasks: Iterable[float], num_units: int) -> float:
    """End time of the last task, if each starts in its turn as soon as a unit is free."""
    free = [0.0] * num_units
    for task in tasks:
        heapq.heapreplace(free, free[0] + task)
    return max(free)


def gathered_s(compute_s: float, gather_s: float, num_steps: int) -> float:
    """Keys and values of all ranks, gathered in steps of some heads; each step but the first beside the computation of
    the step before."""
    compute, gather = compute_s / num_steps, gather_s / num_steps
    return gather + (num_steps - 1) * max(compute, gather) + compute


def ring_s(rounds_s: Float64, send_s: float) -> float:
    """`rounds_s` [G, G]: seconds of each rank's queries (row) with each rank's keys (column).
    `send_s`: seconds to send one rank's keys and values on.

    In round r rank i has the keys of rank i - r, computes with them and passes them on."""
    num_ranks = len(rounds_s)
    ranks = np.arange(num_ranks)
    rounds = [float(rounds_s[ranks, (ranks - r) % num_ranks].max()) for r in range(num_ranks)]
    return sum(max(compute, send_s) for compute in rounds[:-1]) + rounds[-1]


def ring_rounds_s(mask: IntervalMask, shares: Distribution, kernel: AttentionKernel, num_heads: int) -> Float64:
    """[G, G]: seconds that each rank (row) computes with each rank's keys (column), as `ring_s` takes them.

    Writes the block map out: for sequences of up to some 100,000 tokens."""
    tiles = block_map(mask, block_size=shares.block_size)
    owner = (shares.rank_of_block[:, None] == np.arange(shares.num_ranks)).astype(np.float32)
    full, partial = (((tiles == kind) @ owner).astype(np.int64) for kind in (FULL, PARTIAL))
    owned = [shares.blocks_of(rank) for rank in range(shares.num_ranks)]
    return np.array(
        [
            [
                kernel.ring_round_s(full[rows, other], partial[rows, other], num_heads)
                for other in range(shares.num_ranks)
            ]
            for rows in owned
        ]
    )
