"""A data server: answers tickets over Arrow Flight, from worker processes of its own (DistTrain, section 4.2).

A server has no state but what it has read, so it gives the same answers after a restart, and another server can replace
it. Clients without the token get no information at all, not even the list of methods. Each message of a stream carries
a part of the samples of a ticket: their description in JSON and one column of bytes, which is neither copied nor
unpickled. Workers run at most a few messages ahead of a slow client; gRPC's flow control stops them.

Limits: DistTrain reorders samples on these machines; here training reorders them itself, in a thread, some batches
ahead, because the order depends on the plan, which servers need not know. No RDMA.
"""

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import flight

from motet.addresses import free_address
from motet.data.service.tickets import Corrupt, Ticket, is_authorized, samples_to_json
from motet.data.service.workers import Answer, Workers, shares
from motet.errors import UserError

SCHEMA = pa.schema([("data", pa.large_binary())])
DESCRIBE = "describe"
"""The action that returns the facts of the server."""
POLL_S = 0.5
"""Longest time from a signal until the shutdown begins."""


@dataclass(frozen=True)
class Request:
    """The content of a Flight ticket."""

    agreed: str
    """Digest of the facts that training has seen; a server with other facts refuses the request."""
    ticket: Ticket

    def to_bytes(self) -> bytes:
        return json.dumps({"agreed": self.agreed, "ticket": self.ticket.to_json()}).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Request":
        """Raises `ValueError`."""
        values = json.loads(content)
        if not isinstance(values, dict) or not isinstance(values.get("ticket"), str):
            raise ValueError("is not a request")
        return cls(str(values.get("agreed")), Ticket.from_json(values["ticket"]))


class DataServer(flight.FlightServerBase):
    """A server that runs from its creation on.

    `sizes`: number of samples by split. `modules`: modules whose tensors may be requested."""

    def __init__(
        self,
        workers: Workers,
        facts: Mapping[str, Any],
        agreed: str,
        sizes: Mapping[str, int],
        modules: set[str],
        token: str,
        *,
        host: str,
        port: int,
        tls: tuple[bytes, bytes] | None = None,
    ) -> None:
        """`tls`: certificate chain and private key, PEM. Raises `UserError` if the port is not available."""
        _check_port(host, port)
        self.workers, self._facts, self._agreed = workers, facts, agreed
        self.sizes, self._modules = sizes, modules
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter(tickets=0, sent_bytes=0, refused=0)
        scheme = "grpc+tls" if tls else "grpc"
        try:
            super().__init__(
                f"{scheme}://{_bracketed(host)}:{port}",
                middleware={"access": _Access(token, lambda: self._count("refused"))},
                tls_certificates=[tls] if tls else None,
            )
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"--host {host} --port {port}: cannot be used ({_first_line(error)})") from None
        self.address = f"{scheme}://{_bracketed(host)}:{self.port}"

    def do_action(self, context: Any, action: flight.Action) -> Iterator[bytes]:
        if action.type != DESCRIBE:
            raise flight.FlightServerError(f"there is no action {action.type}")
        yield json.dumps(self._facts).encode()

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.GeneratorStream:
        try:
            request = Request.from_bytes(ticket.ticket)
            self._check(request)
        except (ValueError, RecursionError) as error:
            raise flight.FlightServerError(str(error)) from None
        self._count("tickets")
        return flight.GeneratorStream(SCHEMA, self._messages(request.ticket))

    def _check(self, request: Request) -> None:
        if request.agreed != self._agreed:
            raise ValueError("this server has different data from the one that training began with")
        ticket = request.ticket
        if ticket.module is not None and ticket.module not in self._modules:
            raise ValueError(f"there is no module {ticket.module!r}")
        size = self.sizes.get(ticket.split, 0)
        if any(index >= size for index in ticket.indices):
            raise ValueError(f"{ticket.split} has {size} samples")

    def _messages(self, ticket: Ticket) -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
        try:
            for answer in self.workers.answers(shares(ticket, self.workers.num)):
                header, data = _message(answer)
                self._count("sent_bytes", data.size)
                yield _record_batch(data), pa.py_buffer(header.encode())
        except Exception as error:
            # Clients would take other exceptions for the death of the server.
            raise flight.FlightServerError(f"{type(error).__name__}: {error}") from error

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.counts[what] += number

    def serve_until_signalled(self, announce: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Serves until SIGINT or SIGTERM. Returns a report of the work done.

        `announce`: called as soon as signals are handled."""
        signals: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: signals.append(number))
        announce()
        # A wait without an end would last forever if the signal came just before the operating system's part of it
        # began; Flight's own `wait` does not return on signals.
        while not signals:
            time.sleep(POLL_S)
        self.shutdown()
        self.workers.close()
        return self.report()

    def report(self) -> dict[str, Any]:
        return {"address": self.address, **self.counts, "worker_restarts": self.workers.num_restarts}


def _message(answer: Answer) -> tuple[str, pa.Buffer]:
    if isinstance(answer, Corrupt):
        return json.dumps({"corrupt": [answer.index, answer.message]}), pa.py_buffer(b"")
    if isinstance(answer, list):
        return '{"samples": true}', pa.py_buffer(samples_to_json(answer).encode())
    return json.dumps({"tensors": answer.header}), pa.py_buffer(answer.data.numpy())


def _record_batch(data: pa.Buffer) -> pa.RecordBatch:
    """A record batch of one row whose value is the buffer itself."""
    offsets = pa.py_buffer((0).to_bytes(8, "little") + data.size.to_bytes(8, "little"))
    return pa.RecordBatch.from_arrays(
        [pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data])], schema=SCHEMA
    )


class _Access(flight.ServerMiddlewareFactory):
    """Checks the token of every call."""

    def __init__(self, token: str, refused: Any) -> None:
        super().__init__()
        self._token, self._refused = token, refused

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        given = headers.get("authorization", [""])
        if len(given) != 1 or not is_authorized(given[0], self._token):
            self._refused()
            raise flight.FlightUnauthenticatedError("the token is missing or wrong")


def _check_port(host: str, port: int) -> None:
    """Raises `UserError` if the port is in use; gRPC would silently share it with another server."""
    try:
        free_address(host, port)
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: cannot be used ({error.strerror}); give another one, or --port 0 for "
            "any that is free"
        ) from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]
