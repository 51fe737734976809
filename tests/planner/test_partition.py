"""The partition against brute force, and its ties."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motet.planner.layouts.partition import (
    bottlenecks,
    even_partition,
    fewest_stages,
    partition,
    partition_by_sizes,
    stage_costs,
)


def every_partition(num_layers, num_stages):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(pairwise([0, *cuts, num_layers]))


@st.composite
def problems(draw):
    costs = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


@given(problems())
@example(([0, 0, 0], 2))
@example(([9, 0, 0, 1], 3))
def test_bottleneck_is_that_of_brute_force(problem):
    costs, num_stages = problem
    stages = partition(costs, num_stages)
    best = min(max(stage_costs(costs, cut)) for cut in every_partition(len(costs), num_stages))
    assert max(stage_costs(costs, stages)) == best
    assert stages in every_partition(len(costs), num_stages)


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=8), st.integers(2, 8))
def test_bottleneck_of_real_numbers(costs, num_stages):
    num_stages = min(num_stages, len(costs))
    best = min(max(stage_costs(costs, cut)) for cut in every_partition(len(costs), num_stages))
    assert max(stage_costs(costs, partition(costs, num_stages))) == pytest.approx(best, rel=1e-12, abs=1e-9)


def test_of_equal_cuts_the_later_stages_get_more_layers():
    assert partition([1] * 5, 2) == ((0, 2), (2, 5))
    assert partition([3, 1, 1, 1, 1], 3) == ((0, 1), (1, 2), (2, 5))
    assert partition([1, 0, 0, 1], 2) == ((0, 1), (1, 4))


def test_a_cheap_frozen_part_becomes_one_stage():
    assert partition([1, 1, 1, 1, 4, 4], 3) == ((0, 4), (4, 5), (5, 6))


def test_512_layers_into_64_stages():
    """Too many for brute force; but the greedy needs one stage more for any less. How fast: benchmarks/planners.py."""
    costs = np.random.default_rng(0).uniform(0.5, 2.0, 512).tolist()
    slowest = max(stage_costs(costs, partition(costs, 64)))
    assert fewest_stages(costs, slowest * (1 + 1e-9)) <= 64 < fewest_stages(costs, slowest * (1 - 1e-9))


@given(problems())
def test_bottlenecks_are_those_of_the_partitions(problem):
    costs, max_stages = problem
    each = [max(stage_costs(costs, partition(costs, n))) for n in range(1, max_stages + 1)]
    assert bottlenecks(costs, max_stages).tolist() == each


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 30))
def test_fewest_stages(costs, limit):
    num_stages = fewest_stages(costs, limit)
    fitting = [
        n for n in range(1, len(costs) + 1) if max(stage_costs(costs, partition(costs, n))) <= max(limit, max(costs))
    ]
    if limit >= max(costs):
        assert num_stages == fitting[0]
    else:
        assert num_stages >= fitting[0]


def test_even_and_given_sizes():
    assert even_partition(7, 3) == ((0, 3), (3, 5), (5, 7))
    assert partition_by_sizes(4, [1, 3]) == ((0, 1), (1, 4))
    with pytest.raises(ValueError, match="adds up to 5; give numbers of at least 1 that add up to 4"):
        partition_by_sizes(4, [1, 4])


def test_more_stages_than_layers_is_an_error():
    with pytest.raises(ValueError, match="pp: is 3, but there are 2 layers; give 1 to 2"):
        partition([1, 1], 3)
