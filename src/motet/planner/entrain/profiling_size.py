"""Number of samples that determine the allocation of devices to modules (Entrain: thesis 4.4.2, Algorithm 2, C).

The share of each module in the work varies between batches, and varies less for larger batches. Algorithm 2 draws a
batch of n samples, allocates devices in proportion to its work, and draws k more batches. If all of them result in the
same allocation, n suffices; otherwise n is doubled.

k follows from the binomial bound: if a batch differed from the reference with probability p_error or more, k batches in
a row would agree with probability at most (1 - p_error)^k <= alpha. That holds for *one* test. Each doubling tests
again, and each test has its own chance to pass by luck: where the probability falls slowly with n (heavy tails), the
chances add up to more than alpha. So here the test number j = 1, 2, ... may fail with alpha / 2^j, which needs 72, 86,
100, ... draws instead of 59, and all tests together keep to alpha. `every_test_alpha=True` is the thesis' own rule, to
compare with (benchmarks/profiling_size.py measures both).

Deviations: the ratio of sums (C.6) is taken, not the mean of ratios (C.1). Limits: what is guaranteed is the allocation
of another batch of b_min samples; that it is also that of larger batches needs a mean well inside its region (C.2.2),
which batches that seldom contain a huge sample do not show.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import ceil, log

import numpy as np

from motet.errors import UserError


def num_trials(alpha: float, p_error: float) -> int:
    """k of Algorithm 2: k equal allocations in a row show, with confidence 1 - alpha, that another one differs with
    probability at most p_error (C.5). Raises `UserError` unless both are between 0 and 1."""
    if not (0 < alpha < 1 and 0 < p_error < 1):
        raise UserError(f"alpha is {alpha} and p_error {p_error}; both must lie between 0 and 1")
    return ceil(log(alpha) / log(1 - p_error))


def proportional_allocation(num_devices: int, work: Sequence[float], *, smallest: int = 1) -> tuple[int, ...]:
    """Devices for each module, in proportion to their work, each at least `smallest`: of all integers that add up to
    `num_devices`, those nearest to the proportions (least squares; of equally near ones, more for the first modules).

    Raises `ValueError` if there are too few devices, or no work at all.
    """
    if smallest * len(work) > num_devices:
        raise UserError(f"{num_devices} devices are too few for {len(work)} modules with at least {smallest} each")
    total = float(sum(work))
    if not total > 0 or min(work) < 0:
        raise UserError(f"work is {list(work)}; give positive numbers")
    wanted = [num_devices * share / total for share in work]
    # The nearest for their own sum; then one by one where it costs least, which is exact for a sum of convex functions.
    allocation = [max(smallest, int(share)) for share in wanted]
    while (surplus := sum(allocation) - num_devices) != 0:
        if surplus < 0:
            allocation[max(range(len(work)), key=lambda i: wanted[i] - allocation[i])] += 1
        else:
            shrinkable = [i for i in range(len(work)) if allocation[i] > smallest]
            allocation[max(shrinkable, key=lambda i: (allocation[i] - wanted[i], i))] -= 1
    return tuple(allocation)


@dataclass(frozen=True)
class ProfilingSize:
    num_samples: int
    """b_min."""
    allocation: Hashable
    num_tests: int
    """Number of sizes that were tried."""
    num_batches: int
    """Number of batches that were drawn."""


def stable_profiling_size(
    draw_allocation: Callable[[int], Hashable],
    *,
    alpha: float = 0.05,
    p_error: float = 0.05,
    largest_size: int = 2**20,
    every_test_alpha: bool = False,
) -> ProfilingSize:
    """b_min: with confidence 1 - alpha, the allocation of another batch of that size differs with probability at most
    p_error.

    `draw_allocation(n)`: the allocation for n samples drawn at random. Raises `ValueError` if no size up to
    `largest_size` is stable: the shares lie so near to where the allocation changes that both are as good.
    """
    size, num_tests, num_batches = 1, 0, 0
    while size <= largest_size:
        num_tests += 1
        k = num_trials(alpha if every_test_alpha else alpha / 2**num_tests, p_error)
        reference = draw_allocation(size)
        num_batches += 1
        for _ in range(k):
            num_batches += 1
            if draw_allocation(size) != reference:
                break
        else:
            return ProfilingSize(size, reference, num_tests, num_batches)
        size *= 2
    raise UserError(
        f"no batch of up to {largest_size} samples leads to a stable allocation of devices; the modules' shares are "
        "between two allocations, and either allocation will do"
    )


def drawing_from(work: np.ndarray, num_devices: int, rng: np.random.Generator) -> Callable[[int], tuple[int, ...]]:
    """Draws batches with replacement from samples of known work. `work`: seconds [samples, modules]."""

    def draw(num_samples: int) -> tuple[int, ...]:
        drawn = work[rng.integers(len(work), size=num_samples)].sum(axis=0)
        return proportional_allocation(num_devices, drawn.tolist())

    return draw
