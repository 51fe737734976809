"""The embedded store: a process beside the one that starts the run, and its clients.

The store is in memory. If its process or its machine is lost, the run restarts from its last checkpoint. It listens at
one address alone, loopback for a run on one machine. A peer that does not know the run's secret is refused before
anything that it says is read, and a peer whose message is malformed loses its connection; nobody else notices either.

A node is alive as long as it gives signs of life. While the store's process was held up itself, nobody counts as
silent.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from motet.addresses import Address, address_text
from motet.errors import UserError
from motet.resilience.membership import check_record
from motet.resilience.process_control import Children
from motet.resilience.store.channel import (
    Channel,
    ChannelClosedError,
    MalformedMessageError,
    UntrustedPeerError,
    accept_channel,
    open_channel,
)
from motet.resilience.store.store import StoreLostError

START_S = 10.0
"""Time for the store's process to start."""
FIRST_SIGN_S = 10.0
"""Time from the registration of a node to its first sign of life."""
MAX_STRANGERS = 64
"""Connections that may prove at once that they know the secret; more are refused."""
MAX_KEYS = 1_000_000
"""Changes that are taken in all. Nodes that come and go get the first half, so they leave room for those who train."""
MAX_VALUE_BYTES = 60 * 2**20
"""Largest value, as JSON: less than a message, which holds its key too."""
MAX_SYNC_LENGTH = MAX_VALUE_BYTES // 6
"""Characters of values in one answer, unless one value is longer. JSON may take six bytes for each."""
MAX_KEY_LENGTH = 200
OWN_KEYS = ("node/", "alive/")
"""Keys that the store writes when a node registers: a node that another client writes would never be silent."""
_TICK_S = 0.02


class StoreContents:
    """Contents of a store, with a revision for each change. `silence_s`: of a node that counts as lost. `check`: raises
    `UserError` for what is not taken."""

    def __init__(self, silence_s: float, check: Callable[[str, str], None] = lambda key, value: None) -> None:
        self._silence_s, self._check = silence_s, check
        self._values: dict[str, str] = {}
        self._changed: list[str] = []
        """Keys, in the order of their changes; a revision is a position in it."""
        self._deadlines: dict[int, float] = {}
        """By living node: when it counts as lost unless it gives another sign of life."""
        self._num_registered = 0
        self._last_tick = time.monotonic()
        self._lock = threading.Lock()

    def answer(self, request: Any, now: float) -> dict[str, Any]:
        """Carries out a request. Raises `MalformedMessageError`."""
        match request:
            case {"op": "sync", "since": int(since), "alive": int() | None as alive} if since >= 0:
                with self._lock:
                    if alive is not None and alive in self._deadlines:
                        self._deadlines[alive] = now + self._silence_s
                    return self._changes(since)
            case {"op": "time"}:
                return {"time": time.time()}
            case {"op": "create", "key": str(key), "value": str(value)} if 0 < len(key) <= MAX_KEY_LENGTH:
                self._check_record(key, value)
                if key.startswith(OWN_KEYS):
                    raise MalformedMessageError(f"a request to write {key[:100]!r}, which the store writes itself")
                with self._lock:
                    if key not in self._values:
                        if key.startswith("trial/"):
                            self._check_room_for_newcomers()
                        self._set(key, value)
                    return {"value": self._values[key]}
            case {"op": "register", "node": int() | None as node} if node is None or 0 <= node < MAX_KEYS:
                with self._lock:
                    if node is None:
                        self._check_room_for_newcomers()
                    number = self._num_registered if node is None else node
                    if number > self._num_registered:
                        raise MalformedMessageError(f"a request for number {number}, before others were given")
                    self._num_registered = max(self._num_registered, number + 1)
                    self._deadlines[number] = now + max(FIRST_SIGN_S, self._silence_s)
                    self._set(f"node/{number}", "")
                    self._set(f"alive/{number}", "")
                    return {"node": number}
        raise MalformedMessageError("a message that is not a request")

    def tick(self, now: float) -> None:
        """Takes out the nodes that are silent. To be called all the time."""
        with self._lock:
            held_up_s = now - self._last_tick
            self._last_tick = now
            if held_up_s > self._silence_s / 2:
                self._deadlines = {node: deadline + held_up_s for node, deadline in self._deadlines.items()}
            for node in [node for node, deadline in self._deadlines.items() if deadline < now]:
                del self._deadlines[node]
                del self._values[f"alive/{node}"]
                self._changed.append(f"alive/{node}")

    def _changes(self, since: int) -> dict[str, Any]:
        """Returns the changes from a revision on, as many as a message holds, and the revision after them."""
        changes: dict[str, str | None] = {}
        length, revision = 0, min(since, len(self._changed))
        for key in self._changed[since:]:
            value = self._values.get(key)
            length += len(key) + len(value or "")
            if changes and length > MAX_SYNC_LENGTH:
                break
            changes[key] = value
            revision += 1
        return {"revision": revision, "newest": len(self._changed), "changes": changes}

    def _check_room_for_newcomers(self) -> None:
        if len(self._changed) >= MAX_KEYS // 2:
            raise MalformedMessageError(f"a request to join after {MAX_KEYS // 2} changes, when no node is taken in")

    def _check_record(self, key: str, value: str) -> None:
        if len(json.dumps(value)) > MAX_VALUE_BYTES:
            raise MalformedMessageError(f"a value of more than {MAX_VALUE_BYTES} bytes")
        try:
            self._check(key, value)
        except UserError as error:
            raise MalformedMessageError(f"an invalid record: {error}"[:500]) from None

    def _set(self, key: str, value: str) -> None:
        if len(self._changed) >= MAX_KEYS:
            raise MalformedMessageError(f"more than {MAX_KEYS} changes")
        self._values[key] = value
        self._changed.append(key)


class StoreServer:
    """Serves the contents to all that know the secret, with a thread for each connection."""

    def __init__(self, listener: socket.socket, secret: bytes, contents: StoreContents) -> None:
        self._listener, self._secret, self._contents = listener, secret, contents
        self._strangers = threading.Semaphore(MAX_STRANGERS)

    def run(self) -> None:
        """Serves until the process ends, or the listener is closed."""
        self._listener.settimeout(_TICK_S)
        while self._listener.fileno() >= 0:
            self._contents.tick(time.monotonic())
            try:
                connection, peer = self._listener.accept()
            except OSError:  # Nobody came in time, or who came has gone.
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection, peer), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: Any) -> None:
        with connection:
            try:
                try:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    channel = accept_channel(connection, self._secret)
                finally:
                    self._strangers.release()
                while True:
                    channel.send(self._contents.answer(channel.receive(), time.monotonic()))
            except UntrustedPeerError as error:
                _tell(f"refused {address_text(peer[:2])}: {error}")
            except MalformedMessageError as error:
                _tell(f"ended the connection of {address_text(peer[:2])}, which sent {error}")
            except (ChannelClosedError, OSError):
                return  # Whoever it was has gone. If it was a node, its silence tells.


def _tell(text: str) -> None:
    print(f"motet: store: {text}", file=sys.stderr, flush=True)


class EmbeddedStore(AbstractContextManager["EmbeddedStore"]):
    """A client. Each call ends within about `patience_s`, after which the store counts as lost.

    Raises `StoreLostError` if no store answers, `UntrustedPeerError` if the secret is not the same."""

    def __init__(self, address: Address, secret: bytes, patience_s: float) -> None:
        self._patience_s = patience_s
        try:
            self._channel: Channel = open_channel(address, secret, patience_s)
        except ChannelClosedError as error:
            raise StoreLostError(str(error)) from None
        self.here = self._channel.here
        self._values: dict[str, str] = {}
        self.values: Mapping[str, str] = self._values
        self._revision = 0
        self._alive: int | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def sync(self) -> None:
        is_whole = False
        while not is_whole:
            answer = self._ask({"op": "sync", "since": self._revision, "alive": self._alive})
            self._revision = answer["revision"]
            for key, value in answer["changes"].items():
                if value is None:
                    self._values.pop(key, None)
                else:
                    self._values[key] = value
            is_whole = self._revision >= answer["newest"]

    def create(self, key: str, value: str) -> str:
        return str(self._ask({"op": "create", "key": key, "value": value})["value"])

    def register(self, node: int | None = None) -> int:
        return int(self._ask({"op": "register", "node": node})["node"])

    def keep_alive(self, node: int) -> None:
        self._alive = node

    def time(self) -> float:
        return float(self._ask({"op": "time"})["time"])

    def close(self) -> None:
        self._channel.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._channel.send(request, self._patience_s)
            answer: dict[str, Any] = self._channel.receive(self._patience_s)
            return answer
        except (ChannelClosedError, MalformedMessageError) as error:
            raise StoreLostError(f"the store was lost: {error}") from None


class StoreProcess(AbstractContextManager["StoreProcess"]):
    """The process that runs the store. Its address stays the same when it is started again, with nothing in it.

    `listen`: host and port of this machine; port 0: any free one. `silence_s`: of a node that counts as lost. Raises
    `UserError` unless one can listen there."""

    def __init__(self, listen: Address, secret: bytes, silence_s: float) -> None:
        self._secret, self._silence_s = secret, silence_s
        try:
            family = socket.getaddrinfo(*listen, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server(listen, family=family, backlog=256)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "no host can have this name"
            raise UserError(
                f"--listen: {address_text(listen)} cannot be used as an address ({why}); give an address of this "
                "machine and a free port"
            ) from None
        self.address: Address = (listen[0], self._listener.getsockname()[1])
        self._process: BaseProcess | None = None

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def start(self, children: Children) -> None:
        """Raises `StoreLostError` if the process does not start."""
        receiver, sender = Pipe(duplex=False)
        self._process = children.start(_host_store, sender, self._listener, self._secret, self._silence_s)
        sender.close()  # Otherwise the end of the process would go unnoticed.
        try:
            has_begun = receiver.poll(START_S) and receiver.recv_bytes(1) == b"!"
        except EOFError:
            has_begun = False
        if not has_begun:
            raise StoreLostError("the store's process does not start")


def _host_store(begun: Connection, listener: socket.socket, secret: bytes, silence_s: float) -> None:
    begun.send_bytes(b"!")
    StoreServer(listener, secret, StoreContents(silence_s, check_record)).run()
