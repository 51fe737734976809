"""Whoever may go on where the store is, and whoever may go on elsewhere, have a node in common."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.resilience.membership import Change, Membership
from motet.resilience.store.store_failover import is_valid, may_be_valid, may_open, quorum_to_continue, quorum_to_open

NODES = range(7)


def membership(generation: int, nodes: frozenset[int], out: frozenset[int] = frozenset()) -> Membership:
    changes = tuple(Change("lost", node, "", 0.0, is_self_reported=True) for node in out)
    return Membership(
        generation=generation, nodes=tuple(sorted(nodes)), num_admitted=len(NODES), plan="", changes=changes
    )


@pytest.mark.parametrize("num_nodes", range(1, 8))
@pytest.mark.parametrize("tolerate", [1, 2, 3])
def test_any_two_have_a_node_in_common(num_nodes: int, tolerate: int) -> None:
    stay = list(combinations(range(num_nodes), quorum_to_continue(num_nodes, tolerate)))
    opened = list(combinations(range(num_nodes), quorum_to_open(num_nodes, tolerate)))
    assert all({*a} & {*b} for a in opened for b in (*stay, *opened))


@pytest.mark.parametrize("tolerate", [1, 2, 3])
def test_as_many_losses_as_the_run_is_to_survive_stop_nothing(tolerate: int) -> None:
    for num_nodes in range(tolerate + 1, 50):
        left = num_nodes - tolerate
        assert left >= quorum_to_continue(num_nodes, tolerate)
        assert (left >= quorum_to_open(num_nodes, tolerate)) == (num_nodes > 2 * tolerate)
        assert num_nodes >= quorum_to_open(num_nodes, tolerate)  # All, where the store's machine trains nothing.


def test_with_two_nodes_both_are_needed() -> None:
    assert (quorum_to_continue(2, 1), quorum_to_open(2, 1)) == (1, 2)


@st.composite
def lines(draw: st.DrawFn) -> list[Membership]:
    """Each membership loses some of the one before, by silence or by their own word."""
    line = [membership(1, frozenset(draw(st.sets(st.sampled_from(NODES), min_size=2))))]
    for generation in range(2, draw(st.integers(2, 5)) + 1):
        before = frozenset(line[-1].nodes)
        kept = frozenset(draw(st.sets(st.sampled_from(sorted(before)), min_size=1))) if before else before
        gone = sorted(before - kept)
        out = frozenset(draw(st.sets(st.sampled_from(gone)))) if gone else frozenset()
        line.append(membership(generation, kept, out))
    return line


@given(line=lines(), data=st.data())
def test_who_goes_elsewhere_knows_what_was_valid(line: list[Membership], data: st.DataObject) -> None:
    """Nodes that have not read a membership, and are not out by their own word, cannot go on elsewhere from one before
    it if it is valid."""
    tolerate = data.draw(st.integers(1, 3))
    read = data.draw(st.sets(st.sampled_from(NODES)))
    for end in range(2, len(line) + 1):
        first = data.draw(st.integers(0, end - 2))  # Known to be valid.
        told = line[first:end]
        if not is_valid(told, read, tolerate):
            continue
        for i in range(first, end - 1):
            out = {change.node for m in line[i + 1 : end] for change in m.changes}
            elsewhere = {*NODES} - read - out
            assert not may_open(line[first : i + 1], elsewhere, tolerate)
        out = {change.node for change in told[-1].changes}
        assert may_be_valid(told[-2], {*NODES} - read - out, tolerate)


def test_a_membership_that_nobody_needs_is_none_for_others() -> None:
    """Three of five are left, then two of these: those two alone are too few of the five."""
    line = [membership(1, frozenset(range(5))), membership(2, frozenset({0, 1, 2})), membership(3, frozenset({0, 1}))]
    assert is_valid(line[:2], {0, 1, 2}, 1)
    assert not is_valid(line, {0, 1}, 1)
    assert is_valid(line[1:], {0, 1}, 1)  # Once the second one was valid.
    assert not may_open(line[:2], {0, 1}, 1)
    assert may_open(line[1:2], {0, 1}, 1)
