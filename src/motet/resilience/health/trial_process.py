"""The process of a node that sums numbers with a process of another node, over gloo as ranks do.

For each sum it makes a process, which the kernel ends after `TRIAL_S`, whatever gloo waits for. Rank 0 is the
candidate's, at whose store both meet.
"""

import ctypes
import gc
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from math import ceil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from motet.errors import one_line
from motet.resilience.health.neighbours import MAX_MESSAGE_BYTES, TRIAL_S
from motet.resilience.meeting_place import open_meeting_place
from motet.resilience.process_control import PR_SET_PDEATHSIG

PROCESS_NAME = "motet sums"
"""What `ps` calls these processes, on Linux."""
CONNECT_S = 10.0
"""Time for the meeting place, which is open already, to take a connection."""
NUM_SUMMED = 4096
"""Numbers that are summed."""


def serve_trials(pipe: Connection, agent_ends: Sequence[Connection]) -> None:
    """Carries out what the agent asks for, the newest request instead of an older one, until the agent ends."""
    for other in agent_ends:
        other.close()
    with suppress(OSError):
        Path("/proc/self/comm").write_text(PROCESS_NAME)
    gc.freeze()
    child = 0
    while True:
        try:
            request = json.loads(pipe.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, OSError):
            os._exit(0)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            child = 0
        if request["do"] != "stop":
            parent = os.getpid()
            child = os.fork()
            if not child:
                _run(request, pipe, parent)


def _run(request: dict[str, Any], pipe: Connection, parent: int) -> None:
    """Carries out one request in a process of its own, which does not outlive its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(ceil(TRIAL_S))
    if os.getppid() != parent:
        os._exit(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)

    def tell(**what: object) -> None:
        pipe.send_bytes(json.dumps({"name": request["name"], **what}).encode())

    try:
        if request["do"] == "open":
            store, port = open_meeting_place(request["host"])
            tell(port=port)
        else:
            host, port = request["address"]
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_S))
        tell(failure=sum_of_two(0 if request["do"] == "open" else 1, store))
    except Exception as error:
        tell(failure=f"{type(error).__name__}: {one_line(error)[:200]}")
    if request["do"] == "open":
        signal.pause()  # The other one may still read; the agent ends this process.
    os._exit(0)


def sum_of_two(rank: int, store: dist.Store) -> str | None:
    """Sums with the other rank. Returns what is wrong with the sum; None: nothing."""
    store.set_timeout(timedelta(seconds=TRIAL_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TRIAL_S))
    numbers = torch.arange(NUM_SUMMED, dtype=torch.float64)
    total = numbers * (rank + 1)
    dist.all_reduce(total)
    num_wrong = int((total != 3 * numbers).sum())
    return f"{num_wrong} of {NUM_SUMMED} sums of whole numbers are wrong" if num_wrong else None
