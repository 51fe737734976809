"""Nodes that come from elsewhere: one process listens, all nodes join, and the training begins when they have come."""

import multiprocessing
import os
import signal
import socket
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ports import port_of_its_own
from test_recover import at, before_each_step, config_of, failures, undisturbed
from training import plan_of

from motet.errors import UserError
from motet.resilience import launch_nodes
from motet.resilience.interfaces import interface_towards
from motet.resilience.launch_nodes import NodesLostError, join_training, train_on_nodes


def test_nodes_that_join_train_and_survive(tmp_path: Path) -> None:
    """One of them dies with its agent, as a machine does."""
    config = config_of(tmp_path, train__failures={"tolerate": 1, "detect_s": 4})
    plan, address = plan_of(config), ("127.0.0.1", port_of_its_own())
    context = multiprocessing.get_context("fork")

    def node() -> None:
        while True:
            try:
                return join_training(config, lambda: None, address, 1)
            except UserError:  # Nobody listens yet.
                continue

    def end_agent() -> None:
        os.kill(os.getppid(), signal.SIGKILL)

    with before_each_step(at(2, 3, end_agent)):
        nodes = [context.Process(target=node) for _ in range(plan.num_ranks)]
        for process in nodes:
            process.start()
        result = train_on_nodes(config, plan, None, num_nodes=plan.num_ranks, node_size=1, listen=address)
    for process in nodes:
        process.join()
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert result["world_size"] == 2
    [failure] = failures(config)
    assert [change["kind"] for change in failure["changes"]] == ["lost"]
    assert sorted(process.exitcode for process in nodes) == [-signal.SIGKILL, 0, 0, 0]


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(UserError, match=f"--listen: 127.0.0.1:{address[1]} cannot be listened at .*a free port"):
            train_on_nodes(config, plan_of(config), None, num_nodes=4, node_size=1, listen=address)


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_an_address_of_another_machine_is_told(tmp_path: Path, host: str) -> None:
    """A store would listen at all addresses of this one, and nobody would find it."""
    config = config_of(tmp_path)
    with (
        mock.patch.object(launch_nodes, "_start_store", side_effect=AssertionError),
        pytest.raises(UserError, match=f"--listen: {host}:29500 cannot be listened at .* an address of this machine"),
    ):
        train_on_nodes(config, plan_of(config), None, num_nodes=4, node_size=1, listen=(host, 29500))


def test_the_interface_is_that_of_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        assert interface_towards(connection) == "lo"


def test_a_store_that_dies_is_started_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody has come yet. The port is the one that was told, also if any was as good."""
    config = config_of(tmp_path, train__failures={"tolerate": 1, "restarts": 1})
    original = launch_nodes._start_store
    begun: list[BaseProcess] = []
    addresses: list[tuple[str, int]] = []

    def start(*arguments: Any) -> Any:
        process, at_address = original(*arguments)
        begun.append(process)
        addresses.append(at_address)
        process.kill()
        process.join()
        return process, at_address

    with (
        mock.patch.object(launch_nodes, "_start_store", start),
        mock.patch.object(launch_nodes, "STORE_TIMEOUT", timedelta(seconds=1)),
        pytest.raises(NodesLostError, match="the process that had the store died"),
    ):
        train_on_nodes(config, plan_of(config), None, num_nodes=4, node_size=1, listen=("127.0.0.1", 0))
    assert len(begun) == 2
    assert addresses[0] == addresses[1]
    assert "the process that had the store died; starting anew" in capfd.readouterr().err
    assert [line["done"] for line in failures(config)] == [
        "the process that had the store died: all nodes are started anew (restart 1 of 1)",
        "the process that had the store died: not started anew, as train.failures.restarts is 1",
    ]
