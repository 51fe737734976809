from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import language_model, module, replica, samples

from motet.balancing.disttrain import balanced_groups, reordered, reordered_assignment
from motet.plan import Edge, Plan
from motet.ragged_arrays import Floats


def least_largest(sizes: Floats, num_groups: int, room: int) -> float:
    best = float("inf")
    for groups in product(range(num_groups), repeat=len(sizes)):
        if np.bincount(groups, minlength=num_groups).max() <= room:
            best = min(best, float(np.bincount(groups, sizes, num_groups).max()))
    return best


@given(st.lists(st.floats(0, 50), min_size=1, max_size=7), st.integers(1, 3), st.booleans())
def test_longest_first_keeps_its_bound(sizes: list[float], num_groups: int, equal_counts: bool) -> None:
    array = np.array(sizes)
    groups = balanced_groups(array, num_groups, equal_counts=equal_counts)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    room = -(-len(sizes) // num_groups) if equal_counts else len(sizes)
    assert max(map(len, groups)) <= room
    found = max(array[group].sum() for group in groups)
    # With equal counts no such bound is known to us for many groups; the benchmark reports the worst ratio.
    factor = 4 / 3 - 1 / (3 * num_groups) if not equal_counts else 2 - 1 / num_groups
    assert found <= least_largest(array, num_groups, room) * factor + 1e-9


@given(st.lists(st.integers(1, 20), min_size=2, max_size=10).filter(lambda sizes: len(sizes) % 2 == 0))
def test_two_groups_within_the_bound_of_the_best(sizes: list[int]) -> None:
    groups = balanced_groups(np.array(sizes), 2)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    assert len(groups[0]) == len(groups[1])
    most = max(sum(sizes[i] for i in group) for group in groups)
    half = len(sizes) // 2
    best = min(max(sum(c), sum(sizes) - sum(c)) for c in combinations(sizes, half))
    # What the paper claims of its greedy.
    assert most <= 4 / 3 * best + 1e-9


def times(num_stages: int) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(st.lists(st.floats(0.1, 9), min_size=num_stages, max_size=num_stages), min_size=1, max_size=9)


@given(
    st.sampled_from([(1, 1), (2, 2), (3, 3), (2, 4), (3, 6)]).flatmap(lambda p: st.tuples(st.just(p[0]), times(p[1])))
)
def test_the_smallest_are_at_both_ends(drawn: tuple[int, list[list[float]]]) -> None:
    num_devices, forward = drawn
    seconds = np.array(forward)
    order = reordered(seconds, 2 * seconds, num_devices)
    sizes = seconds.sum(axis=1)
    assert sorted(order) == list(range(len(forward)))
    ends = [order[0], *order[max(1, len(order) - num_devices + 1) :]]
    assert sorted(sizes[ends]) == pytest.approx(sorted(sizes)[: len(ends)])


def test_intervals_are_filled_by_what_fits() -> None:
    """Two devices. The smallest microbatch is back on the first device at 3 s, which it left at 1 s: 2 s, one has that.
    Its backward ends there at 4 s, the second's returns at 9 s: 5 s, and 4 s is the nearest."""
    forward = np.array([[9.0, 1], [4, 1], [2, 2.5], [1, 1], [1, 1.1], [12, 1]])
    backward = np.array([[9.0, 1], [4, 1], [2, 3.5], [1, 1], [1, 1.1], [12, 1]])
    order = reordered(forward, backward, 2)
    assert order[0] == 3
    assert order[-1] == 4
    assert order[1:3] == [2, 1]


def test_devices_must_divide_stages() -> None:
    with pytest.raises(ValueError, match="3 stages"):
        reordered(np.ones((2, 3)), np.ones((2, 3)), 2)


def test_the_batch_stays_the_same_set() -> None:
    plan = Plan(
        modules={"vision": module(replica(0), replica(1)), "llm": language_model(replica(2), replica(3))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=3,
    )
    rng = np.random.default_rng(0)
    seconds = {name: rng.lognormal(0, 1, (12, 1)) for name in plan.modules}
    assignment = reordered_assignment(plan, samples(12, ["vision", "llm"]), seconds, seconds)
    assert assignment.microbatches["vision"] == assignment.microbatches["llm"]
    assert sorted(i for cut in assignment.microbatches["llm"] for m in cut for i in m) == list(range(12))
    assert all(len(m) == 2 for cut in assignment.microbatches["llm"] for m in cut)
