from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.balancing.entrain import NUM_GRID_STEPS, bottleneck_matching, nearest_subsets, pair_and_defer

works = st.floats(0, 100)


def all_sums(items: list[float]) -> list[float]:
    return [sum(each) for size in range(len(items) + 1) for each in combinations(items, size)]


@given(st.lists(works, max_size=8), st.lists(st.floats(-10, 900), min_size=1, max_size=3))
def test_no_subset_is_nearer(items: list[float], targets: list[float]) -> None:
    chosen, sums = nearest_subsets(np.array(items), np.array(targets))
    for target, mask, total in zip(targets, chosen, sums, strict=True):
        assert sum(item for item, taken in zip(items, mask, strict=True) if taken) == pytest.approx(total)
        assert abs(total - target) <= min(abs(s - target) for s in all_sums(items)) + 1e-9


@examples(20)
@given(st.lists(works, min_size=11, max_size=13), st.floats(0, 1))
def test_many_samples_are_off_by_the_grid_at_most(items: list[float], share: float) -> None:
    target = share * sum(items)
    chosen, sums = nearest_subsets(np.array(items), np.array([target]))
    assert chosen[0] @ np.array(items) == pytest.approx(sums[0])
    best = min(abs(s - target) for s in all_sums(items))
    assert abs(sums[0] - target) <= best + len(items) * sum(items) / NUM_GRID_STEPS + 1e-9


matrices = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.lists(st.lists(st.integers(0, 12), min_size=n, max_size=n), min_size=n, max_size=n),
        st.lists(st.integers(0, 12), min_size=n, max_size=n),
        st.lists(st.lists(st.integers(0, 99), min_size=n, max_size=n), min_size=n, max_size=n),
    )
)


@given(matrices)
def test_the_bottleneck_is_the_least_threshold_that_is_feasible(
    matrix: tuple[list[list[int]], list[int], list[list[int]]],
) -> None:
    after, alone, squares = matrix
    n = len(alone)

    def is_feasible(partner: tuple[int, ...], limit: int) -> bool:
        return all(after[i][partner[i]] <= limit or alone[i] <= limit for i in range(n))

    every = list(permutations(range(n)))
    thresholds = sorted({*alone, *(value for row in after for value in row)})
    best = next(limit for limit in thresholds if any(is_feasible(partner, limit) for partner in every))
    found = bottleneck_matching(*(np.array(x, dtype=float) for x in (after, alone, squares)))
    assert found.bottleneck == best
    partner = tuple(found.partner.tolist())
    assert is_feasible(partner, best)
    assert sum(squares[i][partner[i]] for i in range(n)) == min(
        sum(squares[i][each[i]] for i in range(n)) for each in every if is_feasible(each, best)
    )


@given(st.lists(st.lists(works, max_size=4), max_size=7))
def test_pairs_keep_to_the_bottleneck(microbatches: list[list[float]]) -> None:
    pairing = pair_and_defer([np.array(m) for m in microbatches])
    totals = [sum(m) for m in microbatches]
    named = [i for pair in pairing.pairs for i in (pair.overloaded, pair.underloaded)]
    if pairing.unpaired is not None:
        named.append(pairing.unpaired)
    assert sorted(named) == list(range(len(microbatches)))
    largest = max((totals[i] for i in named if i == pairing.unpaired), default=0.0)
    for pair in pairing.pairs:
        moved = sum(microbatches[pair.overloaded][place] for place in pair.deferred)
        assert totals[pair.overloaded] >= totals[pair.underloaded]
        largest = max(largest, totals[pair.overloaded] - moved, totals[pair.underloaded] + moved)
    assert largest <= pairing.bottleneck + 1e-9
    assert pairing.bottleneck <= max(totals, default=0.0) + 1e-9


def test_the_thesis_example() -> None:
    """Figure 4.10: overloaded 1, 2, 5 and underloaded 3, 4, 6; matching makes all of them 6."""
    after = np.array([[6, 6, 6], [6, 6, 7], [8, 6, 9]], dtype=float)
    found = bottleneck_matching(after, np.array([9.0, 8, 10]), after**2)
    assert found.bottleneck == 6
    assert found.partner.tolist() == [2, 0, 1]


def test_unequal_halves_are_refused() -> None:
    with pytest.raises(ValueError, match="equal numbers"):
        bottleneck_matching(np.zeros((1, 2)), np.zeros(1), np.zeros((1, 2)))
