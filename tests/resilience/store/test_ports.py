"""A training that survives failures opens no port to other machines when it runs on one, and one address where it runs
on several."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from interrupted_training import at, config_of, train_and

from motet.resilience.process_control import Children
from motet.resilience.recover import TrainingProcess
from motet.resilience.store.embedded import EmbeddedStore, StoreProcess


def listening(launcher: int) -> list[str]:
    """Addresses, as in /proc/net/tcp, at which the launcher and what it has started listens."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = {launcher}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    inodes = {os.readlink(fd) for pid in family for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def test_only_loopback_is_listened_at(tmp_path: Path) -> None:
    launcher, found = os.getpid(), tmp_path / "found"
    config = config_of(tmp_path / "run", train__steps=2)
    train_and(config, at(1, 1, lambda: found.write_text("\n".join(listening(launcher))) and None))
    addresses = found.read_text().split()
    assert len(addresses) >= 2, "the store, and the meeting place of the ranks"
    assert all(address.startswith("0100007F:") for address in addresses), addresses


def test_a_store_listens_at_its_own_address_alone() -> None:
    """Not at the other addresses of its machine."""
    with StoreProcess(("127.0.0.2", 0), b"a secret of this run", 1e6) as store, Children() as children:
        store.start(children)
        with EmbeddedStore(store.address, b"a secret of this run", 30) as client:
            client.sync()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", store.address[1]))


def test_ranks_meet_at_their_machines_address_alone() -> None:
    """torch's own store asks for no secret, so it must not be reachable from other networks of the machine."""
    process = TrainingProcess.__new__(TrainingProcess)
    told: list[tuple[int, int]] = []
    process._link = SimpleNamespace(send=lambda _, place: told.append(place))  # type: ignore[assignment]
    membership = SimpleNamespace(generation=1)
    place = process._meeting_place(SimpleNamespace(rank=0, host="127.0.0.2", membership=membership))  # type: ignore[arg-type]
    [(_, port)] = told
    assert place.port == port
    socket.create_connection(("127.0.0.2", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
