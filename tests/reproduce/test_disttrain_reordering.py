"""Reordering: permutations, and what Algorithm 3 puts where."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.reproduce.disttrain_reordering import between_microbatches, gains


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
