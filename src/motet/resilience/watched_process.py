"""A training process as its node's agent sees it: whether it lives, computes, or stands still.

Limits: Linux (/proc).
"""

import contextlib
import glob
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

STOPPED = set("TtZX")
RUNNABLE = "R"
"""A thread's state: it computes, or waits for a processor to do so."""


@dataclass
class WatchedProcess:
    process: BaseProcess
    pipe: Connection
    last_sign: float = field(default_factory=time.monotonic)
    """By `time.monotonic()`."""
    last_cpu_ticks: int = -1
    is_ready: bool = False
    is_done: bool = False

    def is_idle(self) -> bool:
        """Whether it is stopped, or has not computed since the last call and is not about to."""
        states, ticks = _process_state(self.process.pid or 0)
        before, self.last_cpu_ticks = self.last_cpu_ticks, ticks
        return states <= STOPPED or (before == ticks and RUNNABLE not in states)


def how_it_ended(exitcode: int) -> str:
    if exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"exited with code {exitcode}"


def _process_state(pid: int) -> tuple[set[str], int]:
    """The state letters of its threads, and the processor ticks that they have used, by /proc."""
    states, ticks = set(), 0
    for path in glob.glob(f"/proc/{pid}/task/*/stat"):
        with contextlib.suppress(OSError), open(path) as file:
            fields = file.read().rpartition(")")[2].split()
            states.add(fields[0])
            ticks += int(fields[11]) + int(fields[12])
    return states, ticks
