"""Hosts that are network namespaces of this machine, each on a cable of its own to one switch. Needs root and iproute2.

A cable can be cut: then nothing arrives any more at either end, and nobody is told.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from motet.resilience import launch_nodes

SWITCH = "10.78.0.254"
SWITCH_MAC = "02:00:0a:4e:00:fe"
"""Given, or it would become another one with each cable, and hosts that have learned an earlier one get no answers."""
CLONE_NEWNET = 0x40000000


class Hosts:
    """As many as there are nodes; node i is on host i."""

    def __init__(self, number: int) -> None:
        self._number = number

    def cut(self, host: int) -> None:
        _ip("link", "set", f"port{host}", "down")

    def enter(self, host: int) -> None:
        """Moves this process, and all that it starts later, to a host."""
        with open(f"/run/netns/chaos{host}") as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) == 0
        os.environ["GLOO_SOCKET_IFNAME"] = f"cable{host}"

    def set_up(self) -> None:
        _ip("link", "add", "chaos", "address", SWITCH_MAC, "type", "bridge")
        _ip("address", "add", f"{SWITCH}/24", "dev", "chaos")
        _ip("link", "set", "chaos", "up")
        for host in range(self._number):
            name = f"chaos{host}"
            _ip("netns", "add", name)
            _ip("link", "add", f"port{host}", "type", "veth", "peer", "name", f"cable{host}", "netns", name)
            _ip("link", "set", f"port{host}", "master", "chaos", "up")
            _ip("-n", name, "address", "add", f"10.78.0.{host + 1}/24", "dev", f"cable{host}")
            _ip("-n", name, "link", "set", f"cable{host}", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def take_down(self) -> None:
        # The cables too: the kernel takes its time to do it when a namespace ends.
        for host in range(self._number):
            for what in (["link", "del", f"port{host}"], ["netns", "del", f"chaos{host}"]):
                subprocess.run(["ip", *what], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", "chaos"], check=False, stderr=subprocess.DEVNULL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def separate_hosts(number: int) -> Iterator[Hosts]:
    """Nodes that are started meanwhile each run on a host of their own; the store is at the switch."""
    assert os.geteuid() == 0, "network namespaces need root"
    hosts = Hosts(number)
    hosts.take_down()
    original = launch_nodes.run_agent

    def run_agent(config, address, secret, node, *others):  # type: ignore[no-untyped-def]
        hosts.enter(node)
        original(config, address, secret, node, *others)

    try:
        hosts.set_up()
        with mock.patch.multiple(launch_nodes, run_agent=run_agent, LOOPBACK=SWITCH):
            yield hosts
    finally:
        hosts.take_down()
