"""What nodes that have lost their store tell a new one, and what is made of it."""

import json
from dataclasses import replace

import pytest
from test_moving_store import Local

from motet.resilience.membership import Membership
from motet.resilience.store.store_failover import (
    FIRST_TERM,
    OtherLineError,
    Vote,
    gathered,
    may_open,
    term_of,
    term_text,
    vote,
)

A, B = FIRST_TERM, (1, 3, "10.0.0.3:40003")


def membership(generation: int, *nodes: int, note: str = "") -> Membership:
    return Membership(generation=generation, nodes=nodes, num_admitted=9, plan="", note=note)


FIRST = membership(1, 0, 1, 2, 3, 4)
SECOND = membership(2, 0, 1, 2, 3)


def test_terms_are_in_order() -> None:
    store = Local({})
    assert term_of(store) == FIRST_TERM
    store.set("term", term_text(B))
    assert term_of(store) == B > FIRST_TERM
    assert json.loads(term_text(B)) == [1, 3, "10.0.0.3:40003"]


def test_enough_have_to_come() -> None:
    store = Local({})
    assert gathered(store, 1) is None
    come = []
    for node in (4, 0, 2):
        vote(store, Vote(node, A, 1, 1), [FIRST])
        found = gathered(store, 1)
        assert found is not None
        assert found.line == (FIRST,)
        come.append(may_open(found.tail, found.nodes, 1))
    assert come == [False, False, True]


def test_who_comes_twice_counts_once() -> None:
    store = Local({})
    for _ in range(3):
        vote(store, Vote(0, A, 1, 1), [FIRST])
    found = gathered(store, 1)
    assert found is not None
    assert found.nodes == {0}


def test_the_newest_line_counts() -> None:
    """One node knows what was tried in the first store and came to nothing, the others what followed in the second."""
    store, tried = Local({}), membership(2, 0, 1, note="tried")
    vote(store, Vote(0, A, 2, 1), [FIRST, tried])
    for node in (1, 2, 3):
        vote(store, Vote(node, B, 2, 2), [FIRST, SECOND])
    found = gathered(store, 1)
    assert found is not None
    assert (found.line, found.settled, found.tail) == ((FIRST, SECOND), 2, (SECOND,))
    assert may_open(found.tail, found.nodes, 1)


@pytest.mark.parametrize(("knowing", "is_kept"), [(1, False), (2, True), (3, True)])
def test_what_too_few_can_have_read_is_dropped(knowing: int, is_kept: bool) -> None:
    """Three of the five must have read it for anybody to train under it. The fifth, which stays away, may have."""
    store = Local({})
    for node in range(4):
        own = Vote(node, A, 2 if node < knowing else 1, 1)
        vote(store, own, [FIRST, SECOND][: own.generation])
    found = gathered(store, 1)
    assert found is not None
    assert found.line == ((FIRST, SECOND) if is_kept else (FIRST,))


def test_who_has_read_it_in_an_older_store_has_read_it() -> None:
    """It may have been valid there."""
    store = Local({})
    vote(store, Vote(0, B, 2, 1), [FIRST, SECOND])
    for node in (1, 2):
        vote(store, Vote(node, A, 2, 1), [FIRST, SECOND])
    vote(store, Vote(3, A, 1, 1), [FIRST])
    found = gathered(store, 1)
    assert found is not None
    assert found.line == (FIRST, SECOND)


def test_two_histories_of_one_store_do_not_mix() -> None:
    """It was started again when one of them was known to few, who stayed away."""
    store = Local({})
    vote(store, Vote(0, A, 2, 1), [FIRST, SECOND])
    with pytest.raises(OtherLineError, match="another membership 2 is known"):
        vote(store, Vote(1, A, 2, 1), [FIRST, membership(2, 1, 2, 4)])


def test_numbers_that_are_given_twice() -> None:
    """Node 9 joined in the first store, and is in no membership that went on; in the second another node 9 joined."""
    store, tried = Local({}), replace(membership(2, 0, 1, 2, 3, 9, note="tried"), num_admitted=10)
    second, third = SECOND, replace(membership(3, 0, 1, 9), num_admitted=10)
    vote(store, Vote(0, B, 3, 3), [FIRST, second, third])
    vote(store, Vote(9, A, 2, 1), [FIRST, tried])
    found = gathered(store, 1)
    assert found is not None
    assert (found.nodes, found.line) == ({0}, (FIRST, second, third))
    assert not may_open(found.tail, found.nodes, 1)
    vote(store, Vote(9, A, 1, 1), [FIRST])
    assert gathered(store, 1) == found
    vote(store, Vote(9, B, 3, 3), [FIRST, second, third])
    again = gathered(store, 1)
    assert again is not None
    assert again.nodes == {0, 9}
    assert may_open(again.tail, again.nodes, 1)


def test_who_has_the_number_of_another_has_read_for_himself_alone() -> None:
    """That it does not know what the other one may have read is no reason to drop it."""
    store, third = Local({}), replace(membership(3, 0, 1, 9), num_admitted=10)
    fourth = replace(membership(4, 0, 9), num_admitted=10)
    vote(store, Vote(0, B, 4, 3), [FIRST, SECOND, third, fourth])
    vote(store, Vote(1, B, 3, 3), [FIRST, SECOND, third])
    vote(store, Vote(9, A, 1, 1), [FIRST])
    found = gathered(store, 1)
    assert found is not None
    assert found.line[-1] == fourth
