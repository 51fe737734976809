"""The processes of a node, and both ends of the pipe between a training process and the node's agent.

`Children` starts processes that do not outlive their parent. The agent's end is `WatchedProcess`: whether a training
process lives, computes or hangs, and what it reports. The training process's end is `AgentLink`: signs of life and
reports go to the agent, memberships come from it. Threads serve the `AgentLink`, so that it works whatever the process
waits for: an urgent membership shuts down the process's connections, interrupts what waits even so, and only then is
shown to the training loop. A process that does not leave the old membership even then is reported as hung.

Limits: Linux (/proc, prctl). Processes end with the thread that started them, which must be the main thread; their own
children end with them only if started by `Children` too.
"""

import contextlib
import ctypes
import glob
import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from motet.addresses import Address
from motet.resilience.interruptible_wait import Connections, InterruptibleWaits
from motet.resilience.membership import MeetingPlace, MembershipNotice

PR_SET_PDEATHSIG = 1
FINISH_S = 5.0
"""Time for processes to end by themselves when the training is over."""
STOPPED = set("TtZX")
RUNNABLE = "R"
"""State of a thread that computes or waits for a processor."""
SIGN_OF_LIFE_S = 0.1
"""Interval between a training process's signs of life."""
_SWEEP_S = 0.05
"""Interval between two attempts to interrupt obsolete waits."""
FINISH = "finish"
"""The agent's last message: every process has finished, or the training is over."""
STORE_AWAY, STORE_BACK = "store away", "store back"
"""The agent's messages that no membership can be agreed on, and that one can again."""


class Children:
    """Starts child processes in a `with` block, at the end of which all of them are killed, and nothing can be asked of
    them any more."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []

    def start(self, target: Callable[..., object], *args: Any) -> BaseProcess:
        """Forks a process that ignores SIGINT and SIGTERM: this process ends it."""
        process = multiprocessing.get_context("fork").Process(target=_run_child, args=(os.getpid(), target, args))
        # An interrupt that arrives in the functions that Python calls around a fork would be lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
            self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return process

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in self._processes:  # Kill all before the first wait, which may be interrupted.
            process.kill()
        for process in self._processes:
            process.join()
            process.close()  # Whoever still refers to it would keep its descriptors open.


def _run_child(parent: int, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The parent ended before the call of prctl.
        os._exit(1)
    target(*args)


@dataclass
class WatchedProcess:
    """A training process, seen by its agent."""

    process: BaseProcess
    pipe: Connection
    last_sign: float = field(default_factory=time.monotonic)
    """When it last gave a sign of life, by `time.monotonic()`."""
    last_cpu_ticks: int = -1
    is_ready: bool = False
    is_done: bool = False

    def is_idle(self) -> bool:
        """Whether it is stopped, or has not computed since the last call and no thread is runnable."""
        states, ticks = _process_state(self.process.pid or 0)
        before, self.last_cpu_ticks = self.last_cpu_ticks, ticks
        return states <= STOPPED or (before == ticks and RUNNABLE not in states)


def send_to(processes: Sequence[WatchedProcess], *messages: object) -> None:
    """Sends one message to all processes, or each its own."""
    for place, watched in enumerate(processes):
        with contextlib.suppress(OSError):
            watched.pipe.send(messages[place % len(messages)])


def receive_from(processes: Sequence[WatchedProcess]) -> Iterator[tuple[WatchedProcess, str, object]]:
    """Yields the messages that have arrived, each of a word and a value."""
    for watched in processes:
        try:
            while watched.pipe.poll():
                word, value = watched.pipe.recv()
                watched.last_sign = time.monotonic()
                yield watched, word, value
        except (EOFError, OSError):
            continue  # The process is dead, which `find_loss` will notice.


def find_loss(processes: Sequence[WatchedProcess], silence_s: float, now: float) -> str | None:
    """Describes how the first lost process was lost; None if all live."""
    for place, watched in enumerate(processes):
        process, silent_s = watched.process, now - watched.last_sign
        if process.exitcode is not None:
            return f"process {place} (pid {process.pid}) {describe_exit(process.exitcode)}"
        if silent_s > silence_s and watched.is_idle():
            return f"process {place} (pid {process.pid}) hung: no sign of life for {silent_s:.1f} s"
    return None


def kill_all(processes: Sequence[WatchedProcess]) -> None:
    for watched in processes:
        if watched.process.exitcode is None:
            watched.process.kill()
    for watched in processes:
        watched.process.join()


def finish_all(processes: Sequence[WatchedProcess]) -> None:
    """Lets the processes end by themselves for `FINISH_S`, then kills them."""
    send_to(processes, FINISH)
    deadline = time.monotonic() + FINISH_S
    for watched in processes:
        watched.process.join(max(0.0, deadline - time.monotonic()))
    kill_all(processes)


def describe_exit(exitcode: int) -> str:
    if exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"exited with code {exitcode}"


def _process_state(pid: int) -> tuple[set[str], int]:
    """Returns the state letters of the process's threads, and the processor ticks that they have used."""
    states, ticks = set(), 0
    for path in glob.glob(f"/proc/{pid}/task/*/stat"):
        with contextlib.suppress(OSError), open(path) as file:
            fields = file.read().rpartition(")")[2].split()
            states.add(fields[0])
            ticks += int(fields[11]) + int(fields[12])
    return states, ticks


class AgentLink:
    """A training process's end of the pipe to its agent. The process ends if the agent does."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.waits = InterruptibleWaits()
        self._connections: Connections | None = None
        self._num_ranks = 0
        self._patience_s = math.inf
        self._changed = threading.Condition()
        self._notices: tuple[MembershipNotice, ...] = ()
        """The newest urgent notice, if any, and all after it."""
        self._meeting: MeetingPlace | None = None
        """The newest one."""
        self._newest_urgent = 0
        """Generation of the newest urgent membership."""
        self._urgent_since = 0.0
        """When it was received, by `time.monotonic()`."""
        self._reported_hung = 0
        """The newest generation for which this process was reported as hung."""
        self._is_finished = False
        self._store_is_away = False
        self._num_returns = 0
        """Times that the store came back."""
        self._abort: Callable[[], None] | None = None
        self._aborting = threading.Thread()
        self._aborts = threading.RLock()
        """Held while communicators are aborted, and while this process leaves its membership."""
        self._sending = threading.Lock()
        self._generation = 0
        """Generation of the membership under which this process works."""
        # A thread of its own: nothing else may delay the signs of life.
        threading.Thread(target=self._send_signs_of_life, name="signs of life", daemon=True).start()
        threading.Thread(target=self._listen, name="agent link", daemon=True).start()

    def begin(
        self, generation: int, num_ranks: int, patience_s: float, abort: Callable[[], None] | None = None
    ) -> None:
        """Must be called before any work under a membership. Connections that exist before the first membership (to
        data servers) are never shut down. `patience_s`: time to leave this membership when a newer one is urgent.
        `abort`: ends what the device's communicators do; None: connections are all that there is."""
        with self._aborts, self._changed:
            self._generation, self._num_ranks, self._patience_s = generation, num_ranks, patience_s
            self._abort = abort
            self.waits.generation = generation
            self._connections = self._connections or Connections()

    def is_change_due(self) -> bool:
        """Whether a newer membership waits for the end of the iteration."""
        return self._next() is not None

    def _next(self) -> MembershipNotice | None:
        """The next notice in order: ranks that do not skip a membership would wait for one that does."""
        return next((notice for notice in self._notices if notice.membership.generation > self._generation), None)

    def wait_for_next(self, timeout_s: float | None) -> MembershipNotice | None:
        """Waits for the next membership after the one this process works under; an urgent one replaces all before it.
        None: none came in time, or the training is over. Time during which the store is away does not count."""
        with self._changed:
            num_returns = -1
            while self._store_is_away or num_returns != self._num_returns:
                num_returns = self._num_returns
                if self._changed.wait_for(lambda: self._is_finished or self.is_change_due(), timeout_s):
                    break
            return None if self._is_finished else self._next()

    def wait_for_meeting(self, timeout_s: float) -> Address:
        """Waits for the place where the ranks of this membership meet. Raises `ConnectionError` if none is known in
        time, or if the membership is over before."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_obsolete or self._has_meeting(), timeout_s)
            if self.is_obsolete or self._meeting is None or not self._has_meeting():
                raise ConnectionError("the ranks of this membership do not meet")
            return self._meeting.address

    def _has_meeting(self) -> bool:
        return self._meeting is not None and self._meeting.generation == self._generation

    @property
    def is_obsolete(self) -> bool:
        """Whether the membership under which this process works is over, as something has died."""
        return self._is_finished or self._newest_urgent > self._generation

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def leave(self, leave_world: Callable[[], None]) -> None:
        """Calls it while nothing is aborted."""
        with self._aborts:
            if self._abort is not None and self.is_obsolete:  # Groups would wait for what has not ended.
                self._abort()
            leave_world()

    def _abort_obsolete(self) -> None:
        with self._aborts:
            if self.is_obsolete and self._abort is not None:
                self._abort()

    def send(self, word: str, value: object = None) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._pipe.send((word, value))

    def _send_signs_of_life(self) -> None:
        while True:
            self.send("alive")
            time.sleep(SIGN_OF_LIFE_S)

    def _listen(self) -> None:
        try:
            while True:
                self._interrupt_obsolete()
                if self._pipe.poll(_SWEEP_S):
                    self._receive(self._pipe.recv())
                    self._interrupt_obsolete()
                    with self._changed:
                        self._changed.notify_all()
        except (EOFError, ConnectionError):  # The agent has ended.
            os._exit(1)
        except BaseException:  # Nothing would interrupt this process's waits any more: its node is lost.
            traceback.print_exc()
            os._exit(1)

    def _receive(self, message: object) -> None:
        with self._changed:
            if message == FINISH:
                self._is_finished = True
                return
            if message in (STORE_AWAY, STORE_BACK):
                self._store_is_away = message == STORE_AWAY
                self._num_returns += message == STORE_BACK
                return
            if isinstance(message, MeetingPlace):
                self._meeting = message
                return
            assert isinstance(message, MembershipNotice)
            notice = replace(message, heard_at=time.monotonic())
            self._notices = (notice,) if notice.membership.is_urgent else (*self._notices, notice)
            if notice.membership.is_urgent:
                self._newest_urgent = notice.membership.generation
                self._urgent_since = notice.heard_at

    def _interrupt_obsolete(self) -> None:
        """Interrupts the waits of obsolete memberships, repeatedly until the training loop has noticed, as it may be
        about to connect; and after that too, as a thread that writes a checkpoint may wait for ranks of an older
        one."""
        with self._changed:
            if self._newest_urgent > self._generation and self._connections is not None:
                if self._abort is not None and not self._aborting.is_alive():  # In a thread, as it may take long.
                    self._aborting = threading.Thread(target=self._abort_obsolete, name="abort", daemon=True)
                    self._aborting.start()
                self._connections.shut_down(num_ranks=self._num_ranks)
                late_s = time.monotonic() - self._urgent_since
                if late_s > self._patience_s and self._reported_hung < self._newest_urgent:
                    self._reported_hung = self._newest_urgent
                    self.send("hung", f"hung: a process did not leave generation {self._generation} in {late_s:.0f} s")
        self.waits.interrupt(self._newest_urgent, self._urgent_since)
