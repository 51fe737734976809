"""The agent of one node: starts its training processes, watches over them, and has its part in every membership.

The node is the unit of failure: if one of its processes dies or hangs, the agent ends the others and takes the node
out. What it notices, and when:

| what | how | within |
|---|---|---|
| a process died | its exit | `POLL_S` |
| a process hangs | no sign of life, and no thread of it computes or is about to | `detect_s` |
| another machine vanished, or the link to it was cut | no beat of its agent in the store | `detect_s` |
| this machine was cut off | the store does not answer | `store_patience_s`; then the agent and its processes end |

It imports no torch; the store is handed in.
"""

import contextlib
import glob
import json
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from motet.resilience.control import FINISH
from motet.resilience.membership import (
    BEAT_S,
    Beats,
    Call,
    Change,
    Kind,
    Membership,
    Store,
    next_membership,
    propose,
    register,
    registered,
    silence_s,
)
from motet.resilience.watchdog import Watchdog

POLL_S = 0.02
SEEN_END = "seen_end"
"""Beside its number: a node's agent knows that all is over. The store may go when all do."""
STOPPED = set("TtZX")
RUNNABLE = "R"
"""A thread's state: it computes, or waits for a processor to do so."""
FINISH_S = 5.0
"""For its processes to end by themselves when all is over."""
Successor = Callable[[Membership, Sequence[Change]], Membership]
"""What follows from a membership and what has happened since (motet.resilience.succession)."""


def store_patience_s(detect_s: float) -> float:
    """For how long a store may not answer before it is given up."""
    return max(5.0, 3 * detect_s)


@dataclass
class WatchedProcess:
    process: BaseProcess
    pipe: Connection
    last_sign: float = field(default_factory=time.monotonic)
    """By `time.monotonic()`."""
    last_cpu_ticks: int = -1
    is_ready: bool = False
    is_done: bool = False


@dataclass
class NodeAgent:
    """`run` returns when the node's part is over: finished, left, or lost; then it says why."""

    node: int | None
    """None: it joins, as soon as its processes are ready."""
    store: Store
    processes: Sequence[WatchedProcess]
    successor: Successor
    detect_s: float
    watchdog: Watchdog
    """Ends this process when it waits for the store for too long."""
    membership: Membership | None = None
    is_warned: bool = False
    """This machine is about to be taken away."""
    _failure: str | None = None
    """How this node was lost."""
    _was_in: bool = False
    _left_in: int = 0
    """The newest generation in which it has handed over what it held, to leave."""
    _is_last_to_leave: bool = False
    _unanswered: tuple[int, list[tuple[Kind, int]]] | None = None
    """Generation and changes from which nothing could be made to follow."""
    _last_beat: float = 0.0
    _last_round: float = field(default_factory=time.monotonic)

    def run(self) -> str | None:
        """None: the training was finished, or went on without a node that it did not lose."""
        self._beats = Beats(self.store, self._silence_s)
        while not self.store.check(["finished"]):
            self._come_round(time.monotonic())
            now = self._last_round
            is_in = self.node is not None and self._take_over_newer(self.node)
            if self._was_in and not is_in:
                # Before its processes are heard: what failed in them has failed because they are out.
                why = self._why_out()
                break
            self._hear()
            how = self._own_loss(now)
            if how is not None:
                self._end_processes()
            if not is_in and (how is not None or self.is_warned):
                why = self._why_out()
                break
            if self.node is not None:
                self._propose_what_follows(self.node, how, self._exchange_beats(self.node, now))
            elif all(watched.is_ready for watched in self.processes):
                self.node = register(self.store)
            time.sleep(POLL_S)
        else:
            failure = self.store.get("failure") if self.store.check(["failure"]) else None
            why = None if failure is None else json.loads(failure)["message"]
            self.store.set(f"{SEEN_END}/{self.node}", "")
        self._finish()
        return why

    def warn(self, *_: object) -> None:
        """The handler of SIGTERM."""
        self.is_warned = True

    @property
    def _silence_s(self) -> float:
        return silence_s(self.detect_s)

    def _why_out(self) -> str | None:
        """None: it has left, or the plan has no use for it."""
        if self._failure is not None:
            return f"node {self.node} was lost: {self._failure}"
        return self.membership.stop if self.membership is not None else None

    def _come_round(self, now: float) -> None:
        self.watchdog.come_round()
        if now - self._last_round > self.detect_s / 2:  # Held up itself, it has not heard them.
            for watched in self.processes:
                watched.last_sign = now
        self._last_round = now

    def _exchange_beats(self, node: int, now: float) -> list[int]:
        """Other nodes whose beats are missing."""
        if now - self._last_beat < BEAT_S or self.membership is None:
            return []
        self._last_beat = now
        self._beats.give(node)
        return self._beats.missing([other for other in self.membership.everyone if other != node], now)

    def _take_over_newer(self, node: int) -> bool:
        """Passes newer memberships on to the processes. Whether this node has a part in the newest."""
        while (newer := next_membership(self.store, self.membership.generation if self.membership else 0)) is not None:
            self.membership = newer
            for change in newer.changes:
                if (change.kind, change.node) == ("lost", node):
                    self._failure = self._failure or change.how
            self._was_in = self._was_in or node in newer.everyone
            self._call(node, newer)
        return self.membership is not None and node in self.membership.everyone

    def _call(self, node: int, membership: Membership) -> None:
        if node not in membership.everyone:
            return
        first = len(self.processes) * membership.everyone.index(node)
        for place, watched in enumerate(self.processes):
            watched.is_done = False
            with contextlib.suppress(OSError):
                watched.pipe.send(Call(membership, first + place))

    def _hear(self) -> None:
        for watched in self.processes:
            try:
                while watched.pipe.poll():
                    word, more = watched.pipe.recv()
                    watched.last_sign = time.monotonic()
                    self._heard(watched, word, more)
            except (EOFError, OSError):
                continue  # It is dead, which `_own_loss` will see.

    def _heard(self, watched: WatchedProcess, word: str, more: object) -> None:
        if word == "ready":
            watched.is_ready = True
        elif word == "failed":
            self.store.compare_set("failure", "", str(more))
            self.store.set("finished", "")
        elif word == "hung":
            self._failure = str(more)
        elif self.membership is None or more != self.membership.generation:
            return
        elif word == "left" and self._left_in < self.membership.generation:
            self._left_in = self.membership.generation
            left = self.store.add(f"left/{self._left_in}", 1)
            self._is_last_to_leave = left == len(self.membership.leaving)
        elif word == "done":
            watched.is_done = True
            if all(other.is_done for other in self.processes):
                done = self.store.add(f"done/{self.membership.generation}", 1)
                if done == len(self.membership.nodes):
                    self.store.set("finished", "")

    def _own_loss(self, now: float) -> str | None:
        """How this node was lost, if it was."""
        if self._failure is not None:
            return self._failure
        for place, watched in enumerate(self.processes):
            process = watched.process
            if process.exitcode is not None:
                self._failure = f"process {place} (pid {process.pid}) {how_it_ended(process.exitcode)}"
            elif now - watched.last_sign > self._silence_s and self._is_idle(watched):
                self._failure = (
                    f"process {place} (pid {process.pid}) hung: no sign of life for {now - watched.last_sign:.1f} s"
                )
        return self._failure

    def _is_idle(self, watched: WatchedProcess) -> bool:
        """Whether it is stopped, or has not computed since the last call and is not about to."""
        states, ticks = _process_state(watched.process.pid or 0)
        before, watched.last_cpu_ticks = watched.last_cpu_ticks, ticks
        return states <= STOPPED or (before == ticks and RUNNABLE not in states)

    def _propose_what_follows(self, node: int, how: str | None, silent: Sequence[int]) -> None:
        """`how` this node was lost, and the others that are `silent`."""
        if self.membership is not None and (changes := self._changes(node, self.membership, how, silent)):
            following = self._following(self.membership, changes)
            if following is not None:
                propose(self.store, following)

    def _following(self, membership: Membership, changes: Sequence[Change]) -> Membership | None:
        """Where the successor fails, which would end all agents alike: what follows without those who come or are
        warned, or None; after a loss that it cannot deal with, the end, from which all start anew."""
        which = (membership.generation, [(change.kind, change.node) for change in changes])
        if which == self._unanswered:
            return None
        losses = [change for change in changes if change.kind in ("lost", "left")]
        failed = ""
        for some in (changes, losses) if 0 < len(losses) < len(changes) else (changes,):
            try:
                return self.successor(membership, some)
            except Exception as error:
                traceback.print_exc()
                failed = f"{type(error).__name__}: {error}"
        self._unanswered = which
        if not losses:
            return None
        return replace(
            membership,
            generation=membership.generation + 1,
            nodes=(),
            leaving=(),
            changes=tuple(changes),
            is_urgent=True,
            stop=f"what follows from a loss could not be worked out ({failed})",
            saves=False,
        )

    def _changes(self, node: int, membership: Membership, how: str | None, silent: Sequence[int]) -> list[Change]:
        if node not in membership.everyone:
            return []
        at = time.time()
        changes = [
            Change("lost", other, f"its agent was silent for {self._silence_s:g} s", at)
            for other in silent
            if other in membership.everyone  # Another agent may have taken it out a moment ago.
        ]
        if how is not None:
            changes.append(Change("lost", node, how, at))
        elif self._left_in == membership.generation and self._is_last_to_leave:
            # All at once: whoever left before the others would be waited for under the next membership.
            told = "it has handed over what it held"
            changes += [Change("left", each, told, at) for each in membership.leaving]
        elif self.is_warned and node in membership.nodes and membership.stop is None:
            changes.append(Change("leaving", node, "it was told to end (SIGTERM)", at))
        joined = range(membership.num_known, registered(self.store))
        return changes + [Change("joined", other, "", at) for other in joined]

    def _end_processes(self) -> None:
        for watched in self.processes:
            if watched.process.exitcode is None:
                watched.process.kill()
        for watched in self.processes:
            watched.process.join()

    def _finish(self) -> None:
        for watched in self.processes:
            with contextlib.suppress(OSError):
                watched.pipe.send(FINISH)
        deadline = time.monotonic() + FINISH_S
        for watched in self.processes:
            while watched.process.exitcode is None and time.monotonic() < deadline:
                self.watchdog.come_round()
                watched.process.join(POLL_S)
        self._end_processes()


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
