"""A training that survives failures opens no port to other machines when it runs on one."""

import os
from pathlib import Path

from interrupted_training import at, config_of, train_and


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
