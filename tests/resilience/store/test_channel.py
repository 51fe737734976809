"""Strangers at the store: they read nothing, join nothing and end nothing."""

import json
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from training import plan_of, run_config
from waiting import wait_until

from motet.addresses import Address
from motet.errors import UserError
from motet.resilience.membership import (
    FAILURE,
    RUN,
    KeyKind,
    Membership,
    RunRecord,
    TrialOutcome,
    TrialRequest,
    as_json,
    check_record,
    key,
)
from motet.resilience.store import channel as channel_module
from motet.resilience.store import embedded
from motet.resilience.store.channel import Channel, MalformedMessageError, UntrustedPeerError, open_channel
from motet.resilience.store.embedded import EmbeddedStore, StoreContents, StoreServer
from motet.resilience.store.store import StoreLostError

SECRET = b"a secret of this run"
SILENCE_S = 1e6


@pytest.fixture
def contents() -> StoreContents:
    return StoreContents(SILENCE_S)


@contextmanager
def served(contents: StoreContents) -> Iterator[Address]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=StoreServer(listener, SECRET, contents).run, daemon=True).start()
        yield listener.getsockname()


@pytest.fixture
def address(contents: StoreContents) -> Iterator[Address]:
    with served(contents) as address:
        yield address


def received(connection: socket.socket) -> bytes:
    """All until the server hangs up."""
    connection.settimeout(30)
    content = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            content += part
    return content


def trained_on(address: Address, store: EmbeddedStore) -> None:
    """The run goes on as if nobody had come."""
    store.sync()
    assert store.values["run"] == "its run file"
    with EmbeddedStore(address, SECRET, 30) as another:
        another.sync()
        assert another.values == store.values


REQUEST = b'{"op": "sync", "since": 0, "alive": null}'
STRANGERS = {
    "an HTTP client": b"GET / HTTP/1.1\r\nHost: store\r\n\r\n" + bytes(64),
    "a client of torch's store": struct.pack("=bI", 0, 0x3C85F7CE) + bytes(64),
    "random bytes": os.urandom(200),
    "a request without a proof": struct.pack("!I", len(REQUEST)) + REQUEST + bytes(64),
    "a huge length": b"\xff" * 100,
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_reads_nothing(address: Address, said: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with EmbeddedStore(address, SECRET, 30) as store:
        store.create("run", "its run file")
        with socket.create_connection(address) as stranger:
            stranger.sendall(said)
            heard = received(stranger)
            port = stranger.getsockname()[1]
        assert len(heard) == 40
        assert heard.startswith(b"motet-1\n")
        trained_on(address, store)
    told = f"motet: store: refused 127.0.0.1:{port}: it does not know the secret of this run"
    assert told in capfd.readouterr().err


def test_a_wrong_secret_is_refused_in_one_line(address: Address, capfd: pytest.CaptureFixture[str]) -> None:
    with EmbeddedStore(address, SECRET, 30) as store:
        store.create("run", "its run file")
        with pytest.raises(UntrustedPeerError, match="do both have the same secret"):
            EmbeddedStore(address, b"another secret...", 30)
        trained_on(address, store)
    assert capfd.readouterr().err.count("refused") == 1


def test_a_stranger_that_says_nothing_is_not_waited_for(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "HANDSHAKE_S", 0.1)
    with socket.create_connection(address) as stranger:
        assert len(received(stranger)) == 40


def test_strangers_do_not_keep_nodes_out_for_long(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "HANDSHAKE_S", 0.2)
    strangers = [socket.create_connection(address) for _ in range(2 * embedded.MAX_STRANGERS)]

    def comes() -> bool:
        with suppress(StoreLostError, UntrustedPeerError), EmbeddedStore(address, SECRET, 30) as store:
            store.sync()
            return True
        return False

    wait_until(comes)
    for stranger in strangers:
        stranger.close()


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    def pretend(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"motet-1\n" + bytes(32))
            connection.recv(64)
            connection.sendall(bytes(32))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=pretend, args=(listener,), daemon=True).start()
        with pytest.raises(UntrustedPeerError, match="does not know the secret"):
            open_channel(listener.getsockname(), SECRET, 30)


MALFORMED = (
    [],
    {},
    {"op": "sync"},
    {"op": "sync", "since": -1, "alive": None},
    {"op": "sync", "since": "0", "alive": None},
    {"op": "create", "key": "", "value": "x"},
    {"op": "create", "key": "k" * 201, "value": "x"},
    {"op": "create", "key": "k", "value": 7},
    {"op": "register", "node": -1},
    {"op": "register", "node": 10**9},
    {"op": "register", "node": 7},
    {"op": "create", "key": "node/0", "value": ""},
    {"op": "create", "key": "alive/0", "value": ""},
    {"op": "eval", "value": "import os"},
    json.loads("[" * 200 + "]" * 200),
)


@pytest.mark.parametrize("message", MALFORMED, ids=[json.dumps(message)[:40] for message in MALFORMED])
def test_a_malformed_message_ends_its_own_connection(
    address: Address, message: object, capfd: pytest.CaptureFixture[str]
) -> None:
    with EmbeddedStore(address, SECRET, 30) as store:
        store.create("run", "its run file")
        rogue = open_channel(address, SECRET, 30)
        rogue.send(message)
        with pytest.raises(ConnectionError):
            rogue.receive(30)
        trained_on(address, store)
    assert "motet: store: ended the connection of 127.0.0.1:" in capfd.readouterr().err


PLAN = plan_of(run_config(Path())).to_json()
WRONG_PLAN = re.sub(r'("ranks": \[\s*)\d+', r"\g<1>1000000000", PLAN, count=1)
FIRST = Membership(generation=1, nodes=(0, 1), num_admitted=2, plan=PLAN)
SECOND = replace(FIRST, generation=2)
NO_RECORDS = {
    "a membership of text": ("membership/2", "its own"),
    "a membership of a list": ("membership/2", "[]"),
    "a membership of another generation": ("membership/3", FIRST.to_json()),
    "a membership of no plan": ("membership/1", replace(FIRST, plan="{}").to_json()),
    "a membership of ranks that there are not": ("membership/1", replace(FIRST, plan=WRONG_PLAN).to_json()),
    "a membership with one key more": ("membership/1", json.dumps({**json.loads(FIRST.to_json()), "evil": 1})),
    "a membership of words": ("membership/1", FIRST.to_json().replace('"nodes": [0, 1]', '"nodes": ["x", "y"]')),
    "a membership of negative nodes": ("membership/2", replace(SECOND, nodes=(0, -1)).to_json()),
    "a membership with a node twice": ("membership/2", replace(SECOND, nodes=(0, 0)).to_json()),
    "a membership of a node that waits": ("membership/2", replace(SECOND, waiting=(1,)).to_json()),
    "a membership of a number that is none": ("membership/2", replace(SECOND, nodes=(0, 10**30)).to_json()),
    "a membership of more nodes than ranks": ("membership/2", replace(SECOND, nodes=tuple(range(50))).to_json()),
    "nested": ("membership/1", "[" * 100_000),
    "a run without a run file": ("run", RunRecord(config={}).to_json()),
    "a meeting nowhere": ("meeting/1", "nowhere"),
    "a meeting at a port of 5000 digits": ("meeting/1", "127.0.0.1:" + "9" * 5000),
    "a meeting at a host that is no text": ("meeting/1", "\ud800:80"),
    "a sum at a host of two lines": ("trial/0", TrialRequest(neighbour=1, address="a\n:80", name="x").to_json()),
    "a failure of nothing": ("failure", "{}"),
    "a result that is none": ("result/1", "7"),
    "a node that is no number": ("node/x", ""),
    "a node of 5000 digits": ("node/" + "9" * 190, ""),
    "a node that would keep agents counting": ("node/999999999", ""),
    "a sum nowhere": ("trial/0", TrialRequest(neighbour=1, address="nowhere", name="x").to_json()),
    "a sum of nothing": ("trial/0", "{}"),
    "a sum of a long name": ("trial/0", TrialRequest(neighbour=1, address="127.0.0.1:80", name="x" * 500).to_json()),
    "an outcome of text": ("tried/0", "fine"),
    "a key of its own": ("evil/1", ""),
    "too few numbers": ("done/1", ""),
}


@pytest.mark.parametrize("said", NO_RECORDS.values(), ids=NO_RECORDS)
def test_who_knows_the_secret_writes_nothing_that_agents_cannot_read(
    said: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    contents = StoreContents(SILENCE_S, check_record)
    with served(contents) as address, EmbeddedStore(address, SECRET, 30) as store:
        store.create(key("membership", 1), FIRST.to_json())
        with EmbeddedStore(address, SECRET, 30) as rogue, pytest.raises(StoreLostError):
            rogue.create(*said)
        store.sync()
        assert store.values == {key("membership", 1): FIRST.to_json()}
    assert "which sent an invalid record: " in capfd.readouterr().err


RECORDS = {
    key("node", 3): "0af3",
    key("alive", 3): "",
    key("membership", 1): FIRST.to_json(),
    key("meeting", 1): "127.0.0.1:80",
    key("done", 1, 3): "",
    key("left", 1, 3): "",
    key("result", 1): '{"losses": [1.5]}',
    key("logged", 1): "",
    key("seen_end", 3): "",
    key("trial", 0): TrialRequest(neighbour=1, address="127.0.0.1:80", name="0af3").to_json(),
    key("tried", 0): TrialOutcome(failure="no sum").to_json(),
    FAILURE: '{"kind": "mistake", "message": "x"}',
    RUN: RunRecord(config=as_json(run_config(Path())), plan=PLAN).to_json(),
}


def test_no_number_of_a_node_is_too_high_to_be_read() -> None:
    """The embedded store gives none; in etcd, who knows the secret may write one."""
    for name in ("node/1000000", "alive/999999999"):
        with pytest.raises(UserError, match="is beyond 999999"):
            check_record(name, "")


def test_what_agents_write_is_taken() -> None:
    assert {name.partition("/")[0] for name in RECORDS} == {*get_args(KeyKind), FAILURE, RUN}
    for name, value in RECORDS.items():
        check_record(name, value)


def channel_pair() -> tuple[Channel, Channel, socket.socket, socket.socket]:
    here, there = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    return Channel(here, b"one", b"two"), Channel(there, b"two", b"one"), here, there


def test_a_message_that_was_changed_or_repeated_is_not_taken() -> None:
    ours, theirs, here, there = channel_pair()
    ours.send({"step": 1})
    recorded = there.recv(10_000, socket.MSG_PEEK)
    assert theirs.receive(30) == {"step": 1}
    here.sendall(recorded)
    with pytest.raises(MalformedMessageError, match="HMAC is wrong"):
        theirs.receive(30)
    here.close()
    there.close()


def test_a_message_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, here, there = channel_pair()
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 1000)
    ours.send("x" * 2000)
    with pytest.raises(MalformedMessageError, match="a message of 2002 bytes; at most 1000 are read"):
        theirs.receive(30)
    here.close()
    there.close()


def test_a_late_node_reads_more_than_one_message_holds(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 3000)
    monkeypatch.setattr(embedded, "MAX_VALUE_BYTES", 2500)
    monkeypatch.setattr(embedded, "MAX_SYNC_LENGTH", 400)
    values = {f"membership/{number}": "\x01" * 60 for number in range(50)} | {"run": "\x01" * 410}
    with EmbeddedStore(address, SECRET, 30) as early, EmbeddedStore(address, SECRET, 30) as late:
        for name, value in values.items():
            early.create(name, value)
        late.sync()
        assert late.values == values
        with EmbeddedStore(address, SECRET, 30) as rogue, pytest.raises(StoreLostError):
            rogue.create("result/1", "\x01" * 417)
        early.sync()
        assert early.values == late.values
