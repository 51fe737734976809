"""A node agent and its store: the store may be lost, and another one take its place.

Without the store training goes on, and what happens has to wait. When another one has taken its place, the agent writes
into it what it knows, and nothing is proposed before every node of the newest membership has done so (`OPEN`). A
membership is of consequence only if its ranks have met, for which the agents of all its nodes have read it: so if one
of these is back, it is known. Nodes that stay away for `silence_s` and `REUNION_S` are lost; but those that might have
gone on by themselves, if it came to the worst, not before they have ended: an agent that finds no store for
`store_patience_s` ends. Who comes back later finds itself out, or a membership that is not the one it knows, and ends.
Where ranks had not met when the store was lost, they meet anew, under the next membership.

Where nodes are on machines of their own, the store may also move: whoever cannot reach it for too long comes to another
one (whereabouts.py), tells what it knows (gathering.py), and never goes back. It is of use once enough nodes have come
(votes.py); and nobody trains under a membership before enough have read it, as the others might go on elsewhere.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from motet.addresses import address_text
from motet.resilience.membership import (
    FIRST_GENERATION,
    OPEN,
    Address,
    Change,
    Membership,
    Store,
    StoreLostError,
    back_key,
    ended_key,
    key_of,
    next_membership,
    propose,
    read_key,
    settled_key,
    standby_key,
)
from motet.resilience.store.gathering import (
    FIRST_TERM,
    GATHERING,
    MOVES,
    OtherLineError,
    Term,
    Vote,
    is_read_by_enough,
    term_of,
    vote,
)
from motet.resilience.store.run_record import KEY

# Where a node agent looks for the store of a training whose store may move: at the addresses of the other nodes.
#
# Each node names an address at which its machine would keep a store (standby.py). Whoever has lost the store for
# longer than it takes to be started again looks for another one, in the order of the newest membership: the first node
# of it that lives opens one, the others come there. If that does not happen within `TURN_S`, it is the next one's turn.


TURN_S = 5.0
"""For a node to notice that the store is lost, a little later than another one does, and to open a new one."""
SILENT_GRACES = 3
"""Times `grace_s`."""


class Standby(Protocol):
    """The process on this machine that would keep a store."""

    @property
    def address(self) -> Address: ...

    @property
    def is_free(self) -> bool:
        """Nothing has been asked of it, or it has given up."""

    def begin(self, term: Term, run: bytes) -> None:
        """Opens a store, if enough nodes come to it."""


@dataclass
class Whereabouts:
    own: Standby | None
    grace_s: float
    """For a lost store to be started again where it was."""
    addresses: dict[int, Address] = field(default_factory=dict)
    """Of the nodes' standbys."""
    _silent_until: dict[Address, float] = field(default_factory=dict)
    """By `time.monotonic()`: where somebody listens, and does not answer, as on a machine that is stopped, is not asked
    again before."""
    _searching_since: float | None = None
    """By `time.monotonic()`."""

    def learn(self, store: Store, nodes: Sequence[int]) -> None:
        for node in nodes:
            if node not in self.addresses and store.check([standby_key(node)]):
                host, _, port = store.get(standby_key(node)).decode().rpartition(":")
                self.addresses[node] = host, int(port)

    def tell(self, store: Store, node: int) -> None:
        if self.own is not None:
            store.set(standby_key(node), address_text(self.own.address))

    def open_here(self, node: int, after: Term, run: bytes) -> None:
        """Has this machine's standby open a store of a later term, unless it is busy."""
        if self.own is not None and self.own.is_free:
            self.own.begin((after[0] + 1, node, address_text(self.own.address)), run)

    def note_silent(self, address: Address, waited_s: float) -> None:
        """`waited_s`: for an answer, in vain. Where nobody listens that is told at once."""
        if waited_s > 0.4 * self.grace_s:
            self._silent_until[address] = time.monotonic() + SILENT_GRACES * self.grace_s

    def _is_silent(self, address: Address) -> bool:
        return time.monotonic() < self._silent_until.get(address, 0.0)

    def found(self) -> None:
        """A store. The next search begins anew."""
        self._searching_since = None

    def others(self) -> list[Address]:
        own = None if self.own is None else self.own.address
        return [address for address in self.addresses.values() if address != own and not self._is_silent(address)]

    def places(self, nodes: Sequence[int], before: Address, away_s: float) -> Iterator[tuple[int | None, Address]]:
        """To look at, in their order, with the node whose standby is there (None: where the store was `before`), and
        only once it is its turn.

        `nodes`: of the newest membership. `away_s`: for how long there has been no store."""
        if not nodes or not self._is_silent(before):  # Without nodes there is nobody else to ask.
            yield None, before
        if away_s <= self.grace_s:
            return
        now = time.monotonic()
        if self._searching_since is None:
            self._searching_since = now
        addresses = {node: self.addresses[node] for node in nodes if node in self.addresses}
        known = [node for node, address in addresses.items() if address != before and not self._is_silent(address)]
        # The store's machine is probably lost.
        known.sort(key=lambda node: self.addresses[node][0] == before[0])
        for place, node in enumerate(known):
            if now - self._searching_since >= place * TURN_S:
                yield node, self.addresses[node]


REUNION_S = 1.0
"""Beside the time after which a silent node is lost: between the first agent that finds a new store and the last."""
Successor = Callable[[Membership, Sequence[Change]], Membership]
"""What follows from a membership and what has happened since (motet.resilience.succession)."""


class LeftBehindError(RuntimeError):
    """The others went on without this node, or train something else now."""


class ConnectedStore(Store, Protocol):
    """A client whose calls raise `StoreLostError` when it has lost the store."""

    address: Address

    def connect(self, address: Address | None = None) -> None:
        """To the one that is there now; None: where the last one was. Raises `StoreLostError` if there is none."""


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
    tolerate: int
    """Nodes that may be lost at once."""
    whereabouts: Whereabouts
    known: list[Membership] = field(default_factory=list)
    """All memberships that this agent has read, oldest first."""
    away_since: float | None = field(default_factory=time.monotonic)
    """By `time.monotonic()`: there is no store. None: there is."""
    lost_in: int = 0
    """The newest generation when the store was lost."""
    is_open: bool = False
    """Memberships may be proposed."""
    moves: bool = False
    """The store may move to another machine."""
    is_out: bool = False
    """This node has no part any more, by its own word: it goes to no other store."""
    _term: Term = FIRST_TERM
    """Of the newest store that it has come to. It heeds no older one."""
    _line: Term = FIRST_TERM
    """Of the newest store in which it has read all memberships."""
    _settled: int = FIRST_GENERATION
    """The newest generation that is known to be valid for certain."""
    called_in: int = 0
    """The newest generation of which the processes of this node have been told."""
    _told_read: int = 0
    """The newest generation that this store knows it to have read."""
    _is_gathering: bool = False
    """It has come to a store that is not open yet."""
    _said: dict[str, str] = field(default_factory=dict)
    """What else this agent has written into the store, once and for all."""
    _run: bytes | None = None
    """Which training the store is of."""
    _address: Address | None = None
    """Where the store is, or was."""
    _back_since: float = 0.0
    """By `time.monotonic()`: there is this store."""
    _could: tuple[tuple[int, tuple[int, ...]], bool] | None = None
    """Whether the nodes that stayed away under that membership could go on without the others."""

    @property
    def newest(self) -> Membership | None:
        return self.known[-1] if self.known else None

    def lose_store(self, now: float, waited_s: float = 0.0) -> None:
        """`waited_s`: for an answer, in vain."""
        self.away_since = now
        # Where its keeper lives, a store that does not answer is ended, and started again, before that.
        if self.moves and waited_s > 1.5 * self.whereabouts.grace_s:
            self.away_since -= 1.5 * self.whereabouts.grace_s
            self.whereabouts.note_silent(self.store.address, waited_s)
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
        self._find(node)
        self.moves = self.store.check([MOVES])
        if self._term == self._line:
            self._write_again()
        else:
            self._compare()
        if node is not None and not self._has_number(node):
            node = None
        for key, value in self._said.items():
            self.store.compare_set(key, "", value)
        if node is not None:
            self.come(node)
        self.is_open, self._back_since, self.away_since, self._told_read = False, time.monotonic(), None, 0
        return node

    def _find(self, node: int | None) -> None:
        """Connects to a store. It is where it was, or, if that is lost, at some node's. Raises `LeftBehindError`."""
        if self._is_gathering:
            try:
                is_open = self.store.check([OPEN])
            except StoreLostError:  # It was given up.
                self._is_gathering = False
                self.whereabouts.found()
                raise
            if not is_open:
                raise StoreLostError("the store waits for more nodes")
        else:
            self._look_around(node)
        self._is_gathering, self._address = False, self.store.address
        self.whereabouts.found()

    def _look_around(self, node: int | None) -> None:
        now = time.monotonic()
        assert self.away_since is not None
        nodes = self.newest.everyone if self.moves and not self.is_out and self.newest is not None else ()
        before = self._address or self.store.address
        for whose, address in self.whereabouts.places(nodes, before, now - self.away_since):
            if whose is not None and whose == node:
                assert self._run is not None
                self.whereabouts.open_here(whose, self._term, self._run)
            began = time.monotonic()
            try:
                if self._is_there(address, is_elsewhere=whose is not None):
                    self._vote_if_asked(node)
                    return
            except StoreLostError:
                if self._is_gathering:
                    raise
                self.whereabouts.note_silent(address, time.monotonic() - began)
        self.store.address = before
        raise StoreLostError("no store is found")

    def _is_there(self, address: Address, *, is_elsewhere: bool) -> bool:
        """Connects. Whether a store of this training is there, and no older one."""
        self.store.connect(address)
        run = self.store.get(KEY)
        if self._run is not None and run != self._run:
            if is_elsewhere:
                return False
            raise LeftBehindError("another training has begun, or this one was started anew")
        self._run = run
        term = term_of(self.store)
        if term < self._term:
            return False
        self._term = term  # From now on it heeds no older one.
        return True

    def _vote_if_asked(self, node: int | None) -> None:
        """Raises `StoreLostError` if the store is of no use yet."""
        if not self.store.check([GATHERING]) or self.store.check([OPEN]):
            return
        if node is not None and self.newest is not None:
            try:
                vote(self.store, Vote(node, self._line, self.newest.generation, self._settled), self.known)
            except OtherLineError as error:
                raise LeftBehindError(str(error)) from None
        self._is_gathering = True
        raise StoreLostError("the store waits for more nodes")

    def _write_again(self) -> None:
        """What this agent knows."""
        for membership in self.known:
            is_newest = membership is self.newest
            if not is_newest and self.store.check([key_of(membership.generation)]):
                continue
            if propose(self.store, membership) != membership and is_newest:
                raise LeftBehindError("the others went on without it while it did not reach the store")

    def _compare(self) -> None:
        """In a newer store others have agreed on what has been. What else this agent knows came to nothing."""
        for i, membership in enumerate(self.known):
            key = key_of(membership.generation)
            if self.store.check([key]) and Membership.from_json(self.store.get(key)) == membership:
                continue
            if membership.generation <= self.called_in:
                raise LeftBehindError("the others went on without it, with another store")
            self.known = self.known[:i]
            return

    def come(self, node: int) -> None:
        """It has that number in this store."""
        self.store.set(back_key(node), "")
        if self.moves:
            self.whereabouts.tell(self.store, node)

    def read_newer(self) -> list[Membership]:
        """All memberships that are there and not known yet."""
        newer: list[Membership] = []
        last = self.newest
        while (last := next_membership(self.store, last.generation if last is not None else 0)) is not None:
            newer.append(last)
        # All at once: what a node knows of a store is what stood in it at some moment.
        self.known += newer
        self._line = self._term
        return newer

    def tell_read(self, node: int) -> None:
        """Which memberships this node knows, and hears what the others do."""
        if not self.moves or self.newest is None:
            return
        generation = self.newest.generation
        if self._told_read < generation:
            self.store.set(read_key(generation, node), "")
            self._told_read = generation
        if self._settled < generation and self.store.check([settled_key(generation)]):
            self._settled = generation
        self.whereabouts.learn(self.store, self.newest.everyone)

    @property
    def may_end(self) -> bool:
        """A node that is out. If the store were lost before this is settled, another one might need its vote."""
        return not self.moves or self.is_out or self.newest is None or self.newest.generation <= self._settled

    def may_train(self) -> bool:
        """Whether under the newest membership: nobody can have gone on elsewhere from an older one."""
        return not self.moves or is_read_by_enough(self.store, self.known, self._settled, self.tolerate)

    def others_went_on(self, node: int) -> bool:
        """With another store than this one."""
        went_on = any(self._is_newer(address) for address in self.whereabouts.others())
        self.store.connect(self._address)
        if not went_on and not self.store.check([back_key(node)]):
            raise StoreLostError("meanwhile another one has taken its place")  # It has to be told what is known.
        return went_on

    def _is_newer(self, address: Address) -> bool:
        """Whether an open store of a later term is there."""
        began = time.monotonic()
        try:
            self.store.connect(address)
            is_newer = self.store.get(KEY) == self._run and term_of(self.store) > self._term
            return is_newer and self.store.check([OPEN])
        except StoreLostError:
            self.whereabouts.note_silent(address, time.monotonic() - began)
            return False

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
