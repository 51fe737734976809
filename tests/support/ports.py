"""Ports for servers that go and come back.

A port that the kernel gives may be given to somebody else while its server is away.
"""

import os
import socket
from itertools import count
from pathlib import Path

FIRST = 10_000
_turns = count()


def port_of_its_own() -> int:
    """A free one of those that the kernel gives to nobody who asks for any."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for turn in _turns:
        # Tests in other processes begin at other places: a server may share its port without a word.
        port = FIRST + (7919 * os.getpid() + turn) % (end - FIRST)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError
