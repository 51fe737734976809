"""Ends whatever this process waits for in torch.distributed, from another thread.

gloo's operations can neither be aborted nor be waited for twice, and a peer that hangs or whose link is cut sends no
word. But when their sockets are shut down, all of them fail at once (within a few milliseconds, and so do a rendezvous
and a client of the store that are under way). The sockets belong to this process, so nothing else is touched.

One wait has no socket: of two ranks that make a pair, one listens for the other. If the other one has died by then, we
connect in its place and hang up: the pair is made, and fails.

Limits: Linux (/proc). gloo; on CUDA, NCCL's own abort would take its place. Whatever TCP sockets were not there before
count as torch.distributed's: a client that connects later must be able to connect again, and a server must not begin to
listen in this process.
"""

import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress

_FDS = "/proc/self/fd"
_SEQUENCE_NUMBER = struct.Struct("=q")
"""What gloo sends first on a new connection: which of the listener's pairs it is for, counted from 0."""
_CONNECT_S = 0.5
"""To this process itself."""


def tcp_sockets() -> frozenset[int]:
    """The inodes of this process's TCP sockets, connected or listening."""
    inodes = set()
    for inode, tcp_socket in _tcp_sockets():
        tcp_socket.close()
        inodes.add(inode)
    return frozenset(inodes)


def end_waits(*, except_inodes: Collection[int], num_ranks: int) -> None:
    """Shuts all connections down but those, and connects to what listens for others of `num_ranks` ranks. Their owners
    still close them."""
    for inode, tcp_socket in _tcp_sockets():
        with tcp_socket, suppress(OSError):  # It may be shut already.
            if inode in except_inodes:
                continue
            if _is_listening(tcp_socket):
                for pair in range(num_ranks):
                    _connect_and_hang_up(tcp_socket, pair)
            else:
                tcp_socket.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """With their inodes; each is a duplicate to be closed."""
    for name in os.listdir(_FDS):
        try:
            target = os.readlink(f"{_FDS}/{name}")
            if not target.startswith("socket:["):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # It was closed meanwhile.
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            yield int(target[8:-1]), found
        else:
            found.close()


def _is_listening(tcp_socket: socket.socket) -> bool:
    return tcp_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0


def _connect_and_hang_up(listener: socket.socket, pair: int) -> None:
    with socket.socket(listener.family, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_S)
        connection.connect(listener.getsockname())
        connection.sendall(_SEQUENCE_NUMBER.pack(pair))
