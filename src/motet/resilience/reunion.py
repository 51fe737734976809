"""A node agent and its store: the store may be lost, and another one take its place.

Without the store training goes on, and what happens has to wait. When another one has taken its place, the agent writes
into it what it knows, and nothing is proposed before every node of the newest membership has done so (`OPEN`). A
membership is of consequence only if its ranks have met, for which the agents of all its nodes have read it: so if one
of these is back, it is known. Nodes that stay away for `silence_s` and `REUNION_S` are lost; but those that might have
gone on by themselves, if it came to the worst, not before they have ended: an agent that finds no store for
`store_patience_s` ends. Who comes back later finds itself out, or a membership that is not the one it knows, and ends.
Where ranks had not met when the store was lost, they meet anew, under the next membership.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from motet.resilience.membership import (
    FIRST_GENERATION,
    OPEN,
    Change,
    Membership,
    Store,
    back_key,
    ended_key,
    key_of,
    next_membership,
    propose,
)
from motet.resilience.run_record import KEY

REUNION_S = 1.0
"""Beside the time after which a silent node is lost: between the first agent that finds a new store and the last."""
Successor = Callable[[Membership, Sequence[Change]], Membership]
"""What follows from a membership and what has happened since (motet.resilience.succession)."""


class LeftBehindError(RuntimeError):
    """The others went on without this node, or train something else now."""


class ConnectedStore(Store, Protocol):
    """A client whose calls raise `StoreLostError` when it has lost the store."""

    def connect(self) -> None:
        """To the one that is there now. Raises `StoreLostError` if there is none."""


@dataclass
class Reunion:
    """One agent's, with its store and the other agents. What reaches the store raises `StoreLostError`."""

    store: ConnectedStore
    """Not connected yet."""
    successor: Successor
    silence_s: float
    """After which a silent node is lost."""
    store_patience_s: float
    """For how long the store may be away."""
    known: list[Membership] = field(default_factory=list)
    """All memberships that this agent has read, oldest first."""
    away_since: float | None = field(default_factory=time.monotonic)
    """By `time.monotonic()`: there is no store. None: there is."""
    lost_in: int = 0
    """The newest generation when the store was lost."""
    is_open: bool = False
    """Memberships may be proposed."""
    _said: dict[str, str] = field(default_factory=dict)
    """What else this agent has written into the store, once and for all."""
    _run: bytes | None = None
    """Which training the store is of."""
    _back_since: float = 0.0
    """By `time.monotonic()`: there is this store."""
    _could: tuple[tuple[int, tuple[int, ...]], bool] | None = None
    """Whether the nodes that stayed away under that membership could go on without the others."""

    @property
    def newest(self) -> Membership | None:
        return self.known[-1] if self.known else None

    def lose_store(self, now: float) -> None:
        self.away_since = now
        self.lost_in = self.newest.generation if self.newest is not None else 0

    def is_given_up(self, now: float) -> bool:
        """Whether the store has been away for too long."""
        return self.away_since is not None and now - self.away_since > self.store_patience_s

    def wait_anew(self, now: float) -> None:
        """For the others: this agent was held up itself, and has not heard them."""
        self._back_since = now

    def say(self, key: str, value: str) -> None:
        """Also to any store that comes after this one."""
        self._said.setdefault(key, value)
        if self.away_since is None:
            self.store.compare_set(key, "", value)

    def come_back(self, node: int | None) -> int | None:
        """To the store, or come to it for the first time. It may be a new one: what this agent knows has to be in it.

        Returns the node's number, if it still is that. Raises `LeftBehindError`."""
        self.store.connect()
        run = self.store.get(KEY)
        if self._run is not None and run != self._run:
            raise LeftBehindError("another training has begun, or this one was started anew")
        self._run = run
        for membership in self.known:
            is_newest = membership is self.newest
            if not is_newest and self.store.check([key_of(membership.generation)]):
                continue
            if propose(self.store, membership) != membership and is_newest:
                raise LeftBehindError("the others went on without it while it did not reach the store")
        if node is not None and not self._has_number(node):
            node = None
        for key, value in self._said.items():
            self.store.compare_set(key, "", value)
        if node is not None:
            self.store.set(back_key(node), "")
        self.is_open, self._back_since, self.away_since = False, time.monotonic(), None
        return node

    def _has_number(self, node: int) -> bool:
        """Whether that is its number still; a new store gives those again that are in no membership."""
        if self.newest is not None:
            return node < self.newest.num_known
        first = next_membership(self.store, FIRST_GENERATION - 1)
        return first is not None and node in first.nodes

    def opens(self, node: int | None, now: float) -> bool:
        """Whether memberships may be proposed, from now on."""
        if not self.store.check([OPEN]):
            if self.newest is None or node not in self.newest.everyone:
                return False
            if not self.all_are_back(self.newest, now - self._back_since):
                return False
            if next_membership(self.store, self.newest.generation) is not None:
                return False  # The last to come back has brought it.
            self.store.compare_set(OPEN, "", str(self.newest.num_known))
        self.is_open = True
        return True

    def all_are_back(self, membership: Membership, waited_s: float) -> bool:
        """Or have ended."""
        away = [
            node
            for node in membership.everyone
            if not self.store.check([back_key(node)]) and not self.store.check([ended_key(node)])
        ]
        if not away:
            return True
        patience_s = self.silence_s + REUNION_S
        if waited_s > patience_s and self._could_go_on(membership, away):
            patience_s += self.store_patience_s
        return waited_s > patience_s

    def _could_go_on(self, membership: Membership, nodes: Sequence[int]) -> bool:
        """Whether these nodes could, without all others."""
        which = (membership.generation, tuple(nodes))
        if self._could is None or self._could[0] != which:
            at = time.time()
            lost = [Change("lost", node, "it is here", at) for node in membership.everyone if node not in nodes]
            try:
                self._could = which, self.successor(membership, lost).saves
            except Exception:
                traceback.print_exc()
                self._could = which, True
        return self._could[1]
