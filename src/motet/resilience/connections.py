"""Ends whatever this process waits for in torch.distributed, from another thread.

gloo's operations can neither be aborted nor be waited for twice, and a peer that hangs or whose link is cut sends no
word. But when their sockets are shut down, all of them fail at once (within a few milliseconds, and so do a rendezvous
and a client of the store that are under way). The sockets belong to this process, so nothing else is touched.

One wait has no socket: of two ranks that make a pair, one listens for the other. If the other one has died by then, we
connect in its place and hang up: the pair is made, and fails. Once for each pair: gloo keeps the connection until the
pair is waited for, and forgets to close what comes after it.

Some operations are told nothing even so (waits.py).

Limits: Linux (/proc). gloo; on CUDA, NCCL's own abort would take its place. Whatever TCP sockets were not there before
count as torch.distributed's: a client that connects later must be able to connect again, and a server must not begin to
listen in this process.
"""

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress

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
