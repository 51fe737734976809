"""Nodes that come from elsewhere: one process listens, all nodes join, and the training begins when they have come."""

import os
import signal
import socket
from pathlib import Path
from unittest import mock

import pytest
from interrupted_training import at, before_each_step, config_of, failures, undisturbed
from nodes_elsewhere import secret, train_elsewhere  # noqa: F401
from training import plan_of

from motet.addresses import interface_towards
from motet.errors import UserError
from motet.resilience.launch_nodes import join_training, train_on_nodes
from motet.resilience.store.embedded import StoreProcess
from motet.resilience.store.store import SECRET_VARIABLE


def test_nodes_that_join_train_and_survive(tmp_path: Path) -> None:
    """One of them dies with its agent, as a machine does."""
    config = config_of(tmp_path, train__failures={"tolerate": 1, "detect_s": 4})

    def end_agent() -> None:
        os.kill(os.getppid(), signal.SIGKILL)

    with before_each_step(at(2, 3, end_agent)):
        result, exit_codes = train_elsewhere(config)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert result["world_size"] == 2
    [failure] = failures(config)
    assert [change["kind"] for change in failure["changes"]] == ["lost"]
    assert sorted(exit_codes) == [-signal.SIGKILL, 0, 0, 0]


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(
            UserError, match=f"--listen: 127.0.0.1:{address[1]} cannot be used as an address .*a free port"
        ):
            train_on_nodes(config, plan_of(config), None, num_nodes=4, node_size=1, listen=address)


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_an_address_of_another_machine_is_told(tmp_path: Path, host: str) -> None:
    """A store would listen at all addresses of this one, and nobody would find it."""
    config = config_of(tmp_path)
    with (
        mock.patch.object(StoreProcess, "start", side_effect=AssertionError),
        pytest.raises(
            UserError, match=f"--listen: {host}:29500 cannot be used as an address .* an address of this machine"
        ),
    ):
        train_on_nodes(config, plan_of(config), None, num_nodes=4, node_size=1, listen=(host, 29500))


def test_a_run_on_several_machines_needs_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE)
    config, address = config_of(tmp_path), ("127.0.0.1", 0)
    with pytest.raises(UserError, match=r"train\.failures\.secret_file: is not given and MOTET_RUN_SECRET is not set"):
        train_on_nodes(config, plan_of(config), None, num_nodes=4, node_size=1, listen=address)
    with pytest.raises(UserError, match=r"train\.failures\.secret_file: is not given and MOTET_RUN_SECRET is not set"):
        join_training(config, lambda: None, address, 1)


def test_the_interface_is_that_of_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        assert interface_towards(connection) == "lo"
