"""Ends whatever this process waits for in torch.distributed, from another thread.

gloo's operations can neither be aborted nor be waited for twice, and a peer that hangs or whose link is cut sends no
word. But when their sockets are shut down, all of them fail at once (within a few milliseconds, and so do a rendezvous
and a client of the store that are under way). The sockets belong to this process, so nothing else is touched.

Limits: Linux (/proc). gloo; on CUDA, NCCL's own abort would take its place. Whatever TCP connections were not there
before count as torch.distributed's: a client that connects later must be able to connect again.
"""

import os
import socket
from collections.abc import Collection

_FDS = "/proc/self/fd"


def tcp_connections() -> dict[int, int]:
    """By inode of a connected TCP socket of this process: its file descriptor."""
    found = {}
    for name in os.listdir(_FDS):
        try:
            target = os.readlink(f"{_FDS}/{name}")
            if not target.startswith("socket:["):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                is_stream = connection.type == socket.SOCK_STREAM
                if is_tcp and is_stream and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[int(target[8:-1])] = int(name)
        except OSError:  # It was closed meanwhile.
            continue
    return found


def shut_down(*, except_inodes: Collection[int]) -> int:
    """Shuts all connections down but those. Returns how many there were. Their owners still close them."""
    number = 0
    for inode, descriptor in tcp_connections().items():
        if inode in except_inodes:
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                number += 1
        except OSError:  # Already shut, or closed meanwhile.
            continue
    return number
