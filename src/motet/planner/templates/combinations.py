"""Which templates, and how many pipelines of each (thesis 2.4.1.1, 2.4.2, appendix A).

**Sizes.** n0 is the smallest number of nodes on which the model fits, n0 .. N - f n0 are the templates: the largest is
what is left where f pipelines have n0 nodes. Appendix A asks for more than n0 - 1 templates, which is sufficient but
not necessary: k pipelines of consecutive sizes n0 .. n_max have any number of nodes in [k n0, k n_max], so all N' in
[(f + 1) n0, N] can be had if these intervals, for k > f, leave no gap. With n_max = N - f n0 they never do
(`uncovered` is empty). (The Frobenius number, (A.2), lost a factor n0 in the thesis.)

**Combinations.** All ways to make N nodes of the sizes (coin change) are written down while there are few. Beyond, the
best is found without them: what all pipelines together compute within a time t is a sum over pipelines, so the most of
it for exactly N nodes is a knapsack, and the shortest t for which it is enough is found by bisection over the times at
which some pipeline finishes a microbatch. Exact for `microbatches.iteration_s`.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from motet.errors import UserError
from motet.planner.templates.pipelines import Template, iteration_s, min_max_counts
from motet.ragged_arrays import Ints

MAX_ENUMERATED = 2000
"""Combinations that are written down."""

NOTHING = np.iinfo(np.int64).min // 2
"""No pipelines have so many nodes."""


def template_sizes(num_nodes: int, failures: int, fewest_nodes: int) -> range:
    """n0, n0 + 1, ... N - f n0. Raises `UserError` if there are fewer than (f + 1) n0 nodes."""
    least = (failures + 1) * fewest_nodes
    if num_nodes < least:
        raise UserError(
            f"{num_nodes} nodes are too few to survive {failures} failures: {failures + 1} pipelines of at least "
            f"{fewest_nodes} nodes need {least}; give more nodes, fewer failures, or devices with more memory"
        )
    return range(fewest_nodes, num_nodes - failures * fewest_nodes + 1)


def uncovered(sizes: range, num_nodes: int, failures: int) -> list[int]:
    """The numbers of nodes from (f + 1) n0 to N that no f + 1 or more pipelines of these sizes have together."""
    fewest, most = sizes[0], sizes[-1]
    return [
        n
        for n in range((failures + 1) * fewest, num_nodes + 1)
        if not any(k * fewest <= n <= k * most for k in range(failures + 1, n // fewest + 1))
    ]


def num_combinations(sizes: Sequence[int], num_nodes: int, least_pipelines: int) -> int:
    """How many ways there are to make so many nodes of at least so many pipelines."""
    ways = np.zeros((least_pipelines + 1, num_nodes + 1), dtype=object)
    ways[0, 0] = 1
    for size in sizes:
        for n in range(size, num_nodes + 1):
            # Pipelines beyond the least number are not counted apart.
            ways[-1, n] += ways[-1, n - size]
            ways[1:, n] += ways[:-1, n - size]
    return int(ways[-1, num_nodes])


def combinations(sizes: Sequence[int], num_nodes: int, least_pipelines: int) -> Iterator[tuple[int, ...]]:
    """Every one, as the pipelines' numbers of nodes, ascending."""

    def extend(chosen: tuple[int, ...], first: int, left: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            if len(chosen) >= least_pipelines:
                yield chosen
            return
        for i in range(first, len(sizes)):
            if sizes[i] <= left:
                yield from extend((*chosen, sizes[i]), i, left - sizes[i])

    return extend((), 0, num_nodes)


def best_combinations(
    templates: Mapping[int, Template], num_nodes: int, failures: int, total: int, *, most: int
) -> list[tuple[int, ...]]:
    """Up to `most`, by the seconds of an iteration with `total` microbatches, the fastest first; one alone where there
    are too many to look at.

    Raises `UserError` if there is none: no combination of templates has so many nodes, or there are fewer microbatches
    than pipelines."""
    sizes = sorted(templates)
    number = num_combinations(sizes, num_nodes, failures + 1)
    found: list[tuple[int, ...]] = []
    if number <= MAX_ENUMERATED:
        fitting = (each for each in combinations(sizes, num_nodes, failures + 1) if len(each) <= total)
        found = sorted(fitting, key=lambda each: combination_s(templates, each, total))[:most]
    elif (best := best_combination(templates, num_nodes, failures, total)) is not None:
        found = [best]
    if not found and number and total <= failures:
        raise UserError(
            f"{total} microbatches cannot be shared out among {failures + 1} pipelines; give at least {failures + 1} "
            "(a larger global batch, or more and smaller microbatches)"
        )
    if not found:
        raise UserError(
            f"no {failures + 1} or more pipelines of {sizes[0]} to {sizes[-1]} nodes, with a microbatch each of the "
            f"{total}, use exactly {num_nodes} nodes; give another number of nodes, or more microbatches"
        )
    return found


def combination_s(templates: Mapping[int, Template], sizes: Sequence[int], total: int) -> float:
    """Seconds of an iteration of pipelines of these sizes, with the best counts of microbatches."""
    chosen = [templates[size] for size in sizes]
    return iteration_s(chosen, min_max_counts(chosen, total))


def best_combination(
    templates: Mapping[int, Template], num_nodes: int, failures: int, total: int
) -> tuple[int, ...] | None:
    """The fastest of all, however many there are; None if there is none."""
    first = np.array([t.first_s for t in templates.values()])
    slowest = np.array([t.slowest_s for t in templates.values()])
    times = np.unique(first[:, None] + slowest[:, None] * np.arange(total))
    sizes = np.array(list(templates))

    def chosen(i: int) -> tuple[int, ...] | None:
        within = np.floor((times[i] * (1 + 1e-12) - first) / slowest).astype(np.int64) + 1
        return _most_microbatches(sizes, np.minimum(within, total), num_nodes, failures + 1, total)

    i = bisect_left(range(len(times)), True, key=lambda i: chosen(i) is not None)
    return chosen(i) if i < len(times) else None


def _most_microbatches(
    sizes: Ints, within: Ints, num_nodes: int, least_pipelines: int, total: int
) -> tuple[int, ...] | None:
    """Pipelines that together use all nodes and compute at least `total` microbatches, if there are; `within`: what one
    of each size computes. There are no more pipelines than microbatches."""
    sizes, within = sizes[within >= 1], within[within >= 1]
    if not len(sizes):
        return None
    # Where there cannot be too many pipelines, those beyond the least number need not be counted apart.
    is_counted = num_nodes // int(sizes.min()) > total
    last = total if is_counted else least_pipelines
    # [pipelines, nodes]: the most microbatches; the size that was added last, and to how many pipelines.
    most = np.full((last + 1, num_nodes + 1), NOTHING)
    added, rows = np.zeros_like(most), np.zeros_like(most)
    most[0, 0] = 0
    for n in range(1, num_nodes + 1):
        fitting = sizes <= n
        computed = most[:, n - sizes[fitting]] + within[fitting]
        steps = [(slice(1, None), slice(None, -1))]
        if not is_counted:
            steps.append((slice(last, None), slice(last, None)))
        for to_row, from_rows in steps if fitting.any() else ():
            best = computed[from_rows].argmax(axis=1)
            value = np.take_along_axis(computed[from_rows], best[:, None], axis=1)[:, 0]
            better = value > most[to_row, n]
            most[to_row, n][better] = value[better]
            added[to_row, n][better] = sizes[fitting][best[better]]
            rows[to_row, n][better] = np.arange(last + 1)[from_rows][better]
    row = least_pipelines + int(most[least_pipelines:, num_nodes].argmax()) if least_pipelines <= last else 0
    if most[row, num_nodes] < total:
        return None
    pipelines, n = [], num_nodes
    while n:
        pipelines.append(int(added[row, n]))
        row, n = int(rows[row, n]), n - pipelines[-1]
    return tuple(sorted(pipelines))


def recommended_batch(global_batch_size: int, total: int) -> int:
    """The multiple of `total` that is nearest, at least one: microbatches of equal size."""
    return max(1, round(global_batch_size / total)) * total
