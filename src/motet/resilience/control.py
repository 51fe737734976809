"""A training process's line to the agent of its node: signs of life go one way, memberships come the other.

Threads hold this end, so that it works whatever the process waits for. An urgent membership ends what that is: its
connections are shut down, what waits even so is called off, and only then is the new membership shown to the training
loop. Who does not come even then hangs.
"""

import contextlib
import math
import os
import threading
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection

from motet.resilience.interruptible_wait import Connections, Waits
from motet.resilience.membership import Call

BEAT_S = 0.1
_SWEEP_S = 0.05
"""Between two attempts to end what is over."""
FINISH = "finish"
"""The agent's last word: every process has finished, or the training is over."""
STORE_AWAY, STORE_BACK = "store away", "store back"
"""The agent's: no membership can be agreed on; one can again."""


class Control:
    """`pipe`: carries `Call`s and words in, (word, more) out. The process ends if the agent does."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.waits = Waits()
        self._connections: Connections | None = None
        self._num_ranks = 0
        self._patience_s = math.inf
        self._changed = threading.Condition()
        self._calls: tuple[Call, ...] = ()
        """The newest one that does not wait, if any, and all after it."""
        self._newest_urgent = 0
        """Generation of the newest one that does not wait."""
        self._urgent_since = 0.0
        """When it was heard of, by `time.monotonic()`."""
        self._was_told_hung = 0
        """The newest generation for which it was."""
        self._finished = False
        self._store_is_away = False
        self._num_returns = 0
        """Of the store."""
        self._sending = threading.Lock()
        self._generation = 0
        """Of the membership under which this process works."""
        threading.Thread(target=self._beat, name="beats", daemon=True).start()
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def begin(self, generation: int, num_ranks: int, patience_s: float) -> None:
        """Called before anything is done under a membership. Connections that there were before the first (to data
        servers) outlive them all. `patience_s`: for this process to leave when a newer one is urgent."""
        with self._changed:
            self._generation, self._num_ranks, self._patience_s = generation, num_ranks, patience_s
            self.waits.generation = generation
            self._connections = self._connections or Connections()

    def is_change_due(self) -> bool:
        """Whether a newer membership waits for the end of the iteration."""
        return self._next() is not None

    def _next(self) -> Call | None:
        """In their order: whoever skipped one would be waited for by those who did not."""
        return next((call for call in self._calls if call.membership.generation > self._generation), None)

    def newer(self, timeout_s: float | None) -> Call | None:
        """To the next membership after the one this process works under; an urgent one ends all before it. None: none
        came in time, or all is over. While the store is away no time counts."""
        with self._changed:
            num_returns = -1
            while self._store_is_away or num_returns != self._num_returns:
                num_returns = self._num_returns
                if self._changed.wait_for(lambda: self._finished or self.is_change_due(), timeout_s):
                    break
            return None if self._finished else self._next()

    @property
    def is_over(self) -> bool:
        """Whether what this process works under is, as something has died."""
        return self._finished or self._newest_urgent > self._generation

    @property
    def is_finished(self) -> bool:
        return self._finished

    def tell(self, word: str, more: object = None) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._pipe.send((word, more))

    def _beat(self) -> None:
        """In a thread of its own: nothing else may make them late."""
        while True:
            self.tell("alive")
            time.sleep(BEAT_S)

    def _listen(self) -> None:
        try:
            while True:
                self._end_what_is_over()
                if self._pipe.poll(_SWEEP_S):
                    self._take(self._pipe.recv())
                    self._end_what_is_over()
                    with self._changed:
                        self._changed.notify_all()
        except (EOFError, ConnectionError):  # The agent has ended.
            os._exit(1)
        except BaseException:  # Nobody would end this process's waits any more: its node is lost.
            traceback.print_exc()
            os._exit(1)

    def _take(self, received: object) -> None:
        with self._changed:
            if received == FINISH:
                self._finished = True
                return
            if received in (STORE_AWAY, STORE_BACK):
                self._store_is_away = received == STORE_AWAY
                self._num_returns += received == STORE_BACK
                return
            assert isinstance(received, Call)
            call = replace(received, heard_at=time.monotonic())
            self._calls = (call,) if call.membership.is_urgent else (*self._calls, call)
            if call.membership.is_urgent:
                self._newest_urgent = call.membership.generation
                self._urgent_since = call.heard_at

    def _end_what_is_over(self) -> None:
        """Again and again until the training loop has noticed: it may be about to connect for what is over. And after
        that too: a thread that writes a checkpoint may wait for others of an older membership."""
        with self._changed:
            if self._newest_urgent > self._generation and self._connections is not None:
                self._connections.end_waits(num_ranks=self._num_ranks)
                late_s = time.monotonic() - self._urgent_since
                if late_s > self._patience_s and self._was_told_hung < self._newest_urgent:
                    self._was_told_hung = self._newest_urgent
                    self.tell("hung", f"hung: a process did not leave generation {self._generation} in {late_s:.0f} s")
        self.waits.call_off(self._newest_urgent, self._urgent_since)
