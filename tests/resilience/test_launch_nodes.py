"""What the launching process does about processes that die, or are stopped, at its own side."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from interrupted_training import at, config_of, failures, train_and, undisturbed
from test_children import is_running, wait_for
from training import plan_of

from motet.addresses import Address
from motet.config import RunConfig
from motet.errors import UserError
from motet.resilience import launch_nodes
from motet.resilience.agent import NodeAgent
from motet.resilience.launch_nodes import NodesLostError, join_training, train_on_nodes
from motet.resilience.membership import RUN, RunRecord, as_json
from motet.resilience.process_control import Children
from motet.resilience.store import embedded
from motet.resilience.store.embedded import EmbeddedStore, StoreProcess
from motet.resilience.store.store import SECRET_VARIABLE
from motet.runtime.launch import WorkerFailedError

SECRET = "a secret of all machines"


def test_an_agent_that_is_stopped_is_not_waited_for(tmp_path: Path) -> None:
    """The others take it for lost, and train to the end."""
    pids = tmp_path / "pids"

    def stop_agent() -> None:
        pids.write_text(f"{os.getpid()} {os.getppid()}")
        os.kill(os.getppid(), signal.SIGSTOP)

    config = config_of(tmp_path, train__failures={"tolerate": 1, "detect_s": 3})
    result = train_and(config, at(2, 3, stop_agent))
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    [failure] = failures(config)
    assert [(change["kind"], change["node"]) for change in failure["changes"]] == [("lost", 3)]
    wait_for(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()))


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_store_that_does_not_start_is_told(tmp_path: Path, restarts: int) -> None:
    config = config_of(tmp_path, train__failures={"tolerate": 1, "restarts": restarts})
    with (
        mock.patch.object(embedded, "_host_store", side_effect=SystemExit),
        pytest.raises(NodesLostError, match="the store's process does not start"),
    ):
        train_on_nodes(config, plan_of(config), None, num_nodes=4, node_size=1)
    assert len(failures(config)) == restarts + 1


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """Of a store."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with StoreProcess(("127.0.0.1", 0), SECRET.encode(), 1.0) as process, Children() as children:
        process.start(children)
        yield process.address


@pytest.fixture
def store(address: Address) -> Iterator[EmbeddedStore]:
    with EmbeddedStore(address, SECRET.encode(), 30) as client:
        yield client


def start_joining(config: RunConfig, address: Address) -> tuple[BaseProcess, Any]:
    """A process that joins, and the connection through which the numbers of its processes come once it has."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    original = NodeAgent.run

    def run(agent: NodeAgent) -> str | None:
        theirs.send([watched.process.pid for watched in agent.processes])
        return original(agent)

    def join() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        join_training(config, lambda: None, address, 2)

    with mock.patch.object(NodeAgent, "run", run):
        process = multiprocessing.get_context("fork").Process(target=join)
        process.start()
    return process, ours


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_that_has_no_part_yet_can_be_ended(
    tmp_path: Path, address: Address, store: EmbeddedStore, number: signal.Signals
) -> None:
    """The training that it joined waits for more nodes."""
    config = config_of(tmp_path)
    store.create(RUN, RunRecord(config=as_json(config)).to_json())
    process, told = start_joining(config, address)
    workers = told.recv()

    def has_come() -> bool:
        store.sync()
        return "node/0" in store.values

    wait_for(has_come)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == (1 if number == signal.SIGINT else 0)
    wait_for(lambda: not any(is_running(pid) for pid in workers))


def test_a_node_that_was_lost_says_so(tmp_path: Path, address: Address, store: EmbeddedStore) -> None:
    """Whoever started it by `--join` may do so again."""
    config = config_of(tmp_path)
    store.create(RUN, RunRecord(config=as_json(config)).to_json())
    with (
        mock.patch.object(NodeAgent, "run", return_value="it was lost"),
        pytest.raises(WorkerFailedError, match="it was lost"),
    ):
        join_training(config, lambda: None, address, 1)


def test_a_store_that_does_not_come_back_is_given_up(tmp_path: Path, address: Address, store: EmbeddedStore) -> None:
    config = config_of(tmp_path, train__failures={"tolerate": 1, "store_patience_s": 0.1})
    store.create(RUN, RunRecord(config=as_json(config)).to_json())
    answers = [RunRecord(config="{}"), *[UserError("nobody")] * 9]
    with (
        mock.patch.object(NodeAgent, "run", side_effect=launch_nodes.StoreLostError("the store was lost")),
        mock.patch.object(launch_nodes, "_check_run_file", side_effect=answers),
        mock.patch.object(launch_nodes, "RETRY_S", 0.1),
        pytest.raises(WorkerFailedError, match=r"was lost, and not there again in 0\.1 s: nobody"),
    ):
        join_training(config, lambda: None, address, 1)


def test_a_store_without_a_run_is_told(tmp_path: Path, address: Address) -> None:
    with pytest.raises(UserError, match=f"--join: 127.0.0.1:{address[1]}: no training answers there"):
        join_training(config_of(tmp_path), lambda: None, address, 1)


def test_a_wrong_secret_is_told(tmp_path: Path, address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "the secret of another run")
    with pytest.raises(UserError, match="it refuses this process: do both have the same secret"):
        join_training(config_of(tmp_path), lambda: None, address, 1)


def test_a_port_that_is_silent_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be any server."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        mock.patch.object(launch_nodes, "store_timeout_s", return_value=0.1),
        pytest.raises(UserError, match=r"no training answers there \(it is silent\)"),
    ):
        join_training(config_of(tmp_path), lambda: None, server.getsockname(), 1)
