"""The producer that requests samples from data servers over Arrow Flight.

Every sample has a home server (its position modulo the number of servers), so ranks that need the same sample ask the
same server, and a batch is distributed evenly. When a server fails, those that follow it take over the rest of its part
of the ticket; after a while it is asked again. Each position of a batch is filled exactly once, by the server that
answers.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import flight
from torch import Tensor

from motet.assignment.sample import Sample
from motet.data.service.server import DESCRIBE, Request
from motet.data.service.tensor_buffer import unpack, view_of_memory
from motet.data.service.tickets import (
    METADATA,
    Corrupt,
    Split,
    Ticket,
    authorization,
    samples_from_json,
    stop_at_corrupt,
)
from motet.errors import UserError, one_line

RETRY_S, LONGEST_RETRY_S = 0.5, 8.0
"""Time after which a failed server is asked again; it doubles with each failure."""

CHANNEL_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]

T = TypeVar("T")
Take = Callable[[dict[str, Any], pa.Buffer], list[T]]
"""Reads the requested samples, in their order, from the header and bytes of a message."""


FACTS = ("data", "contents", "sizes", "software")
"""Keys of a server's description of itself."""


class ServersFailedError(RuntimeError):
    """Raised when no data server answers, or one gives an impossible answer."""


class Connection:
    """A connection to one server, used by several threads at a time."""

    def __init__(self, address: str, token: str, timeout_s: float, tls_roots: bytes | None) -> None:
        self.address = address
        self._options = flight.FlightCallOptions(
            timeout=timeout_s, headers=[(b"authorization", authorization(token).encode())]
        )
        self._client = flight.FlightClient(address, tls_root_certs=tls_roots, generic_options=CHANNEL_OPTIONS)
        self._retry_s = RETRY_S
        self.down_until_s = 0.0
        """Time at which it is asked again, on the clock `time.monotonic`."""

    def note_failure(self) -> None:
        now_s = time.monotonic()
        if self.down_until_s <= now_s:  # Otherwise another call has noted the same failure.
            self.down_until_s = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)

    def note_success(self) -> None:
        self._retry_s = RETRY_S

    def describe(self) -> dict[str, Any]:
        with self._understood():
            (result,) = self._client.do_action(flight.Action(DESCRIBE, b""), self._options)
            facts = json.loads(result.body.to_pybytes())
            if not isinstance(facts, dict) or any(not isinstance(facts.get(key), dict) for key in FACTS):
                raise ValueError(f"no facts with {', '.join(FACTS)}")
            if not all(
                isinstance(size, int) and size > 0 and split in facts["contents"]
                for split, size in facts["sizes"].items()
            ):
                raise ValueError("sizes that are not positive")
            return facts

    def answers(self, request: Request, take: Take[T]) -> Iterator[list[T]]:
        """Yields the results of `take` for each message."""
        for chunk in self._client.do_get(flight.Ticket(request.to_bytes()), self._options):
            with self._understood():
                data = chunk.data.column(0).buffers()[2]
                header = json.loads(chunk.app_metadata.to_pybytes())
                answers = take(header, data if data is not None else pa.py_buffer(b""))
            yield answers

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Reports a malformed message in one line."""
        try:
            yield
        except (UserError, flight.FlightError, pa.ArrowException, OSError):
            raise
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            reason = one_line(f"{type(error).__name__}: {error}")[:200]
            raise UserError(
                f"data.servers: {self.address} sent what cannot be read ({reason}); start motet serve-data of this "
                "version there"
            ) from None

    def close(self) -> None:
        self._client.close()


class Servers:
    """All data servers, as one training process uses them."""

    def __init__(self, connections: Sequence[Connection], agreed: str, timeout_s: float) -> None:
        self._connections, self._agreed, self._timeout_s = connections, agreed, timeout_s
        self._threads = ThreadPoolExecutor(4 * len(connections), "data-servers")
        self._is_closed = False
        self.num_failures: Counter[str] = Counter()
        """Calls that another server took over or that were repeated, by address."""

    def ask(self, ticket: Ticket, take: Take[T]) -> list[T]:
        """The answers for the samples of a ticket, in their order."""
        num_homes = len(self._connections)
        shares = [[p for p, index in enumerate(ticket.indices) if index % num_homes == h] for h in range(num_homes)]
        futures = {
            home: self._threads.submit(
                self._ask_from,
                home,
                Ticket(ticket.split, tuple(ticket.indices[p] for p in places), ticket.module),
                take,
            )
            for home, places in enumerate(shares)
            if places
        }
        answers: dict[int, T] = {}
        for home, future in futures.items():
            answers.update(zip(shares[home], future.result(), strict=True))
        return [answers[place] for place in range(len(ticket.indices))]

    def _ask_from(self, home: int, ticket: Ticket, take: Take[T]) -> list[T]:
        """Asks the home server, and those that follow it if it fails."""
        answers: list[T] = []
        failed: set[str] = set()
        answered_s = time.monotonic()
        while len(answers) < len(ticket.indices):
            connection = self._first_that_is_up(home)
            rest = Ticket(ticket.split, ticket.indices[len(answers) :], ticket.module)
            try:
                for taken in connection.answers(Request(self._agreed, rest), take):
                    answers += taken
                    failed.clear()
                    answered_s = time.monotonic()
                connection.note_success()
                if len(answers) < len(ticket.indices):
                    raise ServersFailedError(f"data server {connection.address} has left samples out")
                if len(answers) > len(ticket.indices):
                    raise ServersFailedError(
                        f"data server {connection.address} has sent samples that were not requested"
                    )
            except (flight.FlightUnauthenticatedError, flight.FlightServerError) as error:
                raise ServersFailedError(f"data server {connection.address} refuses: {_reason(error)}") from None
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                connection.note_failure()
                failed.add(connection.address)
                self.num_failures[connection.address] += 1
                is_late = time.monotonic() > answered_s + self._timeout_s
                if self._is_closed or (is_late and len(failed) == len(self._connections)):
                    raise ServersFailedError(
                        f"data.servers: none has answered for {self._timeout_s:g} s; the last failure was that of "
                        f"{connection.address}: {_reason(error)}"
                    ) from None
        return answers

    def _first_that_is_up(self, home: int) -> Connection:
        """The first server from `home` on that has not failed recently. Waits for one."""
        order = [*self._connections[home:], *self._connections[:home]]
        while True:
            now_s = time.monotonic()
            for connection in order:
                if connection.down_until_s <= now_s:
                    return connection
            time.sleep(max(0.0, min(connection.down_until_s for connection in order) - now_s))

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for connection in self._connections:
            connection.close()


class RemoteProducer:
    """The producer of one data set of the servers."""

    def __init__(self, servers: Servers, split: Split, num_samples: int, fingerprint: str, *, may_skip: bool) -> None:
        self._servers, self._split, self._num_samples = servers, split, num_samples
        self.fingerprint, self.may_skip = fingerprint, may_skip
        self._lock = threading.Lock()
        self.received_bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._num_samples

    def samples(self, indices: Sequence[int]) -> list[Sample | Corrupt]:
        def take(header: dict[str, Any], data: pa.Buffer) -> list[Sample | Corrupt]:
            self._count(METADATA, data.size)
            return samples_from_json(data.to_pybytes())

        samples = self._servers.ask(Ticket(self._split, tuple(indices)), take)
        if not self.may_skip:
            stop_at_corrupt(samples)
        return samples

    def features(self, module: str, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        def take(header: dict[str, Any], data: pa.Buffer) -> list[dict[str, Tensor]]:
            if "corrupt" in header:
                raise UserError(header["corrupt"][1])
            self._count(module, data.size)
            return list(unpack(header["tensors"], view_of_memory(data.address, data.size, data)))

        return self._servers.ask(Ticket(self._split, tuple(indices), module), take)

    def _count(self, what: str, num_bytes: int) -> None:
        with self._lock:
            self.received_bytes[what] += num_bytes

    def close(self) -> None:
        self._servers.close()


def _reason(error: BaseException) -> str:
    """The first line of an error of Flight, without the details of gRPC."""
    line = (str(error).split("\n") or [""])[0]
    return line.partition(" gRPC client debug context")[0].partition(". Detail:")[0].strip() or type(error).__name__
