"""What agents make of what they see."""

import json
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from motet.resilience.agent import NodeAgent, WatchedProcess
from motet.resilience.membership import Change, Membership, key_of
from motet.resilience.watchdog import Watchdog

WATCHDOG = Watchdog(1e6, lambda: None)


class Store:
    """Of two nodes that have been registered, and nothing else."""

    def add(self, key: str, amount: int) -> int:
        assert (key, amount) == ("nodes", 0)
        return 2


def changes_of(
    membership: Membership, *, how: str | None = None, silent: tuple[int, ...] = ()
) -> list[tuple[str, int]]:
    agent = NodeAgent(0, Store(), (), lambda membership, changes: membership, 1.0, WATCHDOG)  # type: ignore[arg-type]
    changes: list[Change] = agent._changes(0, membership, how, silent)
    return [(change.kind, change.node) for change in changes]


BOTH = Membership(generation=1, nodes=(0, 1), num_known=2, plan="")
SPARE = Membership(generation=1, nodes=(0,), waiting=(1,), num_known=2, plan="")
ALONE = Membership(
    generation=2,
    nodes=(0,),
    num_known=2,
    plan="",
    changes=(Change("lost", 1, "its agent was silent", 0.0),),
)


def test_a_silent_node_is_lost_once() -> None:
    """Whoever hears of its loss between looking and telling does not tell it again."""
    assert changes_of(BOTH, silent=(1,)) == [("lost", 1)]
    assert changes_of(ALONE, silent=(1,)) == []


def test_own_losses_and_new_nodes_are_told() -> None:
    assert changes_of(BOTH, how="process 0 was ended by SIGKILL") == [("lost", 0)]
    assert changes_of(Membership(generation=1, nodes=(0,), num_known=1, plan="")) == [("joined", 1)]
    assert changes_of(BOTH) == []


def test_nodes_that_leave_do_so_at_once() -> None:
    """Others would wait under the next membership for whoever is in it and has gone."""
    num_left = Counter[str]()

    class Counting(Store):
        def add(self, key: str, amount: int) -> int:
            num_left[key] += amount
            return 3 if key == "nodes" else num_left[key]

    leaving = Membership(generation=5, nodes=(0,), leaving=(1, 2), num_known=3, plan="")
    told = []
    for node in leaving.leaving:
        process = WatchedProcess(SimpleNamespace(), None)  # type: ignore[arg-type]
        agent = NodeAgent(node, Counting(), [process] * 2, lambda membership, _: membership, 1.0, WATCHDOG, leaving)  # type: ignore[arg-type]
        for _ in range(2):
            agent._heard(process, "left", 5)
        told.append([(change.kind, change.node) for change in agent._changes(node, leaving, None, ())])
        assert agent._changes(node, replace(leaving, generation=6), None, ()) == []
    assert told == [[], [("left", 1), ("left", 2)]]


class FullStore(dict[str, str]):
    """In which memberships may stand."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> str:  # type: ignore[override]
        return self[key]

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        return self.setdefault(key, desired)

    def add(self, key: str, amount: int) -> int:
        return 2


@pytest.mark.parametrize("newest", [BOTH, ALONE])
def test_what_fails_in_a_node_that_is_out_is_no_failure(newest: Membership) -> None:
    """Its machine was paused, and the others went on without it: of course its process could not."""
    store = FullStore(
        {key_of(BOTH.generation): BOTH.to_json(), key_of(newest.generation): newest.to_json(), "beat/0": "1"}
    )
    ours, theirs = multiprocessing.Pipe()
    theirs.send(("failed", json.dumps({"kind": "failure", "message": "a connection was closed"})))
    process = SimpleNamespace(exitcode=0, join=lambda timeout=None: None, pid=None)
    agent = NodeAgent(1, store, [WatchedProcess(process, ours)], lambda membership, changes: newest, 1e6, WATCHDOG)  # type: ignore[arg-type]
    why = agent.run()
    assert ("failure" in store) == (newest == BOTH)
    assert why == ("a connection was closed" if newest == BOTH else "node 1 was lost: its agent was silent")


def test_where_it_cannot_be_told_what_follows_newcomers_wait(capsys: pytest.CaptureFixture[str]) -> None:
    """Else all agents would die of the same mistake."""
    store = FullStore()
    asked = Counter[str]()

    def fail_for_joined(membership: Membership, changes: Sequence[Change]) -> Membership:
        asked.update(change.kind for change in changes)
        if any(change.kind == "joined" for change in changes):
            raise KeyError("a template that is missing")
        return replace(membership, generation=membership.generation + 1, nodes=(0,))

    first = Membership(generation=1, nodes=(0, 2), num_known=1, plan="")
    agent = NodeAgent(0, store, (), fail_for_joined, 1.0, WATCHDOG, first)
    for _ in range(3):
        agent._propose_what_follows(0, None, [])
    assert (store, asked) == ({}, {"joined": 1})
    assert "a template that is missing" in capsys.readouterr().err
    agent._propose_what_follows(0, None, [2])
    assert asked == {"joined": 2, "lost": 2}
    assert Membership.from_json(store[key_of(2)]).nodes == (0,)


def test_a_loss_that_cannot_be_dealt_with_ends_the_training() -> None:
    """And all start anew."""
    store = FullStore()

    def fail(membership: Membership, changes: Sequence[Change]) -> Membership:
        raise KeyError("a template that is missing")

    NodeAgent(0, store, (), fail, 1.0, WATCHDOG, BOTH)._propose_what_follows(0, None, [1])
    told = Membership.from_json(store[key_of(2)])
    assert (told.everyone, told.saves, told.is_urgent) == ((), False, True)
    assert "a template that is missing" in (told.stop or "")
    assert [(change.kind, change.node) for change in told.changes] == [("lost", 1)]


def test_a_node_that_is_warned_says_so_once_where_all_are_to_stop() -> None:
    agent = NodeAgent(0, Store(), (), lambda membership, _: membership, 1.0, WATCHDOG)  # type: ignore[arg-type]
    agent.is_warned = True
    assert [change.kind for change in agent._changes(0, BOTH, None, ())] == ["leaving"]
    assert agent._changes(0, replace(BOTH, stop="no pipeline is whole"), None, ()) == []


def test_a_spare_that_is_warned_ends() -> None:
    """It has nothing to hand over."""
    store = FullStore({key_of(1): SPARE.to_json(), "beat/0": "1"})
    agent = NodeAgent(1, store, (), lambda membership, changes: membership, 1e6, WATCHDOG)  # type: ignore[arg-type]
    agent.is_warned = True
    assert agent.run() is None
    assert key_of(2) not in store


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"finished": ""}, None),
        ({"finished": "", "failure": '{"kind": "failure", "message": "division by zero"}'}, "division by zero"),
        ({key_of(2): replace(BOTH, generation=2, nodes=(), stop="too few").to_json()}, "too few"),
        ({key_of(2): replace(BOTH, generation=2, nodes=(1,)).to_json()}, None),
    ],
)
def test_an_agent_says_why_its_part_is_over(more: dict[str, str], why: str | None) -> None:
    """So that whoever joins again after a loss does, and does not when all is done."""
    store = FullStore({key_of(1): BOTH.to_json(), "beat/1": "1", **more})
    agent = NodeAgent(0, store, (), lambda membership, changes: membership, 1e6, WATCHDOG)  # type: ignore[arg-type]
    told = agent.run()
    assert (told is None) == (why is None)
    assert (why or "") in (told or "")
