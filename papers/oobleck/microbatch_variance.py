"""Microbatch counts of least variance (Oobleck, thesis equation 2.6), for comparison with `min_max_counts`."""

from collections.abc import Sequence

import numpy as np

from motet.planner.templates.pipelines import Template, check_num_microbatches
from motet.ragged_arrays import Ints


def variance(templates: Sequence[Template], counts: Sequence[int]) -> float:
    """The objective of equation 2.6: squared differences of the pipelines' times from their mean."""
    times = np.array([template.iteration_s(count) for template, count in zip(templates, counts, strict=True)])
    return float(((times - times.mean()) ** 2).sum())


def least_variance_counts(templates: Sequence[Template], total: int) -> tuple[int, ...]:
    """Returns the exact integer optimum of equation 2.6.

    The mean is the c that minimises the sum of (y_i - c)^2, so the optimum is among those for a fixed c, where the
    problem separates into marginal costs. As c rises the best counts change where two lines -2 c sum(y) + sum(y^2)
    cross; those crossings are found by bisection, and intervals that cannot hold their own mean are left out."""
    check_num_microbatches(total, len(templates))
    first = np.array([template.fill_s for template in templates])
    slowest = np.array([template.slowest_s for template in templates])
    extra = total - len(templates)
    steps = np.arange(max(1, extra))
    before = first[:, None] + slowest[:, None] * steps
    base, slope = slowest[:, None] * (2 * before + slowest[:, None]), 2 * slowest[:, None]

    def best_for(c: float) -> Ints:
        marginal = base - slope * c
        taken = np.argsort(marginal, axis=None, kind="stable")[:extra]
        return 1 + np.bincount(taken // marginal.shape[1], minlength=len(first))

    def times(counts: Ints) -> np.ndarray:
        return first + (counts - 1) * slowest

    def mean(counts: Ints) -> float:
        return float(times(counts).mean())

    lowest, highest = float(first.min()), float((first + slowest * extra).max())
    low, high = best_for(lowest), best_for(highest)
    found = [low, high]
    intervals = [(lowest, low, highest, high)]
    while intervals:
        c_left, left, c_right, right = intervals.pop()
        # The optimum is best for its own mean: that must lie in the interval.
        if mean(left) >= mean(right) or mean(right) < c_left or mean(left) > c_right:
            continue
        squares = (times(right) ** 2).sum() - (times(left) ** 2).sum()
        crossing = float(squares / (2 * (times(right).sum() - times(left).sum())))
        middle = best_for(crossing)
        if mean(left) < mean(middle) < mean(right):
            found.append(middle)
            intervals += [(c_left, left, crossing, middle), (crossing, middle, c_right, right)]
    best = min(found, key=lambda counts: variance(templates, counts.tolist()))
    return tuple(best.tolist())
