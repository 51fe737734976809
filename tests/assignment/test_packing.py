from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.assignment.batch_assignment import packed_sequences


@given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.integers(10, 15))
def test_few_sequences_hold_all_samples(lengths: list[int], limit: int) -> None:
    microbatch = tuple(range(len(lengths)))
    packed = packed_sequences(microbatch, lengths, limit)
    assert sorted(i for sequence in packed for i in sequence) == list(microbatch)
    assert all(sum(lengths[i] for i in sequence) <= limit for sequence in packed)
    fewest = min(
        len(set(cut))
        for cut in product(range(len(lengths)), repeat=len(lengths))
        if all(sum(n for n, g in zip(lengths, cut, strict=True) if g == group) <= limit for group in cut)
    )
    assert len(packed) <= 11 / 9 * fewest + 1


def test_only_the_samples_of_the_microbatch_are_packed() -> None:
    assert packed_sequences((4, 1, 2), [99, 5, 3, 99, 6], 9) == [(4, 2), (1,)]


def test_a_sample_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 1 has 8 tokens"):
        packed_sequences((0, 1), [3, 8], 7)
