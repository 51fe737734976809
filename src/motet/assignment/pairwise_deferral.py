"""Which microbatches are paired, and which samples move within a pair: Entrain, thesis section 4.5.2.

Three steps, all on numbers: for each pair of an overloaded and an underloaded microbatch the subset of the former
whose work is nearest to half their difference; the larger of the two sums after the move, (4.3); a matching whose
largest such sum is as small as can be.

Deviations. Subsets of up to `MAX_EXACT` samples are tried all at once instead of on a grid, so that the nearest sum is
exact; larger microbatches go through the thesis' table of rounded sums, whose error is at most a step per sample.
The subset may be empty, hence (4.3) never exceeds the overloaded microbatch's own work, every microbatch that could
stay alone can also be paired, and T* is that of a perfect matching. Among the matchings that keep T*, which the thesis
picks arbitrarily, this takes the one with the least sum of squares: the most even.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import linear_sum_assignment

from motet.ragged_arrays import Bools, Floats, Ints

MAX_EXACT = 10
"""Samples in a microbatch all of whose subsets are tried."""
NUM_GRID_STEPS = 2048
"""That the sum of a larger microbatch is divided into."""


def nearest_subsets(items: Floats, targets: Floats) -> tuple[Bools, Floats]:
    """For each target the subset (perhaps empty) whose sum is nearest to it, as [target, item], and that sum; ties go
    to the smaller sum. Exact for up to `MAX_EXACT` items."""
    masks, sums = _all_sums(items) if len(items) <= MAX_EXACT else _rounded_sums(items)
    by_sum = np.argsort(sums, kind="stable")
    sums = sums[by_sum]
    above = np.minimum(np.searchsorted(sums, targets), len(sums) - 1)
    below = np.maximum(above - 1, 0)
    nearest = np.where(targets - sums[below] <= sums[above] - targets, below, above)
    return masks[by_sum[nearest]], sums[nearest]


@cache
def _all_masks(num_items: int) -> tuple[Bools, Floats]:
    """The same as truth values and as numbers."""
    masks = (np.arange(2**num_items)[:, None] >> np.arange(num_items)) & 1
    return masks.astype(bool), masks.astype(np.float64)


def _all_sums(items: Floats) -> tuple[Bools, Floats]:
    masks, numbers = _all_masks(len(items))
    return masks, numbers @ items


def _rounded_sums(items: Floats) -> tuple[Bools, Floats]:
    """One subset for every sum that can be reached on the grid, with its true sum."""
    total = float(items.sum())
    steps = np.rint(items * (NUM_GRID_STEPS / total)).astype(np.int64) if total else np.zeros(len(items), np.int64)
    size = int(steps.sum()) + 1
    last = np.full(size, -1)
    """For each sum, the item that reached it first; its other items are those of the sum without it."""
    last[0] = len(items)
    for item, step in enumerate(steps.tolist()):
        reached = last[: size - step] != -1
        new = np.flatnonzero(reached & (last[step:] == -1)) + step
        last[new] = item
    reachable = np.flatnonzero(last != -1)
    masks = np.zeros((len(reachable), len(items)), dtype=bool)
    left = reachable.copy()
    while (rows := np.flatnonzero(left)).size:
        taken = last[left[rows]]
        masks[rows, taken] = True
        left[rows] -= steps[taken]
    return masks, masks @ items


@dataclass(frozen=True, eq=False)
class Matching:
    partner: Ints
    """For each overloaded microbatch, its underloaded one."""
    bottleneck: float
    """T*: the largest work of any microbatch afterwards."""


def bottleneck_matching(after: Floats, alone: Floats, squares: Floats) -> Matching:
    """`after` [i, j]: (4.3) of the pair. `alone` [i]: i's work without deferral; at or below T* it needs no partner.
    `squares` [i, j]: what the pair adds to the sum of squares; it decides between matchings of the same T*.

    Raises `ValueError` if the numbers of overloaded and underloaded microbatches differ."""
    if after.shape != (len(alone), len(alone)):
        raise ValueError(f"{len(alone)} overloaded microbatches, but pairs of {after.shape}; give equal numbers")
    if not len(alone):
        return Matching(np.zeros(0, dtype=np.int64), 0.0)
    candidates = np.unique(np.concatenate([after.ravel(), alone]))
    # Every one of them needs a partner within T, or is within T by itself.
    least = np.minimum(after.min(axis=1), alone).max()
    low, high = int(np.searchsorted(candidates, least)), len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _matches(after, alone, float(candidates[middle])):
            high = middle
        else:
            low = middle + 1
    bottleneck = float(candidates[low])
    forbidden = ~_allowed(after, alone, bottleneck)
    # Dearer than all the others together, so that it is never taken where it can be helped.
    cost = np.where(forbidden, 1.0 + squares.max() * len(alone) * 2, squares)
    _, partner = linear_sum_assignment(cost)
    return Matching(partner.astype(np.int64), bottleneck)


def _allowed(after: Floats, alone: Floats, limit: float) -> Bools:
    return (after <= limit) | (alone <= limit)[:, None]


def _matches(after: Floats, alone: Floats, limit: float) -> bool:
    forbidden = ~_allowed(after, alone, limit)
    rows, columns = linear_sum_assignment(forbidden)
    return not forbidden[rows, columns].any()


@dataclass(frozen=True, eq=False)
class Pair:
    """Indices into the microbatches that were given."""

    overloaded: int
    underloaded: int
    deferred: tuple[int, ...]
    """Places in the overloaded microbatch of the samples that move to the underloaded one."""


@dataclass(frozen=True, eq=False)
class Pairing:
    pairs: tuple[Pair, ...]
    unpaired: int | None
    """Of an odd number of microbatches, the one in the middle, which is the nearest to balanced."""
    bottleneck: float


def pair_and_defer(works: Sequence[Floats]) -> Pairing:
    """`works`: for each microbatch, its samples' work."""
    totals = np.array([work.sum() for work in works])
    order = np.argsort(-totals, kind="stable")
    half = len(works) // 2
    over, under = order[:half], order[len(works) - half :]
    subsets = [nearest_subsets(works[i], (totals[i] - totals[under]) / 2) for i in over.tolist()]
    moved = np.array([sums for _, sums in subsets]).reshape(half, half)
    left, grown = totals[over][:, None] - moved, totals[under] + moved
    matching = bottleneck_matching(np.maximum(left, grown), totals[over], left**2 + grown**2)
    pairs = tuple(
        Pair(int(over[i]), int(under[j]), tuple(np.flatnonzero(subsets[i][0][j]).tolist()))
        for i, j in enumerate(matching.partner.tolist())
    )
    unpaired = int(order[half]) if len(works) % 2 else None
    alone = totals[unpaired] if unpaired is not None else 0.0
    return Pairing(pairs, unpaired, max(matching.bottleneck, float(alone)))
