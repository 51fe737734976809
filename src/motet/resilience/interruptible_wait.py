"""Ends what this process waits for in torch.distributed, where shut connections (connections.py) do not.

gloo tells two kinds of operations nothing of a lost connection: a send that has begun to leave, and a receive that has
begun to arrive. They sleep until their timeout, and so does the thread that runs the collective that they belong to.
So a helper thread waits in the place of whoever waits, who can be called off, and leaves the helper behind.

Cost: two changes of threads for each wait (6 us of a processor, 15 us on an idle machine).

Limits: replaces `torch.distributed.Work.wait` for all, as most collectives wait inside torch. What is left behind keeps
its buffers, and its groups their descriptors, until the timeout that it was begun with.
"""

import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

# Ends whatever this process waits for in torch.distributed, from another thread.
#
# gloo's operations can neither be aborted nor be waited for twice, and a peer that hangs or whose link is cut sends no
# word. But when their sockets are shut down, all of them fail at once (within a few milliseconds, and so do a
# rendezvous and a client of the store that are under way). The sockets belong to this process, so nothing else is
# touched.
#
# One wait has no socket: of two ranks that make a pair, one listens for the other. If the other one has died by then,
# we connect in its place and hang up: the pair is made, and fails. Once for each pair: gloo keeps the connection until
# the pair is waited for, and forgets to close what comes after it.
#
# Some operations are told nothing even so (waits.py).
#
# Limits: Linux (/proc). gloo; on CUDA, NCCL's own abort would take its place. Whatever TCP sockets were not there
# before count as torch.distributed's: a client that connects later must be able to connect again, and a server must
# not begin to listen in this process.


_FDS = "/proc/self/fd"
_SEQUENCE_NUMBER = struct.Struct("=q")
"""What gloo sends first on a new connection: which of the listener's pairs it is for, counted from 0."""
_CONNECT_S = 0.5
"""To this process itself."""


class Connections:
    """Those that are made in this process from now on: all there are now (to data servers) are left alone."""

    def __init__(self) -> None:
        self._kept = _inodes()
        self._hung_up: set[tuple[int, int]] = set()
        """Listening sockets, and the pairs for which we have connected to them."""

    def end_waits(self, *, num_ranks: int) -> None:
        """Shuts them down, and connects to what listens for others of `num_ranks` ranks. Their owners still close
        them."""
        for inode, tcp_socket in _tcp_sockets():
            with tcp_socket, suppress(OSError):  # It may be shut already.
                if inode in self._kept:
                    continue
                if _is_listening(tcp_socket):
                    self._take_places(inode, tcp_socket, num_ranks)
                else:
                    tcp_socket.shutdown(socket.SHUT_RDWR)

    def _take_places(self, inode: int, listener: socket.socket, num_ranks: int) -> None:
        for pair in range(num_ranks):
            if (inode, pair) not in self._hung_up:
                _connect_and_hang_up(listener, pair)
                self._hung_up.add((inode, pair))


def _inodes() -> frozenset[int]:
    """Of this process's TCP sockets, connected or listening."""
    inodes = set()
    for inode, tcp_socket in _tcp_sockets():
        tcp_socket.close()
        inodes.add(inode)
    return frozenset(inodes)


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """With their inodes; each is a duplicate to be closed."""
    for name in os.listdir(_FDS):
        try:
            duplicate = os.dup(int(name))  # First of all: the number may soon be another's.
        except OSError:  # It was closed meanwhile.
            continue
        status = os.fstat(duplicate)
        if not stat.S_ISSOCK(status.st_mode):
            os.close(duplicate)
            continue
        found = socket.socket(fileno=duplicate)
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            yield status.st_ino, found
        else:
            found.close()


def _is_listening(tcp_socket: socket.socket) -> bool:
    return tcp_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0


def _connect_and_hang_up(listener: socket.socket, pair: int) -> None:
    with socket.socket(listener.family, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_S)
        connection.connect(listener.getsockname())
        connection.sendall(_SEQUENCE_NUMBER.pack(pair))


GRACE_S = 0.5
"""For a wait to end by itself, which it does within milliseconds where gloo is told."""
_RELEASE_POLL_S = 0.2
_OWN_REFERENCES = 2
"""To a group, of the list that it is in and of the call that counts them."""

_Outcome = SimpleQueue[tuple[Any, BaseException | None]]
"""What a wait returned, or raised."""
_Tasks = SimpleQueue[tuple[Callable[[], Any], _Outcome] | None]


class Waits:
    """Those of all threads of this process."""

    def __init__(self) -> None:
        self.generation = 0
        """Of the membership under which waits begin."""
        self._helpers = threading.local()
        self._lock = threading.Lock()
        self._pending: dict[_Outcome, tuple[int, float]] = {}
        """Where the outcome of each is awaited: its generation, and since when."""

    @contextmanager
    def can_be_called_off(self, work_type: Any) -> Iterator[None]:
        """All that begin in the block can. `work_type`: `torch.distributed.Work`."""
        wait = work_type.wait

        def wait_or_be_called_off(work: Any, *args: Any, **kwargs: Any) -> Any:
            if work.is_completed():
                return wait(work, *args, **kwargs)
            return self._wait(lambda: wait(work, *args, **kwargs))

        work_type.wait = wait_or_be_called_off
        try:
            yield
        finally:
            work_type.wait = wait

    def call_off(self, before_generation: int, since: float) -> None:
        """Those of generations before that one, of which it is known `since` when that they are over
        (`time.monotonic()`), raise `RuntimeError`; but each has `GRACE_S`."""
        now = time.monotonic()
        with self._lock:
            pending = list(self._pending.items())
        for outcome, (generation, begun) in pending:
            if generation < before_generation and now - max(begun, since) >= GRACE_S:
                outcome.put((None, RuntimeError("called off, as what it waits for is over")))

    def _wait(self, wait: Callable[[], Any]) -> Any:
        tasks = self._tasks()
        outcome: _Outcome = SimpleQueue()
        with self._lock:
            self._pending[outcome] = self.generation, time.monotonic()
        try:
            tasks.put((wait, outcome))
            result, error = outcome.get()
        except BaseException:  # Of a signal's handler.
            del self._helpers.helper
            raise
        finally:
            with self._lock:
                del self._pending[outcome]
        if error is None:
            return result
        del self._helpers.helper  # It may still wait.
        try:
            raise error
        finally:
            del error  # Else this frame and the error would keep each other.

    def _tasks(self) -> "_Tasks":
        """Those of this thread's helper."""
        if not hasattr(self._helpers, "helper"):
            self._helpers.helper = _Helper()
        return self._helpers.helper.tasks


class _Helper:
    """A thread that does one task after another, until nobody refers to this object and the last task is done."""

    def __init__(self) -> None:
        self.tasks: _Tasks = SimpleQueue()
        threading.Thread(target=_serve, args=(self.tasks,), name="waits", daemon=True).start()

    def __del__(self) -> None:
        self.tasks.put(None)


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        wait, outcome = task
        try:
            outcome.put((wait(), None))
        except BaseException as error:
            outcome.put((None, error))
        del task, wait, outcome  # They hold buffers.


def release_in_background(groups: list[object]) -> None:
    """Whoever lets go of a process group last waits in its destructor for collectives that do not end: this will be a
    thread of its own, which takes the list over."""
    threading.Thread(target=_release, args=(groups,), name="release", daemon=True).start()


def _release(groups: list[object]) -> None:
    while groups:
        for place in reversed(range(len(groups))):
            if sys.getrefcount(groups[place]) == _OWN_REFERENCES:
                del groups[place]
        time.sleep(_RELEASE_POLL_S)
