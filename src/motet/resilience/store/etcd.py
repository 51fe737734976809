"""A store in etcd: it survives the loss of any machine of the training, and of as many of etcd as its quorum allows.

All keys of a run stand under `/motet/NAME/ATTEMPT/`. An attempt begins with nothing, whenever all nodes start anew.
Values carry an HMAC of the run's secret, so a client that can write to etcd but does not know it joins nothing and
proposes nothing. A node is alive as long as its lease is. A thread reads what is new whenever a watch tells of a
change, and every `READ_S` besides, as a watch stays silent when its server dies; another server is asked when one
fails. While none answers, training goes on and memberships do not change.

Servers are named as in `etcd://h1:2379,h2:2379,h3:2379/NAME`. Certificates and the user come from the variables of
etcdctl: ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY and ETCDCTL_USER (user:password).

Limits: an attempt's keys stay in etcd when the run is over; delete the prefix when they are no longer of interest.
"""

import base64
import hmac
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib import import_module
from typing import Any

from motet.addresses import Address, host_and_port
from motet.errors import UserError
from motet.resilience.store.store import StoreAwayError, StoreLostError

READ_S = 0.25
"""Longest interval between two reads."""
REQUEST_S = 1.0
"""Time for a server to answer before another one is asked."""
WATCH_S = 10.0
"""Time without a change after which another watch begins."""
SHORTEST_LEASE_S = 5
"""Longer than etcd takes to elect another leader, with the time for requests that fail."""
_SCHEME = "etcd://"


@dataclass(frozen=True)
class EtcdAddress:
    """Servers, and the name of a run in them."""

    servers: tuple[Address, ...]
    name: str

    @staticmethod
    def parse(text: str) -> "EtcdAddress | None":
        """Parses an address; None if the text has another form."""
        servers, _, name = text.removeprefix(_SCHEME).partition("/")
        found = [host_and_port(server) for server in servers.split(",")]
        if not text.startswith(_SCHEME) or None in found or not re.fullmatch(r"[\w.-]{1,100}", name):
            return None
        return EtcdAddress(tuple(server for server in found if server is not None), name)

    def __str__(self) -> str:
        return f"{_SCHEME}{','.join(f'{host}:{port}' for host, port in self.servers)}/{self.name}"


StoreAddress = Address | EtcdAddress
"""Address of a store: host and port of an embedded one, or a run's name in etcd."""


class EtcdStore(AbstractContextManager["EtcdStore"]):
    """A client. `is_new`: begins another attempt; otherwise the newest one is used. `replaces`: the newest one was this
    process's, which has ended its nodes, though their leases may still run. `check`: raises `UserError` for values that
    are not read, whoever wrote them.

    Raises `UserError` if the package is missing or no server can be used, `StoreLostError` if none can be used any
    more."""

    def __init__(
        self,
        address: EtcdAddress,
        secret: bytes,
        silence_s: float,
        *,
        is_new: bool = False,
        replaces: bool = False,
        check: Callable[[str, str], None] = lambda key, value: None,
    ) -> None:
        self._secret, self._lease_s = secret, max(SHORTEST_LEASE_S, math.ceil(silence_s))
        self._servers = [_client(server) for server in address.servers]
        self._current = 0
        self._untrusted: set[str] = set()
        self._check = check
        self._run = f"/motet/{address.name}/"
        try:
            self.here = _address_towards(address.servers)
            attempt = self._newest_attempt()
            if is_new:
                if not replaces and any(key.startswith("alive/") for key in self._read(f"{self._run}{attempt}/", 0)[0]):
                    raise UserError(f"{address}: a run of this name is being trained; give another name, or join it")
                attempt += 1
                self._create(f"{self._run}attempt/{attempt}", "")
            elif not attempt:
                raise StoreLostError("no run of this name has begun")
        except StoreAwayError as error:
            if replaces:
                raise StoreLostError(str(error)) from None
            raise UserError(f"{address}: {error}; give etcd servers that answer") from None
        self._attempt, self._prefix = attempt, f"{self._run}{attempt}/"
        self.values: Mapping[str, str] = {}
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._revision, self._read_at = 0, -math.inf
        self._alive: int | None = None
        self._lease: str | None = None
        self._renewed_at = -math.inf
        self._changed, self._is_closed = threading.Event(), threading.Event()
        self._reader: threading.Thread | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def sync(self) -> None:
        if self._reader is None:  # Not earlier, as a process with threads should not be forked.
            self._reader = threading.Thread(target=self._read_on, name="etcd reader", daemon=True)
            self._reader.start()
            threading.Thread(target=self._watch_on, name="etcd watch", daemon=True).start()
            with suppress(StoreAwayError):
                self._read_once()
        with self._lock:
            if self._lost is not None:
                raise StoreLostError(self._lost)
            if time.monotonic() - self._read_at > self._lease_s:
                raise StoreAwayError("etcd does not answer")
            self.values = dict(self._known)

    def create(self, key: str, value: str) -> str:
        return self._create(self._prefix + key, value, lambda standing: self._is_record(key, standing))

    def register(self, node: int | None = None) -> int:
        number, token = node or 0, os.urandom(8).hex()
        while self.create(f"node/{number}", token) != token and node is None:
            number += 1
        self._put_alive(number, self._grant())
        return number

    def keep_alive(self, node: int) -> None:
        self._alive, self._lease = node, None

    def time(self) -> float:
        """By the clock of the server that answers; whole seconds."""
        for _ in self._servers:
            server = self._servers[self._current]
            with suppress(Exception):  # This server has died, or tells no time.
                url, verify = server.get_url("/maintenance/status"), server.session.verify
                answer = server.session.post(url, json={}, timeout=REQUEST_S, verify=verify)
                return parsedate_to_datetime(answer.headers["Date"]).timestamp()
            self._current = (self._current + 1) % len(self._servers)
        raise StoreAwayError("no etcd server tells its time")

    def close(self) -> None:
        """The watch, which nothing interrupts, ends within `WATCH_S`."""
        self._is_closed.set()
        self._changed.set()
        if self._reader is not None:
            self._reader.join()
        for server in self._servers:
            # Closing the session alone leaves that to Python's search for garbage, as errors hold on to pools.
            for adapter in server.session.adapters.values():
                pools = adapter.poolmanager.pools
                for place in pools.keys():  # noqa: SIM118 (it cannot be iterated over)
                    pools[place].close()
            server.session.close()

    def _newest_attempt(self) -> int:
        found, _ = self._read(f"{self._run}attempt/", 0)
        return max((int(key) for key in found), default=0)

    def _read_on(self) -> None:
        while not self._is_closed.is_set():
            with suppress(StoreAwayError):
                self._renew()  # Before what may take longer while servers change.
            with suppress(StoreAwayError):
                self._read_once()
            self._changed.wait(READ_S)
            self._changed.clear()

    def _read_once(self) -> None:
        """Reads what was written since the last read, and who is alive."""
        began = time.monotonic()
        written, revision = self._read(self._prefix, self._revision + 1)
        alive = self._keys(f"{self._prefix}alive/")
        has_ended = self._newest_attempt() > self._attempt
        written = {key: value for key, value in written.items() if self._is_record(key, value)}
        alive = [key for key in alive if self._is_record(key, "")]
        with self._lock:
            self._known |= {key: value for key, value in written.items() if not key.startswith("alive/")}
            for key in [key for key in self._known if key.startswith("alive/")]:
                del self._known[key]
            self._known |= dict.fromkeys(alive, "")
            self._revision, self._read_at = max(self._revision, revision), began
            if has_ended:
                self._lost = "all nodes were restarted while this one did not reach the store"

    def _is_record(self, key: str, value: str) -> bool:
        try:
            self._check(key, value)
        except UserError as error:
            self._tell_once(key, f"is not read: {str(error)[:500]}")
            return False
        return True

    def _renew(self) -> None:
        now = time.monotonic()
        if self._alive is None or now - self._renewed_at < self._lease_s / 5:
            return
        if self._lease is not None:
            answer = self._ask("/lease/keepalive", {"ID": self._lease})["result"]
            if int(answer.get("TTL", 0)) <= 0:
                self._lease = None
        if self._lease is None:
            lease = self._grant()
            self._put_alive(self._alive, lease)
            self._lease = lease
        self._renewed_at = now

    def _watch_on(self) -> None:
        """Wakes the reader at each change. Whether the watch lives is of no importance but for speed."""
        while not self._is_closed.is_set():
            server = self._servers[self._current]
            with suppress(Exception):  # The server has died, or the stream is broken: another watch begins.
                request = {
                    "create_request": {"key": _encoded(self._prefix), "range_end": _encoded(_after(self._prefix))}
                }
                url = server.get_url("/watch")
                timeout, verify = (REQUEST_S, WATCH_S), server.session.verify
                with server.session.post(url, json=request, stream=True, timeout=timeout, verify=verify) as answer:
                    for _ in answer.iter_lines():
                        if self._is_closed.is_set():
                            return
                        self._changed.set()
            self._is_closed.wait(READ_S)

    def _create(self, key: str, value: str, is_record: Callable[[str], bool] = lambda standing: True) -> str:
        """`is_record`: whether a value may stand; another one is replaced, as nobody reads it."""
        put = {"request_put": {"key": _encoded(key), "value": _encoded(self._signed(key, value))}}
        revision = 0  # Of a key that is not there.
        while True:
            answer = self._ask(
                "/kv/txn",
                {
                    "compare": [{"key": _encoded(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision}],
                    "success": [put],
                    "failure": [{"request_range": {"key": _encoded(key)}}],
                },
            )
            if answer.get("succeeded"):
                return value
            rows = answer["responses"][0]["response_range"].get("kvs", [{}])
            revision = int(rows[0].get("mod_revision", 0))
            if revision:
                standing = self._checked(rows[0])
                if standing is None:
                    told = "was written by a client that does not know the secret of this run"
                    raise StoreLostError(f"etcd: {key} {told}")
                if is_record(standing):
                    return standing

    def _read(self, prefix: str, since: int) -> tuple[dict[str, str], int]:
        """Returns the values by key, without the prefix, of the given revision and later, and the newest revision."""
        request = {"key": _encoded(prefix), "range_end": _encoded(_after(prefix)), "min_mod_revision": since}
        answer = self._ask("/kv/range", request)
        found = {}
        for row in answer.get("kvs", ()):
            value = self._checked(row)
            if value is not None:
                found[_decoded(row["key"]).removeprefix(prefix)] = value
        return found, int(answer["header"]["revision"])

    def _keys(self, prefix: str) -> list[str]:
        """Returns the keys without the run's prefix; their values prove that a node of this run wrote them."""
        return [key.removeprefix(self._prefix) for key in (prefix + name for name in self._read(prefix, 0)[0])]

    def _grant(self) -> str:
        return str(self._ask("/lease/grant", {"TTL": self._lease_s})["ID"])

    def _put_alive(self, node: int, lease: str) -> None:
        key = f"{self._prefix}alive/{node}"
        self._ask("/kv/put", {"key": _encoded(key), "value": _encoded(self._signed(key, "")), "lease": lease})

    def _signed(self, key: str, value: str) -> str:
        return hmac.digest(self._secret, f"{key}\0{value}".encode(), "sha256").hex() + value

    def _checked(self, row: Mapping[str, str]) -> str | None:
        key, text = _decoded(row["key"]), _decoded(row.get("value", ""))
        value = text[64:]
        if hmac.compare_digest(text.encode(errors="replace"), self._signed(key, value).encode(errors="replace")):
            return value
        self._tell_once(key, "is not read, as its HMAC is wrong")
        return None

    def _tell_once(self, key: str, what: str) -> None:
        if key not in self._untrusted:
            self._untrusted.add(key)
            print(f"motet: etcd: {key} {what}", file=sys.stderr, flush=True)

    def _ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Asks one server after the other. Raises `StoreAwayError` if none answers."""
        failure: Exception | None = None
        for _ in self._servers:
            server = self._servers[self._current]
            try:
                answer: dict[str, Any] = _post(server, path, request)
                return answer
            except Exception as error:  # Of requests or etcd3gw: this server has died, or is not part of the quorum.
                failure = error
                _log_in(server)
                self._current = (self._current + 1) % len(self._servers)
        told = getattr(failure, "detail_text", None) or str(failure)  # etcd3gw's errors are without text.
        raise StoreAwayError(f"no etcd server answers ({' '.join(told.split())[-300:]})")


def _client(server: Address) -> Any:
    try:
        etcd3gw = import_module("etcd3gw.client")
    except ImportError:
        raise UserError("--store: etcd3gw is not installed; pip install 'motet[etcd]'") from None
    files = {name: os.environ.get(f"ETCDCTL_{name}") for name in ("CACERT", "CERT", "KEY")}
    client = etcd3gw.Etcd3Client(
        host=server[0],
        port=server[1],
        protocol="https" if any(files.values()) else "http",
        ca_cert=files["CACERT"],
        cert_key=files["KEY"],
        cert_cert=files["CERT"],
        timeout=REQUEST_S,
        api_path="/v3/",
    )
    _log_in(client)
    return client


def _post(client: Any, path: str, request: dict[str, Any]) -> Any:
    # requests prefers the authorities of REQUESTS_CA_BUNDLE to those of its session.
    return client.post(client.get_url(path), json=request, verify=client.session.verify)


def _log_in(client: Any) -> None:
    """Gets a token for the user of ETCDCTL_USER, if there is one; tokens expire."""
    user, _, password = os.environ.get("ETCDCTL_USER", "").partition(":")
    if not user:
        return
    client.session.headers.pop("Authorization", None)
    with suppress(Exception):  # The server does not answer, which the next request tells.
        answer = _post(client, "/auth/authenticate", {"name": user, "password": password})
        client.session.headers["Authorization"] = answer["token"]


def _address_towards(servers: tuple[Address, ...]) -> str:
    """This machine's address on the way to the first server whose name is known."""
    for host, port in servers:
        with suppress(OSError, UnicodeError):
            family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # Nothing is sent.
                return str(probe.getsockname()[0])
    raise StoreAwayError("the servers' names are unknown")


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")


def _after(prefix: str) -> str:
    """The end of the range of all keys with a prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
