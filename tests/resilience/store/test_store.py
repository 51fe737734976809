"""Clients that see the end of the process that has the store, and one that takes its place."""

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from motet.resilience.membership import StoreLostError
from motet.resilience.process_control import Children
from motet.resilience.store.store import StoreClient, StoreProcess, is_listening

PATIENCE_S = 0.5


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as children:
        yield children


@pytest.fixture
def process(children: Children) -> Iterator[StoreProcess]:
    with StoreProcess(("127.0.0.1", 0)) as process:
        process.start(children)
        yield process


@pytest.fixture
def client(process: StoreProcess) -> Iterator[StoreClient]:
    with StoreClient(process.address, PATIENCE_S) as client:
        client.connect()
        client.set("key", "value")
        yield client


def stop(process: StoreProcess) -> None:
    assert process._process is not None
    assert process._process.pid is not None
    os.kill(process._process.pid, signal.SIGSTOP)


def test_the_next_store_is_empty_and_at_the_same_address(
    process: StoreProcess, client: StoreClient, children: Children
) -> None:
    process.kill()
    with pytest.raises(StoreLostError):
        client.check(["key"])
    assert process.wait_for_end() == -signal.SIGKILL
    with pytest.raises(StoreLostError, match="nobody listens"):
        client.connect()
    process.start(children)
    with pytest.raises(StoreLostError):
        client.check(["key"])  # Not before it has connected again.
    client.connect()
    assert not client.check(["key"])


def test_nobody_waits_for_a_store_that_is_stopped(
    process: StoreProcess, client: StoreClient, children: Children
) -> None:
    stop(process)
    with pytest.raises(StoreLostError):
        client.get("key")
    with pytest.raises(StoreLostError):
        client.connect()
    process.start(children)
    client.connect()
    assert not client.check(["key"])


def test_nobody_else_gets_the_port_of_a_store_that_is_away(process: StoreProcess) -> None:
    process.kill()
    process.wait_for_end()
    assert not is_listening(process.address)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(process.address)
