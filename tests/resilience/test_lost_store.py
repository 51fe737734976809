"""The process that has the store dies or is stopped: training goes on, and loses nothing but time."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from interrupted_training import STEPS, at, config_of, die, failures, once, train_and, undisturbed
from ledger import applied_ids, recorded
from sampling import in_campaigns
from test_listen import train_elsewhere

from motet.config import RunConfig
from motet.resilience import agent
from motet.resilience.agent import NodeAgent
from motet.resilience.membership import MembershipNotice
from motet.resilience.process_control import WatchedProcess
from motet.resilience.recover import TrainingProcess
from motet.resilience.store import keeper
from motet.resilience.store import store as store_module


@contextmanager
def store_pid() -> Iterator[Callable[[], int]]:
    """The number of the newest process that has the store, of those that are started meanwhile."""
    host, pid = store_module._host_store, multiprocessing.get_context("fork").Value("i", 0)

    def noted(*arguments: Any) -> None:
        pid.value = os.getpid()
        host(*arguments)

    with mock.patch.object(store_module, "_host_store", noted):
        yield lambda: pid.value


def begun(folder: Path) -> list[int]:
    """The steps that the process which has begun the most of them has begun."""
    ledgers = [path.read_text().splitlines() for path in folder.glob("*.ledger")]
    steps = [[int(line.split()[1]) for line in lines if line.startswith("began")] for lines in ledgers]
    return max(steps, key=len)


def kinds(config: RunConfig) -> list[list[str]]:
    return [[change["kind"] for change in line["changes"]] for line in failures(config)]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_training_goes_on_without_interruption(tmp_path: Path, how: str) -> None:
    """A store that is stopped has its port still."""
    config = config_of(tmp_path)
    with store_pid() as pid, recorded(tmp_path), mock.patch.object(keeper, "store_timeout_s", return_value=1.0):
        result = train_and(config, at(2, 3, lambda: os.kill(pid(), signal.Signals[how])))
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert result["world_size"] == 4
    assert begun(tmp_path) == list(range(1, STEPS + 1))
    assert applied_ids(tmp_path).keys() == set(range(1, STEPS + 1))
    [line] = failures(config)
    assert [(change["kind"], change["how"]) for change in line["changes"]] == [
        ("store", "its process was ended by SIGKILL")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("whole_node", [True, *in_campaigns([False])])
def test_a_node_dies_with_the_store(tmp_path: Path, whole_node: bool) -> None:
    config = config_of(tmp_path, train__failures={"tolerate": 1, "detect_s": 3})

    def die_together() -> None:
        os.kill(pid(), signal.SIGKILL)
        os.kill(os.getppid() if whole_node else os.getpid(), signal.SIGKILL)

    with store_pid() as pid, recorded(tmp_path):
        result = train_and(config, at(2, 3, die_together))
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert result["world_size"] == 2
    assert len(begun(tmp_path)) == STEPS + 1
    assert applied_ids(tmp_path).keys() == set(range(1, STEPS + 1))
    assert kinds(config) == [["store"], ["lost"]]


@pytest.mark.slow
def test_the_store_dies_twice_during_a_recovery(tmp_path: Path) -> None:
    """Some have met already, some not. Nothing but the interrupted step is done again."""
    config = config_of(tmp_path)
    join_world, firsts = TrainingProcess._join_world, [once(), once()]

    def join_without_store(self: TrainingProcess, call: MembershipNotice) -> None:
        generation = call.membership.generation
        if generation > 1 and call.rank == 0 and firsts[generation > 2]():
            os.kill(pid(), signal.SIGKILL)
        join_world(self, call)

    with (
        store_pid() as pid,
        recorded(tmp_path),
        mock.patch.object(TrainingProcess, "_join_world", join_without_store),
    ):
        result = train_and(config, at(2, 3, die))
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert result["world_size"] == 2
    assert len(begun(tmp_path)) == STEPS + 1
    assert applied_ids(tmp_path).keys() == set(range(1, STEPS + 1))
    told = kinds(config)
    assert told.count(["store"]) == 2
    [changes] = [changes for changes in told if changes != ["store"]]
    assert changes[0] == "lost"
    assert set(changes[1:]) == {"again"}


@pytest.mark.slow
def test_the_store_dies_at_the_end(tmp_path: Path) -> None:
    """When some node's processes have come to the end, and others have not."""
    config = config_of(tmp_path)
    heard, first = NodeAgent._handle_message, once()

    def hear(self: NodeAgent, watched: WatchedProcess, word: str, more: object) -> None:
        if word == "done" and first():
            os.kill(pid(), signal.SIGKILL)
        heard(self, watched, word, more)

    with store_pid() as pid, mock.patch.object(NodeAgent, "_handle_message", hear):
        result = train_and(config, lambda trainer: None)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert result["world_size"] == 4


@pytest.mark.slow
def test_the_store_dies_while_nodes_are_awaited(tmp_path: Path) -> None:
    """Whoever has come already comes again."""
    config = config_of(tmp_path, train__failures={"tolerate": 1, "detect_s": 3})
    register, first = agent.register, once()

    def register_and_kill(store: Any) -> int:
        number = register(store)
        if number == 1 and first():
            os.kill(pid(), signal.SIGKILL)
        return number

    with store_pid() as pid, mock.patch.object(agent, "register", register_and_kill):
        result, _ = train_elsewhere(config)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert result["world_size"] == 4
    assert kinds(config) == [["store"]]
