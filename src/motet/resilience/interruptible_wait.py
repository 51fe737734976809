"""Interrupts whatever this process waits for in torch.distributed, from another thread.

gloo can neither abort an operation nor wait for it twice, and a peer that hangs or whose link is cut sends no error.
Two mechanisms end such waits:

* `Connections.shut_down` shuts down the process's own sockets, upon which almost all operations fail within
  milliseconds, and so do a rendezvous and a call of a store client that are under way. One wait has no socket: of two
  ranks that make a pair, one listens for the other. If the other has died by then, this process connects in its place
  and hangs up: the pair is made, and fails. It does so once per pair, as gloo keeps the connection until the pair is
  waited for, and never closes later ones.
* `InterruptibleWaits` covers the operations that gloo does not notify: a send that has begun to leave, and a receive
  that has begun to arrive. They sleep until their timeout, and so does the thread of the collective that they belong
  to. So a helper thread waits in the caller's place; the caller can be interrupted, and abandons the helper.
  Cost: two thread switches per wait (6 us of processor time, 15 us on an idle machine).

Limits: Linux (/proc) and gloo; NCCL's communicators, which wait on the device, are aborted before
(`motet.resilience.process_control`). All TCP sockets that did not exist before count as torch.distributed's: a client
that connects later must be able to reconnect, and a server must not start to listen in this process.
`torch.distributed.Work.wait` is replaced for all callers, as most collectives wait inside torch. An abandoned wait
keeps its buffers, and its groups keep their descriptors, until its timeout.
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

_FDS = "/proc/self/fd"
_SEQUENCE_NUMBER = struct.Struct("=q")
"""The first bytes that gloo sends on a new connection: the index of the listener's pair that it is for."""
_CONNECT_S = 0.5
"""Timeout for connecting to this process itself."""
GRACE_S = 0.5
"""Time for a wait to end by itself, which takes milliseconds where gloo is notified."""
_RELEASE_POLL_S = 0.2
_OWN_REFERENCES = 2
"""References to a group from the list that holds it and from the call that counts them."""


class Connections:
    """The TCP connections that this process makes from now on; existing ones (to data servers) are left alone."""

    def __init__(self) -> None:
        self._kept = set()
        for inode, tcp_socket in _tcp_sockets():
            tcp_socket.close()
            self._kept.add(inode)
        self._hung_up: set[tuple[int, int]] = set()
        """Listening sockets, and the pairs for which this process has connected to them."""

    def shut_down(self, *, num_ranks: int) -> None:
        """Shuts the connections down, and connects to sockets that listen for any of `num_ranks` ranks. The owners
        still have to close them."""
        for inode, tcp_socket in _tcp_sockets():
            with tcp_socket, suppress(OSError):  # It may be shut down already.
                if inode in self._kept:
                    continue
                if not tcp_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    tcp_socket.shutdown(socket.SHUT_RDWR)
                    continue
                for pair in range(num_ranks):
                    if (inode, pair) not in self._hung_up:
                        with socket.socket(tcp_socket.family, socket.SOCK_STREAM) as connection:
                            connection.settimeout(_CONNECT_S)
                            connection.connect(tcp_socket.getsockname())
                            connection.sendall(_SEQUENCE_NUMBER.pack(pair))
                        self._hung_up.add((inode, pair))


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yields this process's TCP sockets with their inodes, as duplicates that the caller must close."""
    for name in os.listdir(_FDS):
        try:
            duplicate = os.dup(int(name))  # Before anything else: the number may soon be another file's.
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


_Outcome = SimpleQueue[tuple[Any, BaseException | None]]
"""Result or exception of a wait."""
_Wait = Callable[[], Any]
_Tasks = SimpleQueue[tuple[_Wait, _Outcome] | None]


class InterruptibleWaits:
    """The waits of all threads of this process."""

    def __init__(self) -> None:
        self.generation = 0
        """Generation of the membership under which waits begin."""
        self._for_helper: Callable[[_Wait], _Wait] = lambda wait: wait
        self._helpers = threading.local()
        self._lock = threading.Lock()
        self._pending: dict[_Outcome, tuple[int, float]] = {}
        """By wait: its generation and when it began."""

    @contextmanager
    def make_interruptible(
        self, work_type: Any, for_helper: Callable[[_Wait], _Wait] = lambda wait: wait
    ) -> Iterator[None]:
        """Makes all waits that begin in the block interruptible. `work_type`: `torch.distributed.Work`. `for_helper`:
        gives a wait of this thread to another one."""
        wait, self._for_helper = work_type.wait, for_helper

        def interruptible_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if work.is_completed():
                return wait(work, *args, **kwargs)
            return self._wait(lambda: wait(work, *args, **kwargs))

        work_type.wait = interruptible_wait
        try:
            yield
        finally:
            work_type.wait = wait

    def interrupt(self, before_generation: int, since: float) -> None:
        """Makes waits of earlier generations raise `RuntimeError`, each at least `GRACE_S` after it began and after
        `since` (by `time.monotonic()`), when it became known that they are obsolete."""
        now = time.monotonic()
        with self._lock:
            pending = list(self._pending.items())
        for outcome, (generation, begun) in pending:
            if generation < before_generation and now - max(begun, since) >= GRACE_S:
                outcome.put((None, RuntimeError("interrupted, as a newer membership has begun")))

    def _wait(self, wait: Callable[[], Any]) -> Any:
        if not hasattr(self._helpers, "helper"):
            self._helpers.helper = _Helper()
        outcome: _Outcome = SimpleQueue()
        with self._lock:
            self._pending[outcome] = self.generation, time.monotonic()
        try:
            self._helpers.helper.tasks.put((self._for_helper(wait), outcome))
            result, error = outcome.get()
        except BaseException:  # From a signal handler.
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
            del error  # Otherwise this frame and the error would refer to each other.


class _Helper:
    """A thread that runs one task after another, until nobody refers to this object and the last task is done."""

    def __init__(self) -> None:
        self.tasks: _Tasks = SimpleQueue()
        threading.Thread(target=_serve, args=(self.tasks,), name="interruptible waits", daemon=True).start()

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
    """Releases process groups in a thread, which takes the list over: whoever drops the last reference to a group waits
    in its destructor for collectives that never end."""
    threading.Thread(target=_release, args=(groups,), name="release", daemon=True).start()


def _release(groups: list[object]) -> None:
    while groups:
        for place in reversed(range(len(groups))):
            if sys.getrefcount(groups[place]) == _OWN_REFERENCES:
                del groups[place]
        time.sleep(_RELEASE_POLL_S)
