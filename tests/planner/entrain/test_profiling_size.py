"""Entrain's Algorithm 2: trials, allocations against brute force, and when it stops."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.planner.entrain.profiling_size import (
    drawing_from,
    num_trials,
    proportional_allocation,
    stable_profiling_size,
)


def test_59_trials_for_95_percent_and_5_percent():
    assert num_trials(0.05, 0.05) == 59
    assert 0.95**59 <= 0.05 < 0.95**58
    with pytest.raises(ValueError, match="both must lie between 0 and 1"):
        num_trials(0.0, 0.05)


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any),
    st.integers(1, 12),
    st.integers(0, 2),
)
def test_allocation_is_the_nearest_in_whole_devices(work, num_devices, smallest):
    if smallest * len(work) > num_devices:
        with pytest.raises(ValueError, match="too few"):
            proportional_allocation(num_devices, work, smallest=smallest)
        return
    allocation = proportional_allocation(num_devices, work, smallest=smallest)

    def distance(counts):
        return sum((c - num_devices * w / sum(work)) ** 2 for c, w in zip(counts, work, strict=True))

    every = [c for c in product(range(smallest, num_devices + 1), repeat=len(work)) if sum(c) == num_devices]
    assert allocation in every
    assert distance(allocation) == pytest.approx(min(map(distance, every)), abs=1e-9)


def test_the_thesis_example_of_two_devices():
    assert proportional_allocation(2, (1, 0.98)) == proportional_allocation(2, (1, 1.12)) == (1, 1)


def test_no_work_is_an_error():
    with pytest.raises(ValueError, match="give positive numbers"):
        proportional_allocation(4, (0.0, 0.0))


def test_doubles_until_all_draws_agree():
    drawn = []

    def draw(n):
        drawn.append(n)
        return "stable" if n >= 8 else len(drawn)

    found = stable_profiling_size(draw)
    assert (found.num_samples, found.allocation, found.num_tests) == (8, "stable", 4)
    assert found.num_batches == len(drawn)
    assert drawn == [1, 1, 2, 2, 4, 4] + [8] * (1 + num_trials(0.05 / 16, 0.05))


def test_the_doublings_share_the_error():
    """Whatever the number of sizes tried, the chances to pass by luck add up to alpha at most."""
    passing = [(1 - 0.05) ** num_trials(0.05 / 2**j, 0.05) for j in range(1, 40)]
    assert sum(passing) <= 0.05 < 5 * 0.95 ** num_trials(0.05, 0.05)


def test_a_case_on_the_edge_ends_with_an_error():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="either allocation will do"):
        stable_profiling_size(lambda n: int(rng.integers(2)), largest_size=64)


def test_draws_from_samples():
    work = np.array([[1.0, 3.0], [3.0, 1.0]])
    draw = drawing_from(work, 8, np.random.default_rng(0))
    assert {draw(1) for _ in range(50)} == {(2, 6), (6, 2)}
    found = stable_profiling_size(drawing_from(np.array([[1.0, 3.0]] * 5 + [[1.0, 2.0]]), 8, np.random.default_rng(0)))
    assert found.allocation == (2, 6)
    assert math.log2(found.num_samples).is_integer()
