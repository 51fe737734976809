"""What agents make of what they see."""

import json
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from agents import FullStore, agent_of

from motet.resilience import agent as agent_module
from motet.resilience.membership import FAILURE, Change, Membership, key
from motet.resilience.process_control import WatchedProcess
from motet.resilience.training_end import watch_training


def a_process() -> WatchedProcess:
    return WatchedProcess(SimpleNamespace(), None)  # type: ignore[arg-type]


def changes_of(
    membership: Membership, *, how: str | None = None, silent: tuple[int, ...] = ()
) -> list[tuple[str, int]]:
    store = FullStore()
    for node in silent:
        del store.values[key("alive", node)]
    return [(change.kind, change.node) for change in agent_of(0, store)._changes(0, membership, how)]


BOTH = Membership(generation=1, nodes=(0, 1), num_admitted=2, plan="")
SPARE = Membership(generation=1, nodes=(0,), waiting=(1,), num_admitted=2, plan="")
ALONE_FROM_THE_START = Membership(generation=1, nodes=(0,), num_admitted=2, plan="")
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


def test_a_slow_node_leaves_if_there_is_a_spare() -> None:
    """One for each spare: after that, somebody else's report is of another membership."""
    with_spare = replace(BOTH, waiting=(2,), num_admitted=3)
    store = FullStore({key("alive", 2): "", key("node", 2): ""})
    agent = agent_of(0, store)
    agent.known.append(with_spare)
    assert agent._changes(0, with_spare, None) == []
    agent._handle_message(a_process(), "slow", with_spare.generation)
    assert [(change.kind, change.node) for change in agent._changes(0, with_spare, None)] == [("leaving", 0)]
    assert agent._changes(0, replace(with_spare, waiting=()), None) == []
    assert agent._changes(0, replace(with_spare, generation=with_spare.generation + 1), None) == []
    del store.values[key("alive", 2)]
    assert agent._changes(0, with_spare, None) == []


def test_nodes_that_leave_do_so_at_once() -> None:
    """Others would wait under the next membership for whoever is in it and has gone."""
    leaving = Membership(generation=5, nodes=(0,), leaving=(1, 2), num_admitted=3, plan="")
    store = FullStore({key("alive", 2): ""})
    told = []
    for node in leaving.leaving:
        process = a_process()
        agent = agent_of(node, store)
        agent.processes = [process] * 2
        agent.known.append(leaving)
        for _ in range(2):
            agent._handle_message(process, "left", 5)
        told.append([(change.kind, change.node) for change in agent._changes(node, leaving, None)])
        assert agent._changes(node, replace(leaving, generation=6), None) == []
    assert told == [[], [("left", 1), ("left", 2)]]


@pytest.mark.parametrize("newest", [BOTH, ALONE])
def test_what_fails_in_a_node_that_is_out_is_no_failure(newest: Membership) -> None:
    """Its machine was paused, and the others went on without it: of course its process could not."""
    store = FullStore({key("membership", each.generation): each.to_json() for each in (BOTH, newest)})
    ours, theirs = multiprocessing.Pipe()
    theirs.send(("failed", json.dumps({"kind": "failure", "message": "a connection was closed"})))
    process = SimpleNamespace(exitcode=0, join=lambda timeout=None: None, pid=None)
    agent = agent_of(1, store, lambda membership, changes, is_settled: newest)
    agent.silence_s, agent.processes = 1e6, [WatchedProcess(process, ours)]  # type: ignore[arg-type]
    why = agent.run()
    assert (FAILURE in store.values) == (newest == BOTH)
    assert why == ("a connection was closed" if newest == BOTH else "node 1 was lost: its agent was silent")


def test_where_it_cannot_be_told_what_follows_newcomers_wait(capsys: pytest.CaptureFixture[str]) -> None:
    """Else all agents would die of the same mistake."""
    store = FullStore({key("alive", 2): ""})
    asked = Counter[str]()

    def fail_for_joined(membership: Membership, changes: Sequence[Change], *, is_settled: bool) -> Membership:
        asked.update(change.kind for change in changes)
        if any(change.kind == "joined" for change in changes):
            raise KeyError("a template that is missing")
        return replace(membership, generation=membership.generation + 1, nodes=(0,))

    first = Membership(generation=1, nodes=(0, 2), num_admitted=1, plan="")
    agent = agent_of(0, store, fail_for_joined)
    agent.known.append(first)
    for _ in range(3):
        agent._propose(0, None)
    assert (key("membership", 2) in store.values, asked) == (False, {"joined": 1})
    assert "a template that is missing" in capsys.readouterr().err
    del store.values[key("alive", 2)]
    agent._propose(0, None)
    assert asked == {"joined": 2, "lost": 2}
    assert Membership.from_json(store.values[key("membership", 2)]).nodes == (0,)


def test_a_loss_that_cannot_be_dealt_with_ends_the_training() -> None:
    """And all start anew."""
    store = FullStore()

    def fail(membership: Membership, changes: Sequence[Change], *, is_settled: bool) -> Membership:
        raise KeyError("a template that is missing")

    del store.values[key("alive", 1)]
    agent = agent_of(0, store, fail)
    agent.known.append(BOTH)
    agent._propose(0, None)
    told = Membership.from_json(store.values[key("membership", 2)])
    assert (told.all_nodes, told.saves_checkpoint, told.is_urgent) == ((), False, True)
    assert "a template that is missing" in (told.stop or "")
    assert [(change.kind, change.node) for change in told.changes] == [("lost", 1)]


def test_a_node_that_is_warned_says_so_once_where_all_are_to_stop() -> None:
    agent = agent_of(0, FullStore())
    agent.is_warned = True
    assert [change.kind for change in agent._changes(0, BOTH, None)] == ["leaving"]
    assert agent._changes(0, replace(BOTH, stop="no pipeline is whole"), None) == []


def test_a_spare_that_is_warned_ends() -> None:
    """It has nothing to hand over."""
    store = FullStore({key("membership", 1): SPARE.to_json()})
    agent = agent_of(1, store)
    agent.is_warned = True
    assert agent.run() is None
    assert key("membership", 2) not in store.values


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({key("result", 1): "{}", key("done", 1, 0): "", key("done", 1, 1): ""}, None),
        ({FAILURE: '{"kind": "failure", "message": "division by zero"}'}, "division by zero"),
        ({key("membership", 2): replace(BOTH, generation=2, nodes=(), stop="too few").to_json()}, "too few"),
        ({key("membership", 2): replace(BOTH, generation=2, nodes=(1,)).to_json()}, None),
    ],
)
def test_an_agent_says_why_its_part_is_over(more: dict[str, str], why: str | None) -> None:
    """So that whoever joins again after a loss does, and does not when all is done."""
    told = agent_of(0, FullStore({key("membership", 1): BOTH.to_json(), **more})).run()
    assert (told is None) == (why is None)
    assert (why or "") in (told or "")


def test_what_the_store_does_not_take_is_written_later() -> None:
    store = FullStore({key("membership", 1): ALONE_FROM_THE_START.to_json()})
    agent = agent_of(0, store)
    agent.is_over()
    store.is_away = True
    agent._handle_message(a_process(), "result", (1, "{}"))
    assert not agent.is_over()
    assert key("result", 1) not in store.values
    store.is_away = False
    agent.is_over()
    assert store.values[key("result", 1)] == "{}"


def test_training_goes_on_without_a_store_but_nobody_waits_for_it_forever() -> None:
    store = FullStore({key("membership", 1): BOTH.to_json()})
    agent = agent_of(0, store)
    assert not agent.is_over()
    store.is_away = True
    agent.store_patience_s = 0.0
    assert not agent.is_over()
    assert not agent.is_over()
    agent._handle_message(a_process(), "interrupted", 1)
    assert not agent.is_over(), "it waits from now on"
    assert agent.is_over()
    assert agent._end_reason == "the store has not answered for 0 s"


@pytest.mark.parametrize("is_warned", [False, True])
def test_who_has_finished_does_not_wait_for_a_store_forever(monkeypatch: pytest.MonkeyPatch, is_warned: bool) -> None:
    monkeypatch.setattr(agent_module, "find_loss", lambda *_: None)
    monkeypatch.setattr(agent_module, "receive_from", lambda _: ())
    store = FullStore({key("membership", 1): BOTH.to_json()})
    agent = agent_of(0, store)
    assert not agent.is_over()
    store.is_away, agent.store_patience_s, agent.is_warned = True, 0.0, is_warned
    own, pipe = multiprocessing.Pipe()
    agent.processes = [WatchedProcess(multiprocessing.current_process(), pipe, is_done=True)]
    monkeypatch.setattr(agent_module, "kill_all", lambda _: None)
    assert not agent.is_over()
    assert agent.is_over()
    told = "the store has not answered for 0 s; the training is finished, but its result could not be reported"
    assert agent._end_reason == told
    own.close()
    pipe.close()


def test_who_started_the_nodes_does_not_wait_for_a_store_when_they_have_ended(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class EndingAgent:
        num_asked = 0

        def is_alive(self) -> bool:
            self.num_asked += 1
            return self.num_asked < 3

    store, agent = FullStore({key("membership", 1): BOTH.to_json()}), EndingAgent()
    store.is_away = True
    end = watch_training(store, BOTH, [agent])  # type: ignore[list-item]
    assert (end.result, end.failure, end.last, agent.num_asked) == (None, None, BOTH, 3)
    assert capfd.readouterr().err.count("memberships do not change") == 1


def test_a_spare_that_has_gone_is_told_when_something_changes() -> None:
    store = FullStore({key("alive", 0): "", "node/2": "", key("alive", 2): ""})
    del store.values[key("alive", 1)]
    agent = agent_of(0, store)
    assert agent._changes(0, replace(SPARE, num_admitted=3), None) == []
    changes = agent._changes(0, SPARE, None)
    assert [(change.kind, change.node) for change in changes] == [("joined", 2), ("lost", 1)]
