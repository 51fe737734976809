"""The agent of one node: starts its training processes, watches them, and takes part in deciding memberships.

The node is the unit of failure: if one of its processes dies or hangs, the agent ends the others and takes the node
out.

| what the agent notices | how | within |
|---|---|---|
| a process died | its exit | `POLL_S` |
| a process hangs | no sign of life, and no thread computes or is runnable | `detect_s` |
| another machine vanished, or the link to it was cut | no sign of life of its agent in the store | `detect_s` |
| the store was lost | it ends the connection, or does not answer | at once, or `store_timeout_s` |

It imports no torch; the store's client is passed in.
"""

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

from motet.addresses import address_text, host_and_port
from motet.resilience.failure_log import Recovery, write_finding, write_recovery
from motet.resilience.health.clock import clock_error
from motet.resilience.health.neighbours import NeighbourTrials
from motet.resilience.membership import (
    FAILURE,
    RUN,
    Change,
    Kind,
    MeetingPlace,
    Membership,
    MembershipNotice,
    RunRecord,
    is_over,
    key,
    living_nodes,
    memberships_after,
    unlogged_changes,
)
from motet.resilience.process_control import (
    STORE_AWAY,
    STORE_BACK,
    WatchedProcess,
    find_loss,
    finish_all,
    kill_all,
    receive_from,
    send_to,
)
from motet.resilience.store.store import Store, StoreAwayError

POLL_S = 0.02
NOBODY = -1
"""Stands for the number of a node that has none yet."""


class Successor(Protocol):
    def __call__(self, membership: Membership, changes: Sequence[Change], *, is_settled: bool) -> Membership:
        """Computes the next membership; the same one for every agent that has seen the same changes."""


@dataclass
class NodeAgent:
    """`run` returns when the node's part is over: finished, left or lost. Times are by `time.monotonic()`."""

    node: int | None
    """Number of the node; None: the node joins as soon as its processes are ready."""
    store: Store
    processes: Sequence[WatchedProcess]
    successor: Successor
    silence_s: float
    """Silence of a lost process."""
    store_patience_s: float
    """How long the store may be away while this node waits for it: nothing is trained, or the training is done."""
    output: Path
    trials: NeighbourTrials | None = None
    """Sums with neighbours; None: a node joins without one, and answers none."""
    is_warned: bool = False
    """Whether this machine is about to be taken away."""
    known: list[Membership] = field(default_factory=list)
    """All memberships that this agent has read, oldest first."""
    _failure: str | None = None
    """How this node was lost."""
    _was_member: bool = False
    """Whether it is a member of the newest membership in which it has a part."""
    _member_since: int = 0
    """The generation since which it has been one."""
    _left_in: int = 0
    """The newest generation in which this node has sent what it held, to leave."""
    _slow_in: int = 0
    """The newest generation in which a process of this node has been slow for too long."""
    _met_in: int = 0
    """The newest generation whose processes know where to meet."""
    _unwritten: dict[str, str] = field(default_factory=dict)
    """Values that the store has not taken yet, by key."""
    _away_since: float | None = None
    """When the store stopped answering."""
    _needed_since: float | None = None
    """When this node began to need the store while it was away."""
    _is_interrupted: bool = False
    """Whether a process waits for the next membership, as this one has ended there."""
    _end_reason: str | None = None
    """Why the node's part is over."""
    _unanswered: tuple[int, list[tuple[Kind, int]]] | None = None
    """Generation and changes for which no next membership could be computed."""
    _last_round: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.node is not None:
            self.store.keep_alive(self.node)

    @property
    def membership(self) -> Membership | None:
        """The newest one that the agent has read."""
        return self.known[-1] if self.known else None

    def run(self) -> str | None:
        """Returns why the node was lost or the training failed; None: the training was finished, or continued without
        this node as planned. Raises `StoreLostError`."""
        while not self.is_over():
            time.sleep(POLL_S)
        finish_all(self.processes)
        return self._end_reason

    def is_over(self) -> bool:
        """Does one round of the agent's work, and returns whether the node's part is over."""
        now = time.monotonic()
        if now - self._last_round > self.silence_s / 2:  # This process was held up, and has not heard its processes.
            for watched in self.processes:
                watched.last_sign = now
        self._last_round = now
        try:
            self.store.sync()
            for name in list(self._unwritten):
                self.store.create(name, self._unwritten[name])
                del self._unwritten[name]
            if self._away_since is not None:
                self._away_since = self._needed_since = None
                send_to(self.processes, STORE_BACK)
            return self._act(now)
        except StoreAwayError:
            return self._continue_without_store(now)

    def warn(self, *_: object) -> None:
        """The handler of SIGTERM."""
        self.is_warned = True

    def _act(self, now: float) -> bool:
        """One round with a store; returns whether the node's part is over."""
        is_member = self._read_newer(NOBODY if self.node is None else self.node)
        if is_over(self.store.values, self.membership):
            failure = self.store.values.get(FAILURE)
            self._end_reason = None if failure is None else json.loads(failure)["message"]
            if self.node is not None:
                self.store.create(key("seen_end", self.node), "")
            return True
        if self._was_member and not is_member:
            # Before the processes are heard: what failed in them may have failed because they are out.
            self._end_reason = self._why_out()
            return True
        self._receive()
        loss = self._own_loss(now)
        if loss is not None:
            kill_all(self.processes)
        if not is_member and (loss is not None or self.is_warned):
            self._end_reason = self._why_out()
            if self.node is None and loss is not None:
                write_finding(self.output, "refused", None, loss)
            return True
        if self.node is not None:
            if self.trials is not None:
                self.trials.answer(self.node, self.store.values, self._write, now)
            self._propose(self.node, loss)
        elif all(watched.is_ready for watched in self.processes):
            if self.trials is None or self.trials.is_fit(self.store, self.membership, now):
                self._register()
            else:
                self._failure = self.trials.failure
        return False

    def _register(self) -> None:
        """Makes this node one that the others count in."""
        error = clock_error(self.store)
        self.node = self.store.register()
        self.store.keep_alive(self.node)
        if error is not None:
            print(f"motet: node {self.node}: {error}", file=sys.stderr, flush=True)
            write_finding(self.output, "clock", self.node, error)

    def _continue_without_store(self, now: float) -> bool:
        """One round while the store is away; returns whether to wait no longer. Training needs it only when something
        has changed."""
        if self._away_since is None:
            self._away_since = now
            send_to(self.processes, STORE_AWAY)
        self._receive()
        is_done = bool(self.processes) and all(watched.is_done for watched in self.processes)
        if self._own_loss(now) is not None:
            kill_all(self.processes)
        elif self._was_member and not self._is_interrupted and not is_done:
            self._needed_since = None
            return False
        elif self.is_warned and not is_done:
            return True
        if self._needed_since is None:
            self._needed_since = now
        if now - self._needed_since <= self.store_patience_s:
            return False
        kill_all(self.processes)
        lost = "; the training is finished, but its result could not be reported" if is_done else ""
        self._end_reason = self._failure or f"the store has not answered for {self.store_patience_s:g} s{lost}"
        return True

    def _why_out(self) -> str | None:
        """Returns the reason why this node is out; None if it left on a warning, or the plan has no place for it."""
        if self._failure is not None:
            what = "this node was not taken in" if self.node is None else f"node {self.node} was lost"
            return f"{what}: {self._failure}"
        return self.membership.stop if self.membership is not None and self.node is not None else None

    def _read_newer(self, node: int) -> bool:
        """Passes new memberships on to the processes. Returns whether this node is a member of the newest."""
        values = self.store.values
        for newer in memberships_after(values, self.membership.generation if self.membership is not None else 0):
            self.known.append(newer)
            self._is_interrupted = False
            for change in newer.changes:
                if (change.kind, change.node) == ("lost", node):
                    self._failure = self._failure or change.how
            is_member = node in newer.all_nodes
            if not is_member and node not in newer.waiting:
                continue
            if is_member and not self._was_member:
                self._member_since = newer.generation
            self._was_member = is_member
            for place, watched in enumerate(self.processes):
                watched.is_done = False
                rank = len(self.processes) * newer.all_nodes.index(node) + place if is_member else None
                run = RunRecord.from_json(values[RUN])
                send_to([watched], MembershipNotice(newer, rank, run, self.store.here, self._member_since))
        for membership in self.known:
            place_of = values.get(key("meeting", membership.generation))
            if membership.generation > self._met_in and place_of is not None:
                self._met_in = membership.generation
                address = host_and_port(place_of)
                assert address is not None
                send_to(self.processes, MeetingPlace(membership.generation, address))
        return self.membership is not None and node in self.membership.all_nodes

    def _receive(self) -> None:
        for watched, word, value in receive_from(self.processes):
            self._handle_message(watched, word, value)

    def _handle_message(self, watched: WatchedProcess, word: str, value: object) -> None:
        if word == "ready":
            watched.is_ready = True
        elif word == "failed":
            self._write(FAILURE, str(value))
        elif word == "hung":
            self._failure = str(value)
        elif word == "opened":
            generation, port = cast(tuple[int, int], value)
            self._write(key("meeting", generation), address_text((self.store.here, port)))
        elif word == "recovered":
            recovery = cast(Recovery, value)
            generation = recovery.membership.generation
            write_recovery(self.output, replace(recovery, changes=unlogged_changes(self.store.values, generation)))
            self._write(key("logged", generation), "")
        elif word == "result":
            generation, result = cast(tuple[int, str], value)
            self._write(key("result", generation), result)
        elif self.membership is None or self.node is None or value != self.membership.generation:
            return
        elif word == "interrupted":
            self._is_interrupted = True
        elif word == "slow":
            self._slow_in = self.membership.generation
        elif word == "left":
            self._left_in = self.membership.generation
            self._write(key("left", self._left_in, self.node), "")
        elif word == "done":
            watched.is_done = True
            if all(other.is_done for other in self.processes):
                self._write(key("done", self.membership.generation, self.node), "")

    def _write(self, name: str, value: str) -> None:
        """Writes it as soon as the store takes it."""
        self._unwritten.setdefault(name, value)
        if self._away_since is None:
            with contextlib.suppress(StoreAwayError):
                self.store.create(name, value)
                del self._unwritten[name]

    def _own_loss(self, now: float) -> str | None:
        """Returns how this node was lost, if it was."""
        self._failure = self._failure or find_loss(self.processes, self.silence_s, now)
        return self._failure

    def _propose(self, node: int, loss: str | None) -> None:
        """Proposes the next membership if anything has changed. `loss`: how this node was lost."""
        if self.membership is not None and (changes := self._changes(node, self.membership, loss)):
            following = self._following(self.membership, changes)
            if following is not None:
                self.store.create(key("membership", following.generation), following.to_json())

    def _following(self, membership: Membership, changes: Sequence[Change]) -> Membership | None:
        """Computes the next membership. A failure of the successor would end all agents equally, so it is caught: the
        next membership is then without joining and warned nodes, or None; after a loss that the successor cannot
        handle, a stop, from which all nodes restart."""
        # Whoever has left has seen the recovery end.
        has_ended = key("logged", membership.generation) in self.store.values
        is_settled = has_ended or any(change.kind == "left" for change in changes)
        question = (membership.generation, [(change.kind, change.node) for change in changes])
        if question == self._unanswered:
            return None
        losses = [change for change in changes if change.kind in ("lost", "left")]
        failed = ""
        for some in (changes, losses) if 0 < len(losses) < len(changes) else (changes,):
            try:
                return self.successor(membership, some, is_settled=is_settled)
            except Exception as error:
                traceback.print_exc()
                failed = f"{type(error).__name__}: {error}"
        self._unanswered = question
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
            saves_checkpoint=False,
        )

    def _changes(self, node: int, membership: Membership, loss: str | None) -> list[Change]:
        if node not in membership.all_nodes:
            return []
        at, values = time.time(), self.store.values
        silent = [n for n in membership.all_nodes if n != node and key("alive", n) not in values]
        changes = [Change("lost", n, f"its agent was silent for {self.silence_s:g} s", at) for n in silent]
        if loss is not None:
            changes.append(Change("lost", node, loss, at))
        elif self._left_in == membership.generation and all(
            key("left", membership.generation, each) in values for each in membership.leaving
        ):
            # All together: the next membership would wait for nodes that left before the others.
            changes += [Change("left", each, "it has handed over what it held", at) for each in membership.leaving]
        elif node in membership.nodes and membership.stop is None:
            has_spare = any(key("alive", spare) in values for spare in membership.waiting)
            if self.is_warned:
                changes.append(Change("leaving", node, "it was told to end (SIGTERM)", at))
            elif self._slow_in == membership.generation and has_spare:
                changes.append(Change("leaving", node, "it computes slowly, and a spare takes its place", at))
        newcomers = (other for other in living_nodes(values) if other >= membership.num_admitted)
        changes += [Change("joined", other, "", at) for other in newcomers if key("node", other) in values]
        if changes:  # A spare that has gone is no reason for another membership, but must not be used in one.
            gone = [spare for spare in membership.waiting if key("alive", spare) not in values]
            changes += [Change("lost", spare, f"its agent was silent for {self.silence_s:g} s", at) for spare in gone]
        return changes
