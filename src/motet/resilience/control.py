"""A training process's line to the agent of its node: signs of life go one way, memberships come the other.

A thread holds this end, so that it works whatever the process waits for. An urgent membership ends what that is: its
connections are shut down, and only then is the new membership shown to the training loop.
"""

import contextlib
import os
import threading
import time
from multiprocessing.connection import Connection

from motet.resilience.connections import end_waits, tcp_sockets
from motet.resilience.membership import Call

BEAT_S = 0.1
FINISH = "finish"
"""The agent's last word: every process has finished, or the training is over."""


class Control:
    """`pipe`: carries `Call`s and `FINISH` in, (word, more) out. The process ends if the agent does."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._kept: frozenset[int] = frozenset()
        self._num_ranks = 0
        self._changed = threading.Condition()
        self._newest: Call | None = None
        self._newest_urgent = 0
        """Generation of the newest one that does not wait."""
        self._finished = False
        self._sending = threading.Lock()
        self._generation = 0
        """Of the membership under which this process works."""
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def begin(self, generation: int, num_ranks: int) -> None:
        """Called before anything is done under a membership. Connections that there are now (to data servers) outlive
        it."""
        with self._changed:
            self._generation, self._num_ranks = generation, num_ranks
            self._kept = tcp_sockets()

    def is_change_due(self) -> bool:
        """Whether a newer membership waits for the end of the iteration."""
        newest = self._newest
        return newest is not None and newest.membership.generation > self._generation

    def newer(self, timeout_s: float | None) -> Call | None:
        """To a membership newer than the one this process works under; None: none came in time, or all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self.is_change_due(), timeout_s)
            return self._newest if self.is_change_due() and not self._finished else None

    @property
    def is_finished(self) -> bool:
        return self._finished

    def tell(self, word: str, more: object = None) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._pipe.send((word, more))

    def _listen(self) -> None:
        last_beat = 0.0
        while True:
            if time.monotonic() - last_beat >= BEAT_S:
                self.tell("alive")
                last_beat = time.monotonic()
            self._end_what_is_over()
            try:
                if not self._pipe.poll(BEAT_S / 2):
                    continue
                received = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(1)
            with self._changed:
                if received == FINISH:
                    self._finished = True
                else:
                    assert isinstance(received, Call)
                    self._newest = received
                    if received.membership.is_urgent:
                        self._newest_urgent = received.membership.generation
            self._end_what_is_over()
            with self._changed:
                self._changed.notify_all()

    def _end_what_is_over(self) -> None:
        """Again and again until the training loop has noticed: it may be about to connect for what is over."""
        with self._changed:
            if self._newest_urgent > self._generation:
                end_waits(except_inodes=self._kept, num_ranks=self._num_ranks)
