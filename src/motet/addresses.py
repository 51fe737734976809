"""Addresses of the program's own servers: as users give them, and whether one can listen there."""

import errno
import fcntl
import os
import socket
import struct

MAX_PORT = 65535

Address = tuple[str, int]
"""Host and port."""


def host_and_port(text: str) -> tuple[str, int] | None:
    """Host and port of HOST:PORT; None if it has another form. An IPv6 address may stand in brackets."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not port.isdecimal() or len(port) > len(str(MAX_PORT)) or int(port) > MAX_PORT:
        return None
    return host, int(port)


def address_text(address: Address) -> str:
    host, port = address
    return f"{host}:{port}"


def free_address(host: str, port: int) -> tuple[str, int]:
    """Returns the address, with a free port in place of port 0.

    Raises `OSError`, whose `strerror` says why, unless it is an address of this machine at which nobody listens. Of a
    host with several, such as localhost with IPv4 and IPv6, one is enough; somebody may listen at none."""
    try:
        families = [family for family, *_ in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except UnicodeError:
        raise OSError(errno.EINVAL, "no host can have this name") from None
    ports, failed = [], 0
    for family in families:
        try:
            with socket.create_server((host, port), family=family) as server:
                ports.append(server.getsockname()[1])
        except OSError as error:
            failed = error.errno or 0
            if failed == errno.EADDRINUSE:
                break
    if not ports or failed == errno.EADDRINUSE:
        raise OSError(failed, os.strerror(failed))
    return host, ports[0]


# The network interface that leads to another machine (Linux, IPv4): gloo takes the loopback unless it is told.


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
