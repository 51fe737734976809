"""Exact contiguous partition of layers into stages that minimises the slowest stage (thesis 3.4.1, eq. 3.5).

D(i, s) = min over j of max(D(j, s - 1), P_i - P_j), where P are prefix sums. D(j, s - 1) rises with j and P_i - P_j
falls, so the best j is where they cross. One sorted search finds it for all i: O(S N log N) in total.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import inf

import numpy as np

from motet.errors import UserError
from motet.plan import LayerRange


def partition(costs: Sequence[float], num_stages: int) -> tuple[LayerRange, ...]:
    """Cuts layers of these costs (at least 0) into `num_stages` non-empty runs.

    Of equally good cuts, takes the one with the smallest last boundary (and cuts the layers before it in the same way):
    early stages, which hold the activations of more microbatches, get fewer layers.
    Raises `UserError` if there are fewer layers than stages.
    """
    num_layers = len(costs)
    boundaries = _table(costs, num_stages).boundaries
    cuts = [num_layers]
    for s in range(num_stages, 1, -1):
        cuts.append(int(boundaries[s][cuts[-1]]))
    cuts.append(0)
    return tuple(pairwise(reversed(cuts)))


def bottlenecks(costs: Sequence[float], max_stages: int) -> np.ndarray:
    """[num_stages - 1]: cost of the slowest stage in the best cut into 1, 2, ... `max_stages` stages."""
    return np.array(_table(costs, max_stages).slowest[1 : max_stages + 1])


def _table(costs: Sequence[float], num_stages: int) -> "_Table":
    if not 1 <= num_stages <= len(costs):
        raise UserError(f"pp: is {num_stages}, but there are {len(costs)} layers; give 1 to {len(costs)}")
    table = _remembered(tuple(costs))
    while len(table.slowest) <= num_stages:
        table.add_stage()
    return table


class _Table:
    """The dynamic program by number of stages s, extended on demand: searches ask for many numbers of stages."""

    def __init__(self, costs: Sequence[float]) -> None:
        self.prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=float))])
        assert (np.diff(self.prefix) >= 0).all(), "costs must not be negative"
        self.best = self.prefix.copy()
        """D(i, s) for the last s."""
        self.slowest = [inf, float(self.best[-1])]
        """D(number of layers, s)."""
        nothing = np.zeros(0, dtype=int)
        self.boundaries = [nothing, nothing]
        """From s = 2 on, for each i, where the last stage of layers 0 to i begins."""

    def add_stage(self) -> None:
        prefix, best, s, num_layers = self.prefix, self.best, len(self.slowest), len(self.prefix) - 1
        ends = np.arange(s, num_layers + 1)
        starts = np.arange(s - 1, num_layers)
        # The first start where the stages before it cost at least as much as the stage after it.
        crossing = s - 1 + np.searchsorted(best[starts] + prefix[starts], prefix[ends])
        candidates = np.stack([crossing - 1, crossing])
        candidates = np.clip(candidates, s - 1, ends - 1)
        bottlenecks = np.maximum(best[candidates], prefix[ends] - prefix[candidates])
        bottleneck = bottlenecks.min(axis=0)
        # Left of the crossing the last stage decides: starts are equally good only across layers without cost.
        chosen = np.where(bottlenecks[0] <= bottlenecks[1], candidates[0], candidates[1])
        chosen = np.minimum(chosen, np.maximum(s - 1, np.searchsorted(prefix, prefix[ends] - bottleneck)))
        self.best = np.concatenate([np.full(s, np.inf), bottleneck])
        self.boundaries.append(np.concatenate([np.zeros(s, dtype=int), chosen]))
        self.slowest.append(float(self.best[-1]))


_remembered = lru_cache(maxsize=64)(_Table)


def stage_costs(costs: Sequence[float], stages: Sequence[LayerRange]) -> list[float]:
    return [sum(costs[first:last]) for first, last in stages]


def fewest_stages(costs: Sequence[float], limit: float) -> int:
    """The smallest number of stages that each cost at most `limit`; a layer that costs more is a stage by itself."""
    num_stages, filled = 1, 0.0
    for i, cost in enumerate(costs):
        if i and filled + cost > limit * (1 + 1e-12):
            num_stages, filled = num_stages + 1, 0.0
        filled += cost
    return num_stages


def even_partition(num_layers: int, num_stages: int) -> tuple[LayerRange, ...]:
    """Stages whose numbers of layers differ by at most one, the larger ones first."""
    return partition_by_sizes(
        num_layers, [num_layers // num_stages + (s < num_layers % num_stages) for s in range(num_stages)]
    )


def partition_by_sizes(num_layers: int, layers_per_stage: Sequence[int]) -> tuple[LayerRange, ...]:
    """Raises `UserError` if a stage would be empty or the sizes do not add up to the layers."""
    if sum(layers_per_stage) != num_layers or min(layers_per_stage) < 1:
        raise UserError(
            f"layers_per_stage: {list(layers_per_stage)} adds up to {sum(layers_per_stage)}; "
            f"give numbers of at least 1 that add up to {num_layers}"
        )
    bounds = [sum(layers_per_stage[:s]) for s in range(len(layers_per_stage) + 1)]
    return tuple(pairwise(bounds))
