"""The agent of one node: starts its training processes, watches them, and takes part in deciding memberships.

The node is the unit of failure: if one of its processes dies or hangs, the agent ends the others and takes the node
out.

| what the agent notices | how | within |
|---|---|---|
| a process died | its exit | `POLL_S` |
| a process hangs | no sign of life, and no thread computes or is runnable | `detect_s` |
| another machine vanished, or the link to it was cut | no heartbeat of its agent in the store | `detect_s` |
| the store was lost, or this machine was cut off | the store does not answer | see store_failover.py |

It imports no torch; the store's client is passed in.
"""

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from motet.resilience.membership import (
    FAILURE,
    HEARTBEAT_S,
    OVER,
    Change,
    Heartbeats,
    Kind,
    Membership,
    MembershipNotice,
    StoreLostError,
    key,
    propose,
    register,
    registered,
    silence_s,
    store_timeout_s,
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
from motet.resilience.store.store_failover import (
    ConnectedStore,
    LeftBehindError,
    Standby,
    StoreDiscovery,
    StoreFailover,
    Successor,
)

POLL_S = 0.02
SEEN_END = "seen_end"
"""Prefix of keys that say that a node's agent knows that the training is over. Then the store may end."""


@dataclass
class NodeAgent:
    """`run` returns when the node's part is over: finished, left or lost. Times are by `time.monotonic()`."""

    node: int | None
    """None: the node joins as soon as its processes are ready."""
    store: ConnectedStore
    """Not connected yet."""
    processes: Sequence[WatchedProcess]
    successor: Successor
    detect_s: float
    store_patience_s: float
    """How long the store may be away."""
    tolerate: int = 1
    """Nodes that may be lost at once."""
    standby: Standby | None = None
    """The process here that would keep the store if its machine is lost."""
    is_warned: bool = False
    """Whether this machine is about to be taken away."""
    _failure: str | None = None
    """How this node was lost."""
    _was_member: bool = False
    _left_in: int = 0
    """The newest generation in which this node has sent what it held, to leave."""
    _met_in: int = 0
    """The newest generation whose ranks have met, and so no longer need the store."""
    _unannounced: list[Membership] = field(default_factory=list)
    """Memberships that the processes do not know yet, as they are not certainly valid."""
    _unsettled_since: float | None = None
    """Since when there are such memberships."""
    _asked_at: float = 0.0
    """When other standbys were last asked whether others have continued."""
    _end_reason: str | None = None
    """Why the node's part is over."""
    _unanswered: tuple[int, list[tuple[Kind, int]]] | None = None
    """Generation and changes for which no next membership could be computed."""
    _last_heartbeat: float = 0.0
    _last_round: float = field(default_factory=time.monotonic)
    _failover: StoreFailover = field(init=False)
    _heartbeats: Heartbeats = field(init=False, repr=False)
    """Set when the node is in a membership; a signal handler's repr may be asked for before."""

    def __post_init__(self) -> None:
        self._silence_s = silence_s(self.detect_s)
        discovery = StoreDiscovery(self.standby, store_timeout_s(self.detect_s))
        self._failover = StoreFailover(
            self.store, self.successor, self._silence_s, self.store_patience_s, self.tolerate, discovery
        )

    @property
    def membership(self) -> Membership | None:
        """The newest one that the agent has read."""
        return self._failover.newest

    def run(self) -> str | None:
        """Returns why the node was lost or the training failed; None: the training was finished, or continued without
        this node as planned."""
        while not self.is_over():
            time.sleep(POLL_S)
        finish_all(self.processes)
        return self._end_reason

    def is_over(self) -> bool:
        """Does one round of the agent's work, and returns whether the node's part is over."""
        now = time.monotonic()
        if now - self._last_round > self.detect_s / 2:  # This process was held up, and has not heard the others.
            self._failover.wait_anew(now)
            for watched in self.processes:
                watched.last_sign = now
        self._last_round = now
        try:
            if self._failover.away_since is not None and self._reconnect():
                return True
            return self._act(now)
        except StoreLostError:
            return self._continue_without_store()

    def warn(self, *_: object) -> None:
        """The handler of SIGTERM."""
        self.is_warned = True

    def _act(self, now: float) -> bool:
        """One round with a store; returns whether the node's part is over."""
        if self.store.check([OVER]):
            failure = self.store.get(FAILURE) if self.store.check([FAILURE]) else None
            self._end_reason = None if failure is None else json.loads(failure)["message"]
            self.store.set(f"{SEEN_END}/{self.node}", "")
            return True
        is_member = self.node is not None and self._read_newer(self.node)
        if self._was_member and not is_member:
            # Before the processes are heard: what failed in them may have failed because they are out.
            self._end_reason = self._why_out()
            if self._failover.may_end:
                return True
            finish_all(self.processes)
            self.processes = ()
        if self.node is not None and self._gives_up_on_quorum(self.node, now):
            return True
        self._receive()
        loss = self._own_loss(now)
        if loss is not None:
            kill_all(self.processes)
        if not is_member and (loss is not None or self.is_warned):
            self._end_reason = self._why_out()
            return True
        if self._was_member and not is_member:
            return False
        silent = [] if self.node is None else self._exchange_heartbeats(self.node, now)
        if not self._failover.is_open:
            if not self._failover.opens(self.node, now):
                return False
            send_to(self.processes, STORE_BACK)
        if self.node is not None:
            self._propose(self.node, loss, silent)
        elif all(watched.is_ready for watched in self.processes):
            self.node = register(self.store)
            self._failover.come(self.node)
        return False

    def _gives_up_on_quorum(self, node: int, now: float) -> bool:
        """Whether to end here, as too few nodes are left to know that the others have not continued elsewhere."""
        if not self._unannounced:
            if self._unsettled_since is not None:
                self._unsettled_since = None
                send_to(self.processes, STORE_BACK)
            return False
        if self._unsettled_since is None:
            self._unsettled_since = self._asked_at = now
            send_to(self.processes, STORE_AWAY)
        if now - self._asked_at > store_timeout_s(self.detect_s):
            self._asked_at = now
            if self._failover.others_continued(node):
                return self._end_left_behind("the others went on without it, with another store")
        if now - self._unsettled_since <= self.store_patience_s:
            return False
        return self._end_left_behind("too few nodes are left to know that the others have not gone on elsewhere")

    def _continue_without_store(self) -> bool:
        """One round without a store; returns whether it has been away for too long."""
        now = time.monotonic()
        if self._failover.away_since is None:
            self._failover.lose_store(now, waited_s=now - self._last_round)
            self._unsettled_since = None
            send_to(self.processes, STORE_AWAY)
        self._receive()
        if self._own_loss(now) is not None:
            kill_all(self.processes)
        if self.is_warned and not self._was_member:
            return True
        if not self._failover.is_given_up(now):
            return False
        kill_all(self.processes)
        self._end_reason = f"the store does not answer any more (for {self.store_patience_s:g} s)"
        return True

    def _reconnect(self) -> bool:
        """Comes (back) to the store; returns whether this node finds itself out."""
        try:
            self.node = self._failover.come_back(self.node)
        except LeftBehindError as error:
            return self._end_left_behind(str(error))
        self._unannounced = [membership for membership in self._unannounced if membership in self._failover.known]
        self._heartbeats = Heartbeats(self.store, self._silence_s)
        return False

    def _end_left_behind(self, why: str) -> bool:
        kill_all(self.processes)
        self._end_reason = f"node {self.node} was lost: {why}"
        return True

    def _why_out(self) -> str | None:
        """None: this node has left, or the plan has no place for it."""
        if self._failure is not None:
            return f"node {self.node} was lost: {self._failure}"
        return self.membership.stop if self.membership is not None else None

    def _exchange_heartbeats(self, node: int, now: float) -> list[int]:
        """Returns the nodes whose heartbeats are missing."""
        if now - self._last_heartbeat < HEARTBEAT_S or self.membership is None:
            return []
        self._last_heartbeat = now
        self._heartbeats.send(node)
        return self._heartbeats.missing([other for other in self.membership.all_nodes if other != node], now)

    def _read_newer(self, node: int) -> bool:
        """Passes new memberships on to the processes. Returns whether this node is a member of the newest."""
        for newer in self._failover.read_newer():
            for change in newer.changes:
                if (change.kind, change.node) == ("lost", node):
                    self._failure = self._failure or change.how
            self._was_member = self._was_member or node in newer.all_nodes
            self._unannounced.append(newer)
        self._failover.tell_read(node)
        if self._unannounced and self._failover.may_train():
            for membership in self._unannounced:
                if node in membership.all_nodes:
                    first = len(self.processes) * membership.all_nodes.index(node)
                    for place, watched in enumerate(self.processes):
                        watched.is_done = False
                        send_to([watched], MembershipNotice(membership, first + place, self.store.address))
            self._failover.called_in = self._unannounced[-1].generation
            self._unannounced.clear()
        return self.membership is not None and node in self.membership.all_nodes

    def _receive(self) -> None:
        for watched, word, value in receive_from(self.processes):
            self._handle_message(watched, word, value)

    def _handle_message(self, watched: WatchedProcess, word: str, value: object) -> None:
        if word == "ready":
            watched.is_ready = True
        elif word == "failed":
            self._failover.write(FAILURE, str(value))
        elif word == "hung":
            self._failure = str(value)
        elif word == "logged":
            self._failover.write(key("logged", cast(int, value)), "")
        elif word == "result":
            generation, result = cast(tuple[int, str], value)
            self._failover.write(key("result", generation), result)
        elif word == "met":
            self._met_in = max(self._met_in, cast(int, value))
        elif self.membership is None or self.node is None or value != self.membership.generation:
            return
        elif word == "left":
            self._left_in = self.membership.generation
            self._failover.is_out = True
            self._failover.write(key("left", self._left_in, self.node), "")
        elif word == "done":
            watched.is_done = True
            if all(other.is_done for other in self.processes):
                self._failover.write(key("done", self.membership.generation, self.node), "")

    def _own_loss(self, now: float) -> str | None:
        """Returns how this node was lost, if it was."""
        self._failure = self._failure or find_loss(self.processes, self._silence_s, now)
        self._failover.is_out = self._failover.is_out or self._failure is not None
        return self._failure

    def _propose(self, node: int, loss: str | None, silent: Sequence[int]) -> None:
        """Proposes the next membership if anything has changed. `loss`: how this node was lost."""
        if self.membership is not None and (changes := self._changes(node, self.membership, loss, silent)):
            following = self._following(self.membership, changes)
            if following is not None:
                propose(self.store, following)

    def _following(self, membership: Membership, changes: Sequence[Change]) -> Membership | None:
        """Computes the next membership. A failure of the successor would end all agents equally, so it is caught: the
        next membership is then without joining and warned nodes, or None; after a loss that the successor cannot
        handle, a stop, from which all nodes restart."""
        question = (membership.generation, [(change.kind, change.node) for change in changes])
        if question == self._unanswered:
            return None
        losses = [change for change in changes if change.kind in ("lost", "left", "again")]
        failed = ""
        for some in (changes, losses) if 0 < len(losses) < len(changes) else (changes,):
            try:
                return self.successor(membership, some)
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

    def _changes(self, node: int, membership: Membership, loss: str | None, silent: Sequence[int]) -> list[Change]:
        if node not in membership.all_nodes:
            return []
        at = time.time()
        changes = [
            Change("lost", other, f"its agent was silent for {self._silence_s:g} s", at)
            for other in silent
            if other in membership.all_nodes  # Another agent may have taken it out a moment ago.
        ]
        if loss is not None:
            changes.append(Change("lost", node, loss, at, is_self_reported=True))
        elif self._left_in == membership.generation and self.store.check(
            [key("left", membership.generation, each) for each in membership.leaving]
        ):
            # All together: the next membership would wait for nodes that left before the others.
            how = "it has handed over what it held"
            changes += [Change("left", each, how, at, is_self_reported=True) for each in membership.leaving]
        elif self.is_warned and node in membership.nodes and membership.stop is None:
            changes.append(Change("leaving", node, "it was told to end (SIGTERM)", at))
        if self._failover.lost_in == membership.generation > self._met_in:
            changes.append(Change("again", node, "the store was lost before all had met", at))
        joined = range(membership.num_admitted, registered(self.store))
        return changes + [Change("joined", other, "", at) for other in joined]
