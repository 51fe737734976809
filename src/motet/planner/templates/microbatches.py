"""How many microbatches each pipeline gets (thesis 2.4.2.2, eq. 2.6).

A pipeline with n microbatches takes first_s + (n - 1) slowest_s: the first one fills it, then the slowest stage sets
the pace. (The thesis multiplies the time of one microbatch, which is the fill, by n.) The iteration ends when the last
pipeline does, so `min_max_counts` is what is used; `least_variance_counts` is eq. 2.6, which can be slower
(docs/resilience.md).
"""

import heapq
from collections.abc import Sequence

import numpy as np

from motet.errors import UserError
from motet.planner.templates.pipelines import Template
from motet.ragged_arrays import Ints


def min_max_counts(templates: Sequence[Template], total: int) -> tuple[int, ...]:
    """Counts of at least 1 that add up to `total`, with the shortest iteration; exact.

    One after the other is given to the pipeline that would end first with it. Raises `UserError` if `total` is less
    than the number of pipelines."""
    check_total(len(templates), total)
    counts = [1] * len(templates)
    queue = [(template.iteration_s(2), i) for i, template in enumerate(templates)]
    heapq.heapify(queue)
    for _ in range(total - len(templates)):
        _, i = queue[0]
        counts[i] += 1
        heapq.heapreplace(queue, (templates[i].iteration_s(counts[i] + 1), i))
    return tuple(counts)


def check_total(num_pipelines: int, total: int) -> None:
    if total < num_pipelines:
        raise UserError(
            f"{total} microbatches cannot be shared out among {num_pipelines} pipelines; "
            f"give at least {num_pipelines} (a larger global batch, or more and smaller microbatches)"
        )


def iteration_s(templates: Sequence[Template], counts: Sequence[int]) -> float:
    """Of all pipelines together; reductions are not counted."""
    return max(template.iteration_s(count) for template, count in zip(templates, counts, strict=True))


def variance(templates: Sequence[Template], counts: Sequence[int]) -> float:
    """The objective of eq. 2.6: squared differences from the mean of the pipelines' times."""
    times = np.array([template.iteration_s(count) for template, count in zip(templates, counts, strict=True)])
    return float(((times - times.mean()) ** 2).sum())


def least_variance_counts(templates: Sequence[Template], total: int) -> tuple[int, ...]:
    """The exact integer optimum of eq. 2.6.

    The mean is the c that minimises the sum of (y_i - c)^2, so the optimum is among those for a fixed c, where the
    problem falls apart into marginal costs. As c rises the best counts change where two lines -2 c sum(y) + sum(y^2)
    cross; those crossings are found by bisection, and intervals that cannot hold their own mean are left out."""
    check_total(len(templates), total)
    first = np.array([template.first_s for template in templates])
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
