"""The exact contiguous partition of layers into stages that minimises the slowest stage (thesis 3.4.1, eq. 3.5).

D(i, s) = min over j of max(D(j, s - 1), P_i - P_j), where P are prefix sums. D(j, s - 1) rises with j and P_i - P_j
falls, so the best j is where they cross, which one sorted search finds for all i at once: O(S N log N) in all.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from motet.errors import UserError
from motet.plan import LayerRange


def partition(costs: Sequence[float], num_stages: int) -> tuple[LayerRange, ...]:
    """Cuts layers of these costs (at least 0) into `num_stages` runs, none of them empty.

    Of equally good cuts, that with the smallest last boundary is taken (and what lies before it is cut best in turn):
    the early stages, which hold the activations of more microbatches, get fewer layers.
    Raises `ValueError` if there are fewer layers than stages.
    """
    num_layers = len(costs)
    _, boundaries = _solve(costs, num_stages)
    cuts = [num_layers]
    for boundary in reversed(boundaries):
        cuts.append(int(boundary[cuts[-1]]))
    cuts.append(0)
    return tuple(pairwise(reversed(cuts)))


def bottlenecks(costs: Sequence[float], max_stages: int) -> np.ndarray:
    """[num_stages - 1]: the slowest stage's cost in the best cut into 1, 2, ... `max_stages` stages, all at once."""
    return np.array(_solve(costs, max_stages)[0])


def _solve(costs: Sequence[float], num_stages: int) -> tuple[list[float], list[np.ndarray]]:
    """D(number of layers, s) for each s up to `num_stages`; for each s from 2, where the last stage of layers 0 to i
    begins."""
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise UserError(f"pp: is {num_stages}, but there are {num_layers} layers; give 1 to {num_layers}")
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=float))])
    assert (np.diff(prefix) >= 0).all(), "costs must not be negative"

    best = prefix.copy()  # D(i, 1)
    slowest, boundaries = [float(best[-1])], []
    for s in range(2, num_stages + 1):
        ends = np.arange(s, num_layers + 1)
        starts = np.arange(s - 1, num_layers)
        # The first start at which the stages before it cost as much as the stage after it.
        crossing = s - 1 + np.searchsorted(best[starts] + prefix[starts], prefix[ends])
        candidates = np.stack([crossing - 1, crossing])
        candidates = np.clip(candidates, s - 1, ends - 1)
        bottlenecks = np.maximum(best[candidates], prefix[ends] - prefix[candidates])
        bottleneck = bottlenecks.min(axis=0)
        # To the left of the crossing the last stage decides: equally good starts lie at the end of layers without cost.
        chosen = np.where(bottlenecks[0] <= bottlenecks[1], candidates[0], candidates[1])
        chosen = np.minimum(chosen, np.maximum(s - 1, np.searchsorted(prefix, prefix[ends] - bottleneck)))
        best = np.concatenate([np.full(s, np.inf), bottleneck])
        boundaries.append(np.concatenate([np.zeros(s, dtype=int), chosen]))
        slowest.append(float(best[-1]))
    return slowest, boundaries


def stage_costs(costs: Sequence[float], stages: Sequence[LayerRange]) -> list[float]:
    return [sum(costs[first:last]) for first, last in stages]


def fewest_stages(costs: Sequence[float], limit: float) -> int:
    """The smallest number of stages none of which costs more than `limit`; at most one per layer.

    Where one layer alone costs more, it is a stage by itself."""
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
    """Raises `ValueError` if a stage would be empty or the sizes do not add up to the layers."""
    if sum(layers_per_stage) != num_layers or min(layers_per_stage) < 1:
        raise UserError(
            f"layers_per_stage: {list(layers_per_stage)} adds up to {sum(layers_per_stage)}; "
            f"give numbers of at least 1 that add up to {num_layers}"
        )
    bounds = [sum(layers_per_stage[:s]) for s in range(len(layers_per_stage) + 1)]
    return tuple(pairwise(bounds))
