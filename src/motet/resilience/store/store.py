"""The process that runs the store, a c10d `TCPStore`, and a client whose calls end in time and notice the store's loss.

The store writes nothing to disk. When its process is lost, an empty one replaces it at the same address; keeper.py and
store_failover.py say who writes its contents again.

Limits: the server at the address must be a store; a client of another server's port waits until its timeout.
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from motet.addresses import address_text, free_address
from motet.errors import UserError
from motet.resilience.interruptible_wait import Connections
from motet.resilience.membership import Address, StoreLostError
from motet.resilience.process_control import Children

T = TypeVar("T")

START_S = 10.0
"""Time for the store's process to start listening."""
CONNECT_S = 2.5
"""Time for a store to accept a client."""
PROBE_S = 0.5
"""Time for a server to answer at all."""
ROUNDS = 8
"""Rounds of a watchdog's thread within its patience. Rounds are counted, not time: if this whole process was stopped
and continues, nothing was late."""


class Watchdog:
    """Ends calls that would wait forever: a client of a store that is stopped, or behind a cut link, has no timeout.

    In a `with` block, calls `act` in a thread if a watched call takes `patience_s`, and again after each further round.
    `act` must make the call fail or end the process, as a thread cannot be interrupted."""

    def __init__(self, patience_s: float, act: Callable[[], object]) -> None:
        self._round_s, self._act = patience_s / ROUNDS, act
        self._watched: list[None] | None = None
        """One entry per round of the watched call; None: nothing is watched."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watchdog", daemon=True)

    @contextmanager
    def watch(self) -> Iterator[None]:
        self._watched = []
        try:
            yield
        finally:
            self._watched = None

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()  # A process that is forked after this has no thread.

    def _look_on(self) -> None:
        while not self._is_over.wait(self._round_s):
            watched = self._watched
            if watched is None:
                continue
            watched.append(None)
            if len(watched) > ROUNDS:
                self._act()


def is_listening(address: Address, timeout_s: float = PROBE_S) -> bool:
    """Whether a server listens there. (torch's client would retry for long, and log it.)"""
    try:
        with socket.create_connection(address, timeout=timeout_s) as connection:
            return connection.getsockname() != connection.getpeername()  # A socket may connect to itself.
    except OSError:
        return False


class StoreClient:
    """A client to be used in a `with` block. Each call returns or raises `StoreLostError` within about `patience_s`.

    `on_late`: makes a late call fail; None: shuts down this process's connections, but for those that existed when this
    object was made."""

    def __init__(self, address: Address, patience_s: float, on_late: Callable[[], object] | None = None) -> None:
        self.address, self._patience_s = address, patience_s
        connections = Connections()
        self._watchdog = Watchdog(patience_s, on_late or (lambda: connections.shut_down(num_ranks=0)))
        self._store: dist.Store | None = None

    def __enter__(self) -> "StoreClient":
        self._watchdog.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._watchdog.__exit__(kind, error, None)
        self._store = None

    def connect(self, address: Address | None = None) -> None:
        """Connects to the store that is there now, which may be another one. `address`: None: where it was."""
        self._store, self.address = None, address or self.address
        if not is_listening(self.address):
            raise StoreLostError(f"nobody listens at {address_text(self.address)}")
        # If it ends at this moment, torch's client waits twice this time for another one to listen there.
        to_connect = timedelta(seconds=max(CONNECT_S, self._patience_s / 4))
        store = self._try(lambda: dist.TCPStore(*self.address, is_master=False, timeout=to_connect))
        store.set_timeout(timedelta(seconds=self._patience_s))
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._call(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._call(lambda store: store.get(key))

    def check(self, keys: list[str]) -> bool:
        return self._call(lambda store: store.check(keys))

    def add(self, key: str, amount: int) -> int:
        return self._call(lambda store: store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._call(lambda store: store.compare_set(key, expected, desired))

    def _call(self, call: Callable[[dist.Store], T]) -> T:
        store = self._store
        if store is None:
            raise StoreLostError("it is not connected")
        return self._try(lambda: call(store))

    def _try(self, call: Callable[[], T]) -> T:
        try:
            with self._watchdog.watch():
                return call()
        except dist.DistError as error:
            self._store = None
            raise StoreLostError(str(error).partition("\n")[0]) from None


class StoreNotStartedError(RuntimeError):
    """The store's process does not answer."""


class StoreProcess(AbstractContextManager["StoreProcess"]):
    """The process that runs the store; reserves its port in a `with` block. `listen`: host and port; port 0: any free
    one, but the same after a restart, as nodes return to where they joined.

    Raises `UserError` unless the address is one of this machine's and free, though the store listens at all of them."""

    def __init__(self, listen: tuple[str, int]) -> None:
        try:
            self.address = free_address(*listen)
        except OSError as error:
            raise _no_address(listen, str(error.strerror)) from None
        self._process: BaseProcess | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "StoreProcess":
        # A bound socket that does not listen leaves the port to servers with SO_REUSEADDR, such as the store.
        reserved = self._stack.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", self.address[1]))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, children: Children) -> None:
        """Starts or restarts the store. Raises `StoreNotStartedError`, or `UserError` if it cannot listen."""
        if self._process is not None:
            self.kill()
            self._process.join()  # Until then it has its port.
        receiver, sender = Pipe(duplex=False)
        self._process = children.start(_host_store, sender, self.address)
        sender.close()  # Otherwise the end of the process would go unnoticed.
        try:
            answer = receiver.recv() if receiver.poll(START_S) else "it does not answer"
        except EOFError:
            answer = "it died"
        if answer is None:
            return
        if isinstance(answer, OSError):
            raise _no_address(self.address, str(answer))
        raise StoreNotStartedError(f"the store's process does not start: {answer}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def wait_for_end(self) -> int | None:
        """Returns its exit code; kills it if it is still alive."""
        if self._process is None:
            return None
        self._process.join(1.0)  # Its connections end shortly before it does.
        self._process.kill()
        self._process.join()
        return self._process.exitcode


def _host_store(answer: Connection, listen: tuple[str, int]) -> None:
    try:
        store = dist.TCPStore(*listen, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_S))
    except (RuntimeError, ValueError) as error:
        answer.send(OSError(str(error).splitlines()[0]))
        return
    answer.send(None)
    signal.pause()
    assert store  # Keeps the store alive as long as this process.


def _no_address(listen: tuple[str, int], why: str) -> UserError:
    host, port = listen
    return UserError(
        f"--listen: {host}:{port} cannot be listened at ({why}); give an address of this machine and a free port"
    )
