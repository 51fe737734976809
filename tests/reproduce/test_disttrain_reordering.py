"""Reordering: permutations, the greedy's bound against brute force, and what Algorithm 3 puts where."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.reproduce.disttrain_reordering import between_microbatches, gains, within_microbatches


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=10).filter(lambda sizes: len(sizes) % 2 == 0))
def test_two_groups_within_the_bound_of_the_best(sizes):
    groups = within_microbatches(sizes, 2)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    assert len(groups[0]) == len(groups[1])
    most = max(sum(sizes[i] for i in group) for group in groups)
    half = len(sizes) // 2
    best = min(max(sum(c), sum(sizes) - sum(c)) for c in combinations(sizes, half))
    # What the paper claims of its greedy.
    assert most <= 4 / 3 * best + 1e-9


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(1, 6))
def test_microbatches_are_permuted_small_ones_first_and_last(sizes, num_stages):
    order = between_microbatches(sizes, num_stages, forward_s=1.0, backward_s=2.0, period_s=30.0, return_s=50.0)
    assert sorted(order) == list(range(len(sizes)))
    assert sizes[order[0]] == min(sizes)
    num_rear = min(num_stages - 1, len(sizes) - 1)
    rear = sorted(sizes[i] for i in order[len(order) - num_rear :])
    assert rear == sorted(sizes)[1 : 1 + num_rear]


def test_intervals_take_the_forward_that_fills_them():
    """Two stages, sizes 1 to 5: 1 first, 2 last. Until the first backward 3 fits, then beside the backward of 1 (2 s of
    the period of 7 s) a forward of 5, and 4 is left."""
    order = between_microbatches([1, 2, 3, 4, 5], 2, forward_s=1.0, backward_s=2.0, period_s=7.0, return_s=3.0)
    assert [i + 1 for i in order] == [1, 3, 5, 4, 2]


@pytest.mark.parametrize("size", ["9B", "72B"])
def test_order_matters_but_no_order_is_better_than_alike(size):
    gain, headroom = gains(size)
    assert 1 < gain < headroom
