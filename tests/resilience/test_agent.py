"""What agents make of what they see."""

import json
import multiprocessing
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from motet.resilience.agent import NodeAgent
from motet.resilience.membership import FAILURE, OPEN, OVER, Address, Change, Membership, StoreLostError, key
from motet.resilience.membership import RUN as RUN_KEY
from motet.resilience.process_control import WatchedProcess
from motet.resilience.store.store_failover import REJOIN_S, Successor

PATIENCE_S = 1e6


class Store:
    """Of two nodes that have been registered, and nothing else."""

    def get(self, key: str) -> str:
        assert key == OPEN
        return "2"

    def add(self, key: str, amount: int) -> int:
        assert (key, amount) == ("nodes", 0)
        return 0


def changes_of(
    membership: Membership, *, how: str | None = None, silent: tuple[int, ...] = ()
) -> list[tuple[str, int]]:
    agent = NodeAgent(0, Store(), (), lambda membership, changes: membership, 1.0, PATIENCE_S)  # type: ignore[arg-type]
    changes: list[Change] = agent._changes(0, membership, how, silent)
    return [(change.kind, change.node) for change in changes]


BOTH = Membership(generation=1, nodes=(0, 1), num_admitted=2, plan="")
SPARE = Membership(generation=1, nodes=(0,), waiting=(1,), num_admitted=2, plan="")
ALONE = Membership(
    generation=2,
    nodes=(0,),
    num_admitted=2,
    plan="",
    changes=(Change("lost", 1, "its agent was silent", 0.0),),
)


def test_a_silent_node_is_lost_once() -> None:
    """Whoever hears of its loss between looking and telling does not tell it again."""
    assert changes_of(BOTH, silent=(1,)) == [("lost", 1)]
    assert changes_of(ALONE, silent=(1,)) == []


def test_own_losses_and_new_nodes_are_told() -> None:
    assert changes_of(BOTH, how="process 0 was ended by SIGKILL") == [("lost", 0)]
    assert changes_of(Membership(generation=1, nodes=(0,), num_admitted=1, plan="")) == [("joined", 1)]
    assert changes_of(BOTH) == []


def test_nodes_that_leave_do_so_at_once() -> None:
    """Others would wait under the next membership for whoever is in it and has gone."""
    store = FullStore()
    leaving = Membership(generation=5, nodes=(0,), leaving=(1, 2), num_admitted=3, plan="")
    told = []
    for node in leaving.leaving:
        process = WatchedProcess(SimpleNamespace(), None)  # type: ignore[arg-type]
        agent = NodeAgent(node, store, [process] * 2, lambda membership, _: membership, 1.0, PATIENCE_S)  # type: ignore[arg-type]
        agent._failover.known.append(leaving)
        assert not agent._reconnect()
        for _ in range(2):
            agent._handle_message(process, "left", 5)
        told.append([(change.kind, change.node) for change in agent._changes(node, leaving, None, ())])
        assert agent._changes(node, replace(leaving, generation=6), None, ()) == []
    assert told == [[], [("left", 1), ("left", 2)]]


class FullStore(dict[str, str]):
    """In which memberships may stand. Two nodes have been registered."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        super().__init__({RUN_KEY: "a run", OPEN: "2", **(values or {})})

    address = ("here", 1)

    def connect(self, address: Address | None = None) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> str:  # type: ignore[override]
        return self[key]

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        if key == FAILURE:  # Whoever keeps the store sees it.
            self[OVER] = ""
        return self.setdefault(key, desired)

    def add(self, key: str, amount: int) -> int:
        return 0


@pytest.mark.parametrize("newest", [BOTH, ALONE])
def test_what_fails_in_a_node_that_is_out_is_no_failure(newest: Membership) -> None:
    """Its machine was paused, and the others went on without it: of course its process could not."""
    store = FullStore(
        {
            key("membership", BOTH.generation): BOTH.to_json(),
            key("membership", newest.generation): newest.to_json(),
            "beat/0": "1",
        }
    )
    ours, theirs = multiprocessing.Pipe()
    theirs.send(("failed", json.dumps({"kind": "failure", "message": "a connection was closed"})))
    process = SimpleNamespace(exitcode=0, join=lambda timeout=None: None, pid=None)
    agent = NodeAgent(1, store, [WatchedProcess(process, ours)], lambda membership, changes: newest, 1e6, PATIENCE_S)  # type: ignore[arg-type]
    why = agent.run()
    assert (FAILURE in store) == (newest == BOTH)
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

    first = Membership(generation=1, nodes=(0, 2), num_admitted=1, plan="")
    agent = NodeAgent(0, store, (), fail_for_joined, 1.0, PATIENCE_S)
    agent._failover.known.append(first)
    for _ in range(3):
        agent._propose(0, None, [])
    assert (key("membership", 2) in store, asked) == (False, {"joined": 1})
    assert "a template that is missing" in capsys.readouterr().err
    agent._propose(0, None, [2])
    assert asked == {"joined": 2, "lost": 2}
    assert Membership.from_json(store[key("membership", 2)]).nodes == (0,)


def test_a_loss_that_cannot_be_dealt_with_ends_the_training() -> None:
    """And all start anew."""
    store = FullStore()

    def fail(membership: Membership, changes: Sequence[Change]) -> Membership:
        raise KeyError("a template that is missing")

    agent = NodeAgent(0, store, (), fail, 1.0, PATIENCE_S)
    agent._failover.known.append(BOTH)
    agent._propose(0, None, [1])
    told = Membership.from_json(store[key("membership", 2)])
    assert (told.all_nodes, told.saves_checkpoint, told.is_urgent) == ((), False, True)
    assert "a template that is missing" in (told.stop or "")
    assert [(change.kind, change.node) for change in told.changes] == [("lost", 1)]


def test_a_node_that_is_warned_says_so_once_where_all_are_to_stop() -> None:
    agent = NodeAgent(0, Store(), (), lambda membership, _: membership, 1.0, PATIENCE_S)  # type: ignore[arg-type]
    agent.is_warned = True
    assert [change.kind for change in agent._changes(0, BOTH, None, ())] == ["leaving"]
    assert agent._changes(0, replace(BOTH, stop="no pipeline is whole"), None, ()) == []


def test_a_spare_that_is_warned_ends() -> None:
    """It has nothing to hand over."""
    store = FullStore({key("membership", 1): SPARE.to_json(), "beat/0": "1"})
    agent = NodeAgent(1, store, (), lambda membership, changes: membership, 1e6, PATIENCE_S)  # type: ignore[arg-type]
    agent.is_warned = True
    assert agent.run() is None
    assert key("membership", 2) not in store


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({OVER: ""}, None),
        ({OVER: "", FAILURE: '{"kind": "failure", "message": "division by zero"}'}, "division by zero"),
        ({key("membership", 2): replace(BOTH, generation=2, nodes=(), stop="too few").to_json()}, "too few"),
        ({key("membership", 2): replace(BOTH, generation=2, nodes=(1,)).to_json()}, None),
    ],
)
def test_an_agent_says_why_its_part_is_over(more: dict[str, str], why: str | None) -> None:
    """So that whoever joins again after a loss does, and does not when all is done."""
    store = FullStore({key("membership", 1): BOTH.to_json(), "beat/1": "1", **more})
    agent = NodeAgent(0, store, (), lambda membership, changes: membership, 1e6, PATIENCE_S)  # type: ignore[arg-type]
    told = agent.run()
    assert (told is None) == (why is None)
    assert (why or "") in (told or "")


class NewStore(FullStore):
    """In the place of one that was lost: nobody has written anything but its keeper."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        super().__init__(values)
        del self[OPEN]


def back(
    node: int, store: FullStore, *known: Membership, successor: Successor | None = None, has_met: bool = True
) -> NodeAgent:
    """An agent that has lost the store, after its first round with a new one."""
    agent = NodeAgent(node, store, (), successor or (lambda membership, _: membership), 1.0, PATIENCE_S)  # type: ignore[arg-type]
    agent._failover.known.extend(known)
    agent._failover.lose_store(agent._last_round)
    agent._was_in = True
    agent._met_in = known[-1].generation if has_met else 0
    assert not agent._reconnect()
    agent._act(agent._last_round)
    return agent


def test_nothing_is_proposed_before_all_are_back() -> None:
    """The other one knows the newer membership, and would not have been asked."""
    store, newer = NewStore(), replace(BOTH, generation=2)
    first = back(0, store, BOTH)
    assert not first._failover.is_open
    assert (OPEN in store, key("membership", 2) in store) == (False, False)
    back(1, store, BOTH, newer)
    first._act(first._last_round)
    assert (first.membership, OPEN in store) == (newer, True)


@pytest.mark.parametrize("has_met", [(True, True), (False, True), (True, False)])
def test_ranks_that_had_not_met_meet_anew(has_met: tuple[bool, bool]) -> None:
    def again(membership: Membership, changes: Sequence[Change]) -> Membership:
        assert [change.kind for change in changes] == ["again"]
        return replace(membership, generation=membership.generation + 1)

    store = NewStore()
    agents = [back(node, store, BOTH, successor=again, has_met=has_met[node]) for node in BOTH.nodes]
    for agent in agents:
        agent._act(agent._last_round)
    assert (key("membership", 2) in store) == (not all(has_met))


@pytest.mark.parametrize("could_go_on", [False, True])
def test_who_stays_away_is_lost(could_go_on: bool) -> None:
    """Those that might go on without the others have ended by then."""

    def successor(membership: Membership, changes: Sequence[Change]) -> Membership:
        return replace(membership, generation=membership.generation + 1, saves_checkpoint=could_go_on)

    agent = back(0, NewStore(), BOTH, successor=successor)
    short_s, long_s = 1.0 + REJOIN_S, PATIENCE_S + 1.0 + REJOIN_S
    assert [agent._failover.all_are_back(BOTH, waited_s) for waited_s in (0.5, short_s, long_s)] == [
        False,
        not could_go_on,
        True,
    ]
    agent.store.set("ended/1", "")
    assert agent._failover.all_are_back(BOTH, 0.0)


def test_who_knows_another_membership_than_the_others_ends() -> None:
    """It was away for too long: they have agreed on another one."""
    agent = NodeAgent(1, NewStore({key("membership", 2): ALONE.to_json()}), (), lambda m, _: m, 1.0, PATIENCE_S)  # type: ignore[arg-type]
    agent._failover.known += [BOTH, replace(ALONE, nodes=(1,))]
    assert agent.run() == "node 1 was lost: the others went on without it while it did not reach the store"


def test_a_store_of_another_training_is_left() -> None:
    store = FullStore({key("membership", 1): BOTH.to_json(), "beat/1": "1"})
    agent = NodeAgent(0, store, (), lambda m, _: m, 1.0, PATIENCE_S)  # type: ignore[arg-type]
    assert not agent._reconnect()
    store[RUN_KEY] = "another one"
    agent._failover.lose_store(agent._last_round)
    assert "another training has begun" in (agent.run() or "")


def test_without_a_store_it_ends_in_the_end() -> None:
    class NoStore(FullStore):
        def connect(self, address: Address | None = None) -> None:
            raise StoreLostError("nobody listens")

    why = NodeAgent(0, NoStore(), (), lambda m, _: m, 1.0, 0.1).run()  # type: ignore[arg-type]
    assert why == "the store does not answer any more (for 0.1 s)"


@pytest.mark.parametrize(("node", "is_kept"), [(0, True), (2, False)])
def test_who_is_in_no_membership_gets_another_number(node: int, is_kept: bool) -> None:
    store = NewStore({key("membership", 1): BOTH.to_json()})
    agent = NodeAgent(node, store, (), lambda m, _: m, 1.0, PATIENCE_S)  # type: ignore[arg-type]
    assert not agent._reconnect()
    assert agent.node == (node if is_kept else None)


def test_who_has_no_part_yet_can_be_ended_without_a_store() -> None:
    class NoStore(FullStore):
        def connect(self, address: Address | None = None) -> None:
            raise StoreLostError("nobody listens")

    agent = NodeAgent(None, NoStore(), (), lambda m, _: m, 1.0, PATIENCE_S)  # type: ignore[arg-type]
    agent.warn()
    assert agent.run() is None
