"""Where an agent looks for a store, in which order, and when it is its own turn to open one."""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
from test_moving_store import Local

from motet.resilience.membership import Address
from motet.resilience.store import store_failover as whereabouts_module
from motet.resilience.store.store_failover import FIRST_TERM, SILENT_GRACES, TURN_S, StoreDiscovery, Term

GRACE_S = 5.0
BEFORE = ("10.0.0.1", 29500)


@pytest.fixture
def clock() -> Iterator[SimpleNamespace]:
    now = SimpleNamespace(s=1000.0)
    with mock.patch.object(whereabouts_module, "time", SimpleNamespace(monotonic=lambda: now.s)):
        yield now


@pytest.fixture
def somewhere() -> StoreDiscovery:
    found = StoreDiscovery(None, GRACE_S)
    store = Local({f"standby/{node}": f"10.0.0.{1 + node}:{40000 + node}" for node in range(4)})
    found.learn(store, (0, 1, 2, 3, 7))
    return found


def nodes(found: StoreDiscovery, away_s: float, order: tuple[int, ...] = (2, 0, 3, 7, 1)) -> list[int | None]:
    return [node for node, _ in found.places(order, BEFORE, away_s)]


def test_one_after_the_other(clock: SimpleNamespace, somewhere: StoreDiscovery) -> None:
    """The store's machine has node 0: its standby is probably lost too. Node 7 has none."""
    assert nodes(somewhere, GRACE_S) == [None]
    seen = []
    for _ in range(5):
        seen.append(nodes(somewhere, GRACE_S + 0.1))
        clock.s += TURN_S
    assert seen == [[None, 2], [None, 2, 3], [None, 2, 3, 1], [None, 2, 3, 1, 0], [None, 2, 3, 1, 0]]
    somewhere.found()
    assert nodes(somewhere, GRACE_S + 0.1) == [None, 2]


def test_where_the_store_was_on_a_standby_is_asked_once(clock: SimpleNamespace, somewhere: StoreDiscovery) -> None:
    before = somewhere.addresses[2]
    assert [address for _, address in somewhere.places((2, 0), before, 9.0)] == [before, somewhere.addresses[0]]


def test_who_does_not_answer_is_left_out_for_a_while(clock: SimpleNamespace, somewhere: StoreDiscovery) -> None:
    somewhere.note_silent(BEFORE, 2 * GRACE_S)
    somewhere.note_silent(somewhere.addresses[2], 2 * GRACE_S)
    somewhere.note_silent(somewhere.addresses[3], 0.01)  # Nobody listened.
    assert nodes(somewhere, GRACE_S + 0.1) == [3]
    clock.s += SILENT_GRACES * GRACE_S
    assert nodes(somewhere, GRACE_S + 0.1)[:2] == [None, 2]


def test_where_there_is_no_other_place_the_store_is_asked_for_nevertheless(
    clock: SimpleNamespace, somewhere: StoreDiscovery
) -> None:
    """As on one machine: it may be started again at any moment."""
    somewhere.note_silent(BEFORE, 2 * GRACE_S)
    assert nodes(somewhere, GRACE_S + 0.1, ()) == [None]


def test_two_machines_whose_nodes_have_the_same_number_open_stores_of_different_terms() -> None:
    """A node that a lost membership took in, and the one that got its number after that."""

    class Standby:
        is_free = True

        def __init__(self, address: Address) -> None:
            self.address = address

        def begin(self, term: Term, run: bytes) -> None:
            begun.append(term)
            self.is_free = False

    begun: list[Term] = []
    for port in (40001, 40002):
        found = StoreDiscovery(Standby(("10.0.0.9", port)), GRACE_S)
        found.open_here(9, FIRST_TERM, b"a run")
        found.open_here(9, FIRST_TERM, b"a run")  # It is busy.
    first, second = begun
    assert FIRST_TERM < first < second
