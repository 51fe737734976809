import errno
import os
import socket
from contextlib import AbstractContextManager
from unittest import mock

import pytest

from motet.addresses import free_address, host_and_port

IN_USE = os.strerror(errno.EADDRINUSE)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:29500", ("localhost", 29500)),
        ("::1:29500", ("::1", 29500)),
        ("[::1]:29500", ("::1", 29500)),
        ("[]:29500", None),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("10.0.0.1:65536", None),
        pytest.param("10.0.0.1:" + "9" * 5000, None, id="a port of 5000 digits"),
        ("10.0.0.1:-1", None),
        ("10.0.0.1:²", None),
        ("10.0.0.1:", None),
        (":29500", None),
        ("29500", None),
        ("", None),
    ],
)
def test_host_and_port(text: str, address: tuple[str, int] | None) -> None:
    assert host_and_port(text) == address


def test_a_free_port() -> None:
    host, port = free_address("127.0.0.1", 0)
    assert host == "127.0.0.1"
    assert free_address(host, port) == (host, port)


@pytest.mark.parametrize(
    ("host", "why"),
    [("192.0.2.1", os.strerror(errno.EADDRNOTAVAIL)), ("..", "no host can have this name")],
)
def test_no_address_of_this_machine(host: str, why: str) -> None:
    with pytest.raises(OSError, match=why):
        free_address(host, 29500)


def test_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match=IN_USE):
        free_address("127.0.0.1", server.getsockname()[1])


@pytest.mark.parametrize("ipv6_works", [True, False])
def test_a_host_of_two_families(ipv6_works: bool) -> None:
    """One of them need not work; but where somebody listens at one, a client may reach that one."""
    create_server = socket.create_server

    def create(address: tuple[str, int], *, family: int) -> AbstractContextManager[socket.socket]:
        if family == socket.AF_INET:
            return create_server(address)
        if ipv6_works:
            return create_server((address[0], 0))
        raise OSError(errno.EADDRNOTAVAIL, "no such address")

    families = [(socket.AF_INET6,), (socket.AF_INET,)]
    with (
        create_server(("127.0.0.1", 0)) as server,
        mock.patch.object(socket, "getaddrinfo", return_value=families),
        mock.patch.object(socket, "create_server", create),
    ):
        taken = server.getsockname()[1]
        with pytest.raises(OSError, match=IN_USE):
            free_address("127.0.0.1", taken)
        server.close()
        assert free_address("127.0.0.1", taken)[0] == "127.0.0.1"
