"""Which network interface leads to another machine: gloo has to be told, and takes the loopback otherwise.

Limits: Linux, IPv4.
"""

import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915


def interface_towards(connection: socket.socket) -> str | None:
    """The name of the interface that a connection goes through; None if none of IPv4 has its address."""
    here = connection.getsockname()[0]
    for _, name in socket.if_nameindex():
        if _address_of(connection, name) == here:
            return name
    return None


def _address_of(any_socket: socket.socket, interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
