"""The meeting place of some ranks: torch's own store, through which they find each other.

torch's stores know no secrets (docs/security.md), so it listens at one address alone.
"""

import os
import socket

from torch.distributed import TCPStore


def open_meeting_place(host: str) -> tuple[TCPStore, int]:
    """Opens one at this address of this machine. Returns it with its port."""
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(server.fileno()))
    return store, port
