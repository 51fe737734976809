"""A node sums with a neighbour before it is counted in."""

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from agents import FullStore, agent_of
from interrupted_training import config_of, failures, train_and, undisturbed
from joining_nodes import one_that_joins
from training import plan_of
from waiting import wait_until

from motet.resilience.failure_log import FAILURES
from motet.resilience.health import neighbours, trial_process
from motet.resilience.health.neighbours import DEATH_S, GONE, MAX_NEIGHBOURS, TRIAL_S, NeighbourTrials
from motet.resilience.health.trial_process import serve_trials
from motet.resilience.meeting_place import open_meeting_place
from motet.resilience.membership import Membership, TrialOutcome, TrialRequest, key
from motet.resilience.process_control import Children
from motet.runtime.training.trainer import Trainer

TRAINING = Membership(generation=1, nodes=(0, 1), num_admitted=2, plan="")


@contextmanager
def trials() -> Iterator[NeighbourTrials]:
    """With a real process."""
    with Children() as children:
        ours, theirs = multiprocessing.Pipe()
        children.start(serve_trials, theirs, [ours])
        theirs.close()
        yield NeighbourTrials(ours)


class Node:
    """A neighbour that answers, or an agent that wants to join."""

    def __init__(self, store: FullStore, stack: ExitStack) -> None:
        self.store, self.trials = store, stack.enter_context(trials())

    def answer(self, node: int) -> None:
        self.trials.answer(node, self.store.values, self.store.create, time.monotonic())

    def is_fit(self, membership: Membership | None = TRAINING) -> bool:
        return self.trials.is_fit(self.store, membership, time.monotonic())


def outcome_of(candidate: Node, answers: Callable[[], object]) -> str | None:
    """Why the candidate may not join; None: it may."""
    done: list[str | None] = []

    def is_over() -> bool:
        answers()
        if candidate.is_fit() or candidate.trials.failure is not None:
            done.append(candidate.trials.failure)
        return bool(done)

    wait_until(is_over)
    return done[0]


def add_wrongly(total: torch.Tensor) -> None:
    total.mul_(3).add_(1)


def test_a_sound_node_is_fit_after_one_sum() -> None:
    store = FullStore()
    with ExitStack() as stack:
        candidate, first, second = Node(store, stack), Node(store, stack), Node(store, stack)

        def answers() -> None:
            first.answer(0)
            second.answer(1)

        assert outcome_of(candidate, answers) is None
    assert {name for name in store.values if name.startswith("tri")} == {key("trial", 0), key("tried", 0)}


def test_a_neighbour_that_sums_wrongly_keeps_nobody_out() -> None:
    store = FullStore()
    with ExitStack() as stack:
        with mock.patch.object(dist, "all_reduce", add_wrongly):
            bad = Node(store, stack)
        candidate, good = Node(store, stack), Node(store, stack)
        with mock.patch.object(neighbours.random, "choice", min):

            def answers() -> None:
                bad.answer(0)
                good.answer(1)

            assert outcome_of(candidate, answers) is None
    told = TrialOutcome.from_json(store.values[key("tried", 0)])
    assert told.failure is not None
    assert key("tried", 1) in store.values


def test_a_candidate_that_sums_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "DEATH_S", 0.0)
    store = FullStore()
    with ExitStack() as stack:
        with mock.patch.object(torch.Tensor, "sum", return_value=torch.tensor(2)):
            candidate = Node(store, stack)
        first, second = Node(store, stack), Node(store, stack)

        def answers() -> None:
            first.answer(0)
            second.answer(1)

        wrong = "2 of 4096 sums of whole numbers are wrong"
        told = f"it could not sum with a node that trains (node 0: {wrong}; node 1: {wrong})"
        assert outcome_of(candidate, answers) == told


def test_a_candidate_that_nobody_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port of its meeting place is closed to others."""
    monkeypatch.setattr(trial_process, "CONNECT_S", 0.2)  # torch tries again so long.
    monkeypatch.setattr(neighbours, "DEATH_S", 0.0)
    store = FullStore()

    def open_elsewhere(host: str) -> tuple[dist.TCPStore, int]:
        return open_meeting_place(host)[0], 9  # Discard: nobody listens.

    with ExitStack() as stack:
        with mock.patch.object(trial_process, "open_meeting_place", open_elsewhere):
            candidate = Node(store, stack)
        first, second = Node(store, stack), Node(store, stack)

        def answers() -> None:
            first.answer(0)
            second.answer(1)

        told = outcome_of(candidate, answers)
    assert told is not None
    assert told.startswith("it could not sum with a node that trains (node 0: ")
    assert "Error" in told


def test_a_trial_process_that_is_stopped_or_lost_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FullStore()
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    request = TrialRequest(neighbour=1, address="127.0.0.1:9", name="a")
    store.create(key("trial", 0), request.to_json())
    of_lost = NeighbourTrials(ours)
    of_lost.answer(1, store.values, store.create, 0.0)
    assert json.loads(store.values[key("tried", 0)]) == {"failure": GONE}
    for now in (0.0, 0.0, 0.0, DEATH_S):
        assert not of_lost.is_fit(store, TRAINING, now)
        assert of_lost.failure is None
    assert not of_lost.is_fit(store, TRAINING, DEATH_S + 0.1)
    assert of_lost.failure == f"it could not sum with a node that trains (node 0: {GONE}; node 1: {GONE})"


class Silent(NeighbourTrials):
    """Whose process says what the test makes it say."""

    def __init__(self) -> None:
        super().__init__(multiprocessing.Pipe()[0])
        self.said: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []

    def _send(self, message: Any) -> None:
        self.asked.append(message)

    def _received(self) -> list[dict[str, Any]]:
        said, self.said = self.said, []
        return said


def members(number: int) -> tuple[FullStore, Membership]:
    store = FullStore({key("alive", n): "" for n in range(number)})
    return store, Membership(generation=1, nodes=tuple(range(number)), num_admitted=number, plan="")


def test_a_silent_neighbour_is_left_for_another_one_and_the_wait_has_a_limit() -> None:
    store, membership = members(9)
    candidate, now = Silent(), 0.0
    for tried in range(MAX_NEIGHBOURS):
        assert candidate.failure is None
        candidate.is_fit(store, membership, now)
        assert len(candidate.asked) == 2 * tried + 1
        candidate.is_fit(store, membership, now + TRIAL_S)
        now += TRIAL_S + 0.1
    candidate.is_fit(store, membership, now)
    candidate.is_fit(store, membership, now + DEATH_S)
    assert candidate.failure is None
    candidate.is_fit(store, membership, now + DEATH_S + 0.1)
    assert (candidate.failure or "").count(f"no sum within {TRIAL_S:g} s") == MAX_NEIGHBOURS


def test_a_neighbour_that_is_lost_does_not_count() -> None:
    store, membership = members(2)
    candidate = Silent()
    candidate.is_fit(store, membership, 0.0)
    neighbour = candidate._trial.neighbour if candidate._trial else -1
    del store.values[key("alive", neighbour)]
    candidate.is_fit(store, membership, 0.0)
    assert candidate._trial is not None
    assert candidate._trial.neighbour == 1 - neighbour
    del store.values[key("alive", 1 - neighbour)]
    for _ in range(3):  # Nobody is there; whoever comes next is asked.
        assert not candidate.is_fit(store, membership, 1e9)
    assert (candidate.failure, candidate._trial) == (None, None)


def test_a_neighbour_answers_one_after_the_other_and_only_what_it_was_asked() -> None:
    store = FullStore()
    for number, neighbour in enumerate((1, 0, 1)):
        request = TrialRequest(neighbour=neighbour, address="127.0.0.1:9", name=str(number))
        store.create(key("trial", number), request.to_json())
    node = Silent()
    node.answer(1, store.values, store.create, 0.0)
    assert [message["name"] for message in node.asked] == ["0"]
    node.said = [{"name": "somebody else's", "failure": None}]
    node.answer(1, store.values, store.create, TRIAL_S)
    assert key("tried", 0) not in store.values
    node.said = [{"name": "0", "failure": None}]
    node.answer(1, store.values, store.create, TRIAL_S)
    node.answer(1, store.values, store.create, TRIAL_S)
    assert [message["name"] for message in node.asked] == ["0", "2"]
    node.answer(1, store.values, store.create, 2 * TRIAL_S + 0.1)
    told = {name: json.loads(text)["failure"] for name, text in store.values.items() if name.startswith("tried/")}
    assert told == {"tried/0": None, "tried/2": f"no sum within {TRIAL_S:g} s"}


def test_who_comes_first_sums_with_nobody() -> None:
    """There is no membership, and nobody trains."""
    candidate = Silent()
    assert candidate.is_fit(FullStore(), None, 0.0)
    assert candidate.asked == []


def test_neighbours_that_have_died_are_no_reason_to_refuse() -> None:
    """Their connections break before the store tells of it. Whoever takes their places is asked."""
    store, membership = members(2)
    candidate = Silent()
    for _ in range(2):
        candidate.is_fit(store, membership, 0.0)
        candidate.said = [{"name": candidate.asked[-1]["name"], "failure": "a connection was closed"}]
    candidate.is_fit(store, membership, 0.0)
    assert (candidate._trial, len(candidate._failed)) == (None, 2)
    store.values = {name: value for name, value in store.values.items() if not name.startswith("alive/")}
    candidate.is_fit(store, membership, 1e9)
    assert candidate.failure is None
    store.values[key("alive", 5)] = ""
    candidate.is_fit(store, Membership(generation=2, nodes=(5,), num_admitted=6, plan=""), 1e9)
    assert candidate._trial is not None
    assert candidate._trial.neighbour == 5


def test_two_candidates_have_trials_of_their_own() -> None:
    store, membership = members(2)
    candidates = [Silent(), Silent()]
    for candidate in candidates:
        candidate.is_fit(store, membership, 0.0)
        [opened] = candidate.asked
        candidate.said = [{"name": opened["name"], "port": 9}]
        candidate.is_fit(store, membership, 0.0)
    names = [json.loads(store.values[key("trial", number)])["name"] for number in (0, 1)]
    assert names == [candidate.asked[0]["name"] for candidate in candidates]


def test_an_agent_registers_only_when_it_is_fit(tmp_path: Path) -> None:
    store = FullStore({key("membership", 1): TRAINING.to_json()})
    agent = agent_of(None, store, output=tmp_path)
    agent.trials = Silent()
    for _ in range(3):
        assert not agent.is_over()
    assert agent.node is None
    agent.trials.failure = "it could not sum"
    agent.trials.asked.clear()
    agent._failure = agent.trials.failure
    assert agent.is_over()
    assert agent._end_reason == "this node was not taken in: it could not sum"
    [line] = [json.loads(text) for text in (tmp_path / FAILURES).read_text().splitlines()]
    assert line["changes"][0]["kind"] == "refused"


def test_a_candidate_ends_with_the_training() -> None:
    """Although nobody is left to sum with."""
    over = {key("membership", 1): TRAINING.to_json(), key("result", 1): "{}"}
    agent = agent_of(None, FullStore({**over, key("done", 1, 0): "", key("done", 1, 1): ""}))
    agent.trials = Silent()
    assert agent.run() is None


def test_the_two_meet_at_the_candidate_s_address_alone() -> None:
    with trials() as started:
        started._send({"do": "open", "name": "a", "host": "127.0.0.2"})
        told: list[dict[str, Any]] = []
        wait_until(lambda: told.extend(started._received()) or told)
        address = told[0]["port"]
        socket.create_connection(("127.0.0.2", address)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", address))


def test_the_kernel_ends_a_sum_that_takes_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trial_process, "TRIAL_S", 0.1)
    seen = tmp_path / "pid"

    def hang(host: str) -> None:
        seen.write_text(str(os.getpid()))
        while True:
            signal.pause()

    monkeypatch.setattr(trial_process, "open_meeting_place", hang)
    with trials() as started:
        started._send({"do": "open", "name": "a", "host": "127.0.0.1"})
        wait_until(lambda: seen.exists() and seen.read_text())
        state = Path(f"/proc/{seen.read_text()}/stat")
        wait_until(lambda: not state.exists() or state.read_text().rpartition(") ")[2].startswith("Z"))


@pytest.mark.parametrize("fault", ["wrong sum", "unreachable"])
@pytest.mark.campaign
def test_a_node_that_cannot_sum_is_not_taken_in_and_the_others_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """And no step waits: the losses are those of the undisturbed run, and no membership has changed."""
    config, plan = config_of(tmp_path), plan_of(config_of(tmp_path))
    log = tmp_path / FAILURES

    def at_step(trainer: Trainer) -> None:
        if trainer.finished_steps == 3:
            wait_until(lambda: log.exists() and "refused" in log.read_text())

    def meddle() -> None:
        """In the process of the node that joins."""
        monkeypatch.setattr(neighbours, "DEATH_S", 0.0)
        if fault == "wrong sum":
            trial_process.NUM_SUMMED = 4095
            monkeypatch.setattr(dist, "all_reduce", add_wrongly)
        else:
            monkeypatch.setattr(trial_process, "open_meeting_place", lambda host: (open_meeting_place(host)[0], 9))

    with one_that_joins(config, plan, meddle):
        result = train_and(config, at_step)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    [line] = failures(config)
    [refused] = line["changes"]
    assert (refused["kind"], refused["node"]) == ("refused", None)
    assert refused["how"].startswith("it could not sum with a node that trains (node ")
