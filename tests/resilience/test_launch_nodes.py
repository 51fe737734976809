"""What the launching process does about processes that die, or are stopped, at its own side."""

import multiprocessing
import os
import signal
import socket
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from interrupted_training import at, config_of, failures, train_and, undisturbed
from test_children import is_running, wait_for
from training import plan_of

from motet.config import RunConfig
from motet.errors import UserError
from motet.resilience import launch_nodes
from motet.resilience.agent import NodeAgent
from motet.resilience.launch_nodes import NodesLostError, join_training, train_on_nodes
from motet.resilience.membership import OPEN, Membership, RunRecord, as_json
from motet.resilience.store import store as store_module
from motet.resilience.store.keeper import TrainingEnd
from motet.runtime.launch import WorkerFailedError


@pytest.mark.slow
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


def test_a_store_that_dies_before_it_listens_is_told(tmp_path: Path) -> None:
    config = config_of(tmp_path, train__failures={"tolerate": 1, "restarts": 0})
    with (
        mock.patch.object(store_module, "_host_store", side_effect=SystemExit),
        pytest.raises(NodesLostError, match="does not start: it died"),
    ):
        train_on_nodes(config, plan_of(config), None, num_nodes=4, node_size=1)


def test_a_store_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    config = config_of(tmp_path, train__failures={"tolerate": 1, "restarts": 0})

    def host_and_die(answer: Connection, listen: tuple[str, int]) -> None:
        answer.send(None)

    with (
        mock.patch.object(store_module, "_host_store", host_and_die),
        pytest.raises(NodesLostError, match="dies whenever it is started"),
    ):
        train_on_nodes(config, plan_of(config), None, num_nodes=4, node_size=1, listen=("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("moves", "stop", "is_settled", "starts_anew"),
    [
        (False, None, True, True),
        (True, None, True, False),
        (True, "no pipeline is left that is whole", False, False),
        (True, "no pipeline is left that is whole", True, True),
    ],
)
def test_nodes_start_anew_where_none_can_have_gone_on(
    moves: bool, stop: str | None, is_settled: bool, starts_anew: bool
) -> None:
    """Whoever listens hears nothing any more: the others may have gone on with another store."""
    last = Membership(generation=2, nodes=(), num_admitted=2, plan="", stop=stop)
    with pytest.raises(WorkerFailedError) as caught:
        launch_nodes._outcome(TrainingEnd(None, None, last, (), is_settled), 60.0, moves=moves)
    assert isinstance(caught.value, NodesLostError) == starts_anew
    assert (stop if starts_anew and stop else "lost" if starts_anew else "another machine") in str(caught.value)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def start_joining(config: RunConfig, store: dist.TCPStore) -> tuple[BaseProcess, Any]:
    """A process that joins, and the connection through which the numbers of its processes come once it has."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    original = NodeAgent.run

    def run(agent: NodeAgent) -> str | None:
        theirs.send([watched.process.pid for watched in agent.processes])
        return original(agent)

    def join() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        join_training(config, lambda: None, ("127.0.0.1", store.port), 2)

    with mock.patch.object(NodeAgent, "run", run):
        process = multiprocessing.get_context("fork").Process(target=join)
        process.start()
    return process, ours


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_that_has_no_part_yet_can_be_ended(tmp_path: Path, store: dist.TCPStore, number: signal.Signals) -> None:
    """The training that it joined waits for more nodes."""
    config = config_of(tmp_path)
    RunRecord(config=as_json(config)).write(store)
    process, told = start_joining(config, store)
    store.set(OPEN, "0")
    workers = told.recv()
    wait_for(lambda: store.add("nodes", 0) == 1)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == (1 if number == signal.SIGINT else 0)
    wait_for(lambda: not any(is_running(pid) for pid in workers))


def test_a_node_that_was_lost_says_so(tmp_path: Path, store: dist.TCPStore) -> None:
    """Whoever started it by `--join` may do so again."""
    config = config_of(tmp_path)
    RunRecord(config=as_json(config)).write(store)
    with (
        mock.patch.object(NodeAgent, "run", return_value="it was lost"),
        pytest.raises(WorkerFailedError, match="it was lost"),
    ):
        join_training(config, lambda: None, ("127.0.0.1", store.port), 1)


def test_a_store_without_a_run_is_told(tmp_path: Path, store: dist.TCPStore) -> None:
    config = config_of(tmp_path, train__failures={"tolerate": 1, "detect_s": 0.1})
    with pytest.raises(UserError, match=f"--join: what answers at 127.0.0.1:{store.port} is no training"):
        join_training(config, lambda: None, ("127.0.0.1", store.port), 1)


def test_a_port_that_is_silent_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It may be any server; the store's client would wait for it without limit."""
    config = config_of(tmp_path, train__failures={"tolerate": 1, "detect_s": 0.1})
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        mock.patch.object(launch_nodes, "store_timeout_s", return_value=0.5),
    ):
        address = server.getsockname()
        joining = multiprocessing.get_context("fork").Process(
            target=join_training, args=(config, lambda: None, address, 1)
        )
        joining.start()
        joining.join()
    assert joining.exitcode == 2
    told = f"motet: error: --join: what answers at 127.0.0.1:{address[1]} is no training that a node can join: it is"
    assert capfd.readouterr().err.startswith(told)
