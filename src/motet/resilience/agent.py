"""The agent of one node: starts its training processes, watches over them, and has its part in every membership.

The node is the unit of failure: if one of its processes dies or hangs, the agent ends the others and takes the node
out. What it notices, and when:

| what | how | within |
|---|---|---|
| a process died | its exit | `POLL_S` |
| a process hangs | no sign of life, and no thread of it computes or is about to | `detect_s` |
| another machine vanished, or the link to it was cut | no beat of its agent in the store | `detect_s` |
| the store was lost, or this machine was cut off | it does not answer | see reunion.py |

It imports no torch; the store is handed in.
"""

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from motet.resilience.control import STORE_AWAY, STORE_BACK
from motet.resilience.membership import (
    BEAT_S,
    FAILURE,
    OVER,
    Beats,
    Call,
    Change,
    Kind,
    Membership,
    StoreLostError,
    call_s,
    done_key,
    left_key,
    logged_key,
    propose,
    register,
    registered,
    result_key,
    silence_s,
)
from motet.resilience.node_process import WatchedProcess, end, finish, hear, loss_of, tell
from motet.resilience.store.store_failover import (
    ConnectedStore,
    LeftBehindError,
    Reunion,
    Standby,
    Successor,
    Whereabouts,
)

POLL_S = 0.02
SEEN_END = "seen_end"
"""Beside its number: a node's agent knows that all is over. The store may go when all do."""


@dataclass
class NodeAgent:
    """`run` returns when the node's part is over: finished, left, or lost; then it says why."""

    node: int | None
    """None: it joins, as soon as its processes are ready."""
    store: ConnectedStore
    """Not connected yet."""
    processes: Sequence[WatchedProcess]
    successor: Successor
    detect_s: float
    store_patience_s: float
    """For how long the store may be away."""
    tolerate: int = 1
    """Nodes that may be lost at once."""
    standby: Standby | None = None
    """The process here that would keep the store if its machine is lost."""
    is_warned: bool = False
    """This machine is about to be taken away."""
    _failure: str | None = None
    """How this node was lost."""
    _was_in: bool = False
    _left_in: int = 0
    """The newest generation in which it has handed over what it held, to leave."""
    _met_in: int = 0
    """The newest generation whose ranks have met: it needs the store no more."""
    _uncalled: list[Membership] = field(default_factory=list)
    """Memberships of which the processes are not told yet: others might have gone on elsewhere."""
    _doubts_since: float | None = None
    """By `time.monotonic()`: there are some."""
    _asked_at: float = 0.0
    """By `time.monotonic()`: whether others have gone on."""
    _why: str | None = None
    """Its part is over."""
    _unanswered: tuple[int, list[tuple[Kind, int]]] | None = None
    """Generation and changes from which nothing could be made to follow."""
    _last_beat: float = 0.0
    _last_round: float = field(default_factory=time.monotonic)
    _reunion: Reunion = field(init=False)

    def __post_init__(self) -> None:
        whereabouts = Whereabouts(self.standby, call_s(self.detect_s))
        self._reunion = Reunion(
            self.store, self.successor, self._silence_s, self.store_patience_s, self.tolerate, whereabouts
        )

    @property
    def membership(self) -> Membership | None:
        """The newest that it has read."""
        return self._reunion.newest

    def run(self) -> str | None:
        """None: the training was finished, or went on without a node that it did not lose."""
        while not self.is_over():
            time.sleep(POLL_S)
        finish(self.processes)
        return self._why

    def is_over(self) -> bool:
        """A round of its work. Whether its part is over."""
        self._come_round(time.monotonic())
        try:
            if self._reunion.away_since is not None and self._finds_itself_out():
                return True
            return self._take_part(self._last_round)
        except StoreLostError:
            return self._go_on_without_store()

    def _take_part(self, now: float) -> bool:
        """Whether its part is over."""
        if self.store.check([OVER]):
            failure = self.store.get(FAILURE) if self.store.check([FAILURE]) else None
            self._why = None if failure is None else json.loads(failure)["message"]
            self.store.set(f"{SEEN_END}/{self.node}", "")
            return True
        is_in = self.node is not None and self._take_over_newer(self.node)
        if self._was_in and not is_in:
            # Before its processes are heard: what failed in them has failed because they are out.
            self._why = self._why_out()
            if self._reunion.may_end:
                return True
            finish(self.processes)
            self.processes = ()
        if self.node is not None and self._is_left_in_doubt(self.node, now):
            return True
        self._hear()
        how = self._own_loss(now)
        if how is not None:
            end(self.processes)
        if not is_in and (how is not None or self.is_warned):
            self._why = self._why_out()
            return True
        if self._was_in and not is_in:
            return False
        silent = [] if self.node is None else self._exchange_beats(self.node, now)
        if not self._reunion.is_open:
            if not self._reunion.opens(self.node, now):
                return False
            tell(self.processes, STORE_BACK)
        if self.node is not None:
            self._propose_what_follows(self.node, how, silent)
        elif all(watched.is_ready for watched in self.processes):
            self.node = register(self.store)
            self._reunion.come(self.node)
        return False

    def _is_left_in_doubt(self, node: int, now: float) -> bool:
        """Whether all is over here, as too few nodes are left to know that the others have not gone on elsewhere."""
        if not self._uncalled:
            if self._doubts_since is not None:
                self._doubts_since = None
                tell(self.processes, STORE_BACK)
            return False
        if self._doubts_since is None:
            self._doubts_since = self._asked_at = now
            tell(self.processes, STORE_AWAY)
        if now - self._asked_at > call_s(self.detect_s):
            self._asked_at = now
            if self._reunion.others_went_on(node):
                return self._is_left_behind("the others went on without it, with another store")
        if now - self._doubts_since <= self.store_patience_s:
            return False
        return self._is_left_behind("too few nodes are left to know that the others have not gone on elsewhere")

    def _go_on_without_store(self) -> bool:
        """Whether it was away for too long, and all is over here."""
        now = time.monotonic()
        if self._reunion.away_since is None:
            self._reunion.lose_store(now, waited_s=now - self._last_round)
            self._doubts_since = None
            tell(self.processes, STORE_AWAY)
        self._hear()
        if self._own_loss(now) is not None:
            end(self.processes)
        if self.is_warned and not self._was_in:
            return True
        if not self._reunion.is_given_up(now):
            return False
        end(self.processes)
        self._why = f"the store does not answer any more (for {self.store_patience_s:g} s)"
        return True

    def _finds_itself_out(self) -> bool:
        """When it comes back to the store, or comes to it for the first time."""
        try:
            self.node = self._reunion.come_back(self.node)
        except LeftBehindError as error:
            return self._is_left_behind(str(error))
        self._uncalled = [membership for membership in self._uncalled if membership in self._reunion.known]
        self._beats = Beats(self.store, self._silence_s)
        return False

    def _is_left_behind(self, why: str) -> bool:
        end(self.processes)
        self._why = f"node {self.node} was lost: {why}"
        return True

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
        if now - self._last_round > self.detect_s / 2:  # Held up itself, it has not heard them.
            self._reunion.wait_anew(now)
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
        for newer in self._reunion.read_newer():
            for change in newer.changes:
                if (change.kind, change.node) == ("lost", node):
                    self._failure = self._failure or change.how
            self._was_in = self._was_in or node in newer.everyone
            self._uncalled.append(newer)
        self._reunion.tell_read(node)
        if self._uncalled and self._reunion.may_train():
            for membership in self._uncalled:
                self._call(node, membership)
            self._reunion.called_in = self._uncalled[-1].generation
            self._uncalled.clear()
        return self.membership is not None and node in self.membership.everyone

    def _call(self, node: int, membership: Membership) -> None:
        if node not in membership.everyone:
            return
        first = len(self.processes) * membership.everyone.index(node)
        for watched in self.processes:
            watched.is_done = False
        calls = (Call(membership, first + place, self.store.address) for place in range(len(self.processes)))
        tell(self.processes, *calls)

    def _hear(self) -> None:
        for watched, word, more in hear(self.processes):
            self._heard(watched, word, more)

    def _heard(self, watched: WatchedProcess, word: str, more: object) -> None:
        if word == "ready":
            watched.is_ready = True
        elif word == "failed":
            self._reunion.say(FAILURE, str(more))
        elif word == "hung":
            self._failure = str(more)
        elif word == "logged":
            self._reunion.say(logged_key(cast(int, more)), "")
        elif word == "result":
            generation, result = cast(tuple[int, str], more)
            self._reunion.say(result_key(generation), result)
        elif word == "met":
            self._met_in = max(self._met_in, cast(int, more))
        elif self.membership is None or self.node is None or more != self.membership.generation:
            return
        elif word == "left":
            self._left_in = self.membership.generation
            self._reunion.is_out = True
            self._reunion.say(left_key(self._left_in, self.node), "")
        elif word == "done":
            watched.is_done = True
            if all(other.is_done for other in self.processes):
                self._reunion.say(done_key(self.membership.generation, self.node), "")

    def _own_loss(self, now: float) -> str | None:
        """How this node was lost, if it was."""
        self._failure = self._failure or loss_of(self.processes, self._silence_s, now)
        self._reunion.is_out = self._reunion.is_out or self._failure is not None
        return self._failure

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
        losses = [change for change in changes if change.kind in ("lost", "left", "again")]
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
            changes.append(Change("lost", node, how, at, is_certain=True))
        elif self._left_in == membership.generation and self._all_have_left(membership):
            # All at once: whoever left before the others would be waited for under the next membership.
            told = "it has handed over what it held"
            changes += [Change("left", each, told, at, is_certain=True) for each in membership.leaving]
        elif self.is_warned and node in membership.nodes and membership.stop is None:
            changes.append(Change("leaving", node, "it was told to end (SIGTERM)", at))
        if self._reunion.lost_in == membership.generation > self._met_in:
            changes.append(Change("again", node, "the store was lost before all had met", at))
        joined = range(membership.num_known, registered(self.store))
        return changes + [Change("joined", other, "", at) for other in joined]

    def _all_have_left(self, membership: Membership) -> bool:
        return self.store.check([left_key(membership.generation, node) for node in membership.leaving])
