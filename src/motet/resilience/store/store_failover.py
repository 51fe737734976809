"""Lets a node agent survive the loss of its store: the store may be lost, and another one replace it.

Without the store training continues, and changes have to wait. When another store has replaced it, the agent writes
what it knows into it, and nothing is proposed before every node of the newest membership has done so (`OPEN`). A
membership matters only if its ranks have met, for which the agents of all its nodes have read it: so if one of these is
back, it is known. Nodes that stay away for `silence_s` and `REJOIN_S` are lost; but nodes that could continue by
themselves, in the worst case, only when they must have ended: an agent that finds no store for `store_patience_s` ends.
A node that comes back later finds itself out, or a membership other than the one it knows, and ends. Where ranks had
not met when the store was lost, they meet again, under the next membership.

Where nodes are on machines of their own, the store may also move. Each node names an address at which its machine would
keep a store (`StandbyProcess`). An agent that has lost the store for longer than a restart takes looks for another one
in the order of the newest membership (`StoreDiscovery`): the first living node opens one, the others come to it. If
that does not happen within `TURN_S`, it is the next node's turn. At the new store each agent votes: it writes which
memberships it knows (`gathered`), and never returns to an older store. The new store continues from the newest line of
memberships: a line is what stood in one opened store, so it starts with all that was valid in older ones.

Quorums ensure that no two stores of one training both say who trains, as a cut network looks like a lost machine. Of N
nodes of a membership some number k is enough to continue where the store is; it takes more than N - k to continue with
another store. Two such sets have a node in common, and a node that has come to a newer store never heeds an older one.
docs/decisions/failures.md has the proof. k is half of the nodes, or as many as are left when as many were lost as the
run is to survive, if these are fewer.
"""

import json
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from motet.addresses import address_text
from motet.resilience.membership import (
    FIRST_GENERATION,
    OPEN,
    RUN,
    Address,
    Change,
    Membership,
    Store,
    StoreLostError,
    key,
    next_membership,
    propose,
)

MOVES = "moves"
"""Key that exists if the training's store may move to another machine."""
TERM = "term"
"""JSON; absent in the first store."""
GATHERING = "gathering"
"""Key that exists if a store started by gathering nodes; they wait for `OPEN`."""
TURN_S = 5.0
"""Time for a node to notice that the store is lost, a little later than others, and to open a new one."""
SILENT_GRACES = 3
"""Multiple of `grace_s` for which an address that did not answer is not asked again."""
REJOIN_S = 1.0
"""Time between the first and the last agent that finds a new store, beside the silence of a lost node."""

Successor = Callable[[Membership, Sequence[Change]], Membership]
"""Computes the next membership from one and the changes since (motet.resilience.succession)."""
Term = tuple[int, int, str]
"""Orders the stores of one training: round, the node on whose machine it is, and its address there, as node numbers may
be given twice."""
FIRST_TERM: Term = (0, -1, "")
"""Term of the store with which the training began."""


def quorum_to_continue(num_nodes: int, tolerate: int) -> int:
    """Returns how many of a membership's nodes are enough where the store is."""
    return max(min(1, num_nodes), min((num_nodes + 1) // 2, num_nodes - tolerate))


def quorum_to_open(num_nodes: int, tolerate: int) -> int:
    """Returns how many of a membership's nodes it takes to open another store."""
    return num_nodes - quorum_to_continue(num_nodes, tolerate) + 1 if num_nodes else 0


def is_valid(line: Sequence[Membership], read: Collection[int], tolerate: int) -> bool:
    """Whether the last membership of `line` may be trained under, given that the first one was. `read`: nodes that have
    read the last one, so that no newer store is opened without it.

    A node that reported itself out counts, as it goes to no other store."""
    for i, before in enumerate(line[:-1]):
        out = {change.node for m in line[i + 1 :] for change in m.changes if change.is_self_reported}
        if len({*read, *out} & {*before.all_nodes}) < quorum_to_continue(len(before.all_nodes), tolerate):
            return False
    return True


def is_read_by_enough(store: Store, known: Sequence[Membership], settled: int, tolerate: int) -> bool:
    """`is_valid` of the last of all `known` memberships. `settled`: the generation of an earlier valid one."""
    line = [membership for membership in known if membership.generation >= settled]
    nodes = {node for membership in line[:-1] for node in membership.all_nodes}
    read = [node for node in nodes if store.check([key("read", line[-1].generation, node)])]
    return is_valid(line, read, tolerate)


def may_be_valid(before: Membership, have_not_read: Collection[int], tolerate: int) -> bool:
    """Whether the membership after this one may be valid, if these nodes never read it."""
    others = {*before.all_nodes} - {*have_not_read}
    return len(others) >= quorum_to_continue(len(before.all_nodes), tolerate)


def may_open(line: Sequence[Membership], come: Collection[int], tolerate: int) -> bool:
    """Whether nodes that have come to a new store may continue from the last membership of `line`, which starts with
    the newest one that is certainly valid."""
    return all(len({*come} & {*m.all_nodes}) >= quorum_to_open(len(m.all_nodes), tolerate) for m in line)


class OtherLineError(RuntimeError):
    """Another node knows another membership of the same generation and line."""


@dataclass(frozen=True)
class Vote:
    """What a node that has come to a new store knows."""

    node: int
    line: Term
    """Term of the newest store in which it has read all memberships."""
    generation: int
    """The newest membership that it knows."""
    settled: int
    """The newest generation that it knows to be certainly valid."""


@dataclass(frozen=True)
class Gathered:
    """What the nodes that have come to a new store know together."""

    line: tuple[Membership, ...]
    """From the first membership on."""
    settled: int
    nodes: frozenset[int]
    """Nodes that have come and whose numbers belong to this line."""

    @property
    def tail(self) -> tuple[Membership, ...]:
        return self.line[self.settled - FIRST_GENERATION :]


def term_text(term: Term) -> str:
    return json.dumps(term)


def term_of(store: Store) -> Term:
    if not store.check([TERM]):
        return FIRST_TERM
    number, node, address = json.loads(store.get(TERM))
    return number, node, address


def vote(store: Store, own: Vote, known: Sequence[Membership]) -> None:
    """Writes a node's vote. `known`: memberships from the first on. Raises `OtherLineError`."""
    for membership in known:
        line_key = f"line/{own.line}/{membership.generation}"
        if Membership.from_json(store.compare_set(line_key, "", membership.to_json())) != membership:
            raise OtherLineError(f"another membership {membership.generation} is known")
    store.set(f"vote/{store.add('votes', 1)}", json.dumps(asdict(own)))


def gathered(store: Store, tolerate: int) -> Gathered | None:
    """Returns what the nodes that have come know; None: nobody has come."""
    votes = []
    for number in range(1, store.add("votes", 0) + 1):
        if store.check([f"vote/{number}"]):  # Its writer may have died in between.
            values = json.loads(store.get(f"vote/{number}"))
            votes.append(Vote(**{**values, "line": tuple(values["line"])}))
    if not votes:
        return None
    term, newest = max((each.line, each.generation) for each in votes)
    line = [_known(store, term, generation) for generation in range(FIRST_GENERATION, newest + 1)]
    settled = max(each.settled for each in votes if each.line == term)
    nodes = frozenset(each.node for each in votes if _has_number(store, each, line))
    while len(line) > 1 and line[-1].generation > settled:
        knowing = [each for each in votes if each.generation >= line[-1].generation]
        have = {each.node for each in knowing if _known(store, each.line, line[-1].generation) == line[-1]}
        if may_be_valid(line[-2], nodes - have, tolerate):
            break
        line.pop()  # It was proposed by a node that did not reach the others.
    return Gathered(tuple(line), settled, nodes)


def _has_number(store: Store, own: Vote, line: Sequence[Membership]) -> bool:
    """Whether a voter's number belongs to that line. A number that no membership of a lost store had is given again by
    the next store: two nodes may come with it, and must not be confused."""
    first = next((membership for membership in line if own.node < membership.num_admitted), None)
    if first is None or own.generation < first.generation:
        return False
    return _known(store, own.line, first.generation) == first


def _known(store: Store, line: Term, generation: int) -> Membership:
    return Membership.from_json(store.get(f"line/{line}/{generation}"))


class Standby(Protocol):
    """The process on this machine that would keep a store (`StandbyProcess`)."""

    @property
    def address(self) -> Address: ...

    @property
    def is_free(self) -> bool:
        """Whether nothing has been asked of it, or it has given up."""

    def begin(self, term: Term, run: bytes) -> None:
        """Opens a store, if enough nodes come to it."""


@dataclass
class StoreDiscovery:
    """Where a node agent looks for the store of a training whose store may move. Times are by `time.monotonic()`."""

    own: Standby | None
    grace_s: float
    """Time for a lost store to be restarted where it was."""
    addresses: dict[int, Address] = field(default_factory=dict)
    """Addresses of the nodes' standbys."""
    _silent_until: dict[Address, float] = field(default_factory=dict)
    """When to ask an address again that listens but does not answer, as on a stopped machine."""
    _searching_since: float | None = None

    def learn(self, store: Store, nodes: Sequence[int]) -> None:
        for node in nodes:
            if node not in self.addresses and store.check([key("standby", node)]):
                host, _, port = store.get(key("standby", node)).decode().rpartition(":")
                self.addresses[node] = host, int(port)

    def tell(self, store: Store, node: int) -> None:
        if self.own is not None:
            store.set(key("standby", node), address_text(self.own.address))

    def open_here(self, node: int, after: Term, run: bytes) -> None:
        """Makes this machine's standby open a store of a later term, unless it is busy."""
        if self.own is not None and self.own.is_free:
            self.own.begin((after[0] + 1, node, address_text(self.own.address)), run)

    def note_silent(self, address: Address, waited_s: float) -> None:
        """Notes an address that did not answer for `waited_s`; where nobody listens, an error comes at once."""
        if waited_s > 0.4 * self.grace_s:
            self._silent_until[address] = time.monotonic() + SILENT_GRACES * self.grace_s

    def _is_silent(self, address: Address) -> bool:
        return time.monotonic() < self._silent_until.get(address, 0.0)

    def found(self) -> None:
        """Ends the search."""
        self._searching_since = None

    def others(self) -> list[Address]:
        own = None if self.own is None else self.own.address
        return [address for address in self.addresses.values() if address != own and not self._is_silent(address)]

    def places(self, nodes: Sequence[int], before: Address, away_s: float) -> Iterator[tuple[int | None, Address]]:
        """Yields the addresses to try now, in order, each with the node whose standby is there (None: where the store
        was `before`).

        `nodes`: of the newest membership. `away_s`: how long there has been no store."""
        if not nodes or not self._is_silent(before):  # Without nodes there is nobody else to ask.
            yield None, before
        if away_s <= self.grace_s:
            return
        now = time.monotonic()
        if self._searching_since is None:
            self._searching_since = now
        addresses = {node: self.addresses[node] for node in nodes if node in self.addresses}
        known = [node for node, address in addresses.items() if address != before and not self._is_silent(address)]
        # Last the standby on the store's machine, which is probably lost.
        known.sort(key=lambda node: self.addresses[node][0] == before[0])
        for place, node in enumerate(known):
            if now - self._searching_since >= place * TURN_S:
                yield node, self.addresses[node]


class LeftBehindError(RuntimeError):
    """The others continued without this node, or train something else now."""


class ConnectedStore(Store, Protocol):
    """A client whose calls raise `StoreLostError` when it has lost the store."""

    address: Address

    def connect(self, address: Address | None = None) -> None:
        """Connects to the store that is there now; None: where the last one was. Raises `StoreLostError`."""


@dataclass
class StoreFailover:
    """An agent's view of its store across losses. Methods that use the store raise `StoreLostError`; times are by
    `time.monotonic()`."""

    store: ConnectedStore
    """Not connected yet."""
    successor: Successor
    silence_s: float
    """Silence of a lost node."""
    store_patience_s: float
    """How long the store may be away."""
    tolerate: int
    """Nodes that may be lost at once."""
    discovery: StoreDiscovery
    known: list[Membership] = field(default_factory=list)
    """All memberships that this agent has read, oldest first."""
    away_since: float | None = field(default_factory=time.monotonic)
    """When the store was lost; None: it is there."""
    lost_in: int = 0
    """The newest generation when the store was lost."""
    is_open: bool = False
    """Memberships may be proposed."""
    moves: bool = False
    """The store may move to another machine."""
    is_out: bool = False
    """This node has reported itself out: it goes to no other store."""
    _term: Term = FIRST_TERM
    """Term of the newest store that it has come to. It heeds no older one."""
    _line: Term = FIRST_TERM
    """Term of the newest store in which it has read all memberships."""
    _settled: int = FIRST_GENERATION
    """The newest generation that is known to be certainly valid."""
    called_in: int = 0
    """The newest generation of which the node's processes have been notified."""
    _read_in_store: int = 0
    """The newest generation that this store records as read by this node."""
    _is_gathering: bool = False
    """It has come to a store that is not open yet."""
    _permanent: dict[str, str] = field(default_factory=dict)
    """Other values that this agent has written permanently."""
    _run: bytes | None = None
    """The run record of the store's training."""
    _address: Address | None = None
    """Where the store is, or was."""
    _back_since: float = 0.0
    """When this store was found."""
    _could: tuple[tuple[int, tuple[int, ...]], bool] | None = None
    """Cache of `_could_continue`."""

    @property
    def newest(self) -> Membership | None:
        return self.known[-1] if self.known else None

    def lose_store(self, now: float, waited_s: float = 0.0) -> None:
        """Notes the loss of the store. `waited_s`: how long it did not answer."""
        self.away_since = now
        # A living keeper would have restarted a store that does not answer within this time.
        if self.moves and waited_s > 1.5 * self.discovery.grace_s:
            self.away_since -= 1.5 * self.discovery.grace_s
            self.discovery.note_silent(self.store.address, waited_s)
        self.lost_in = self.newest.generation if self.newest is not None else 0

    def is_given_up(self, now: float) -> bool:
        """Whether the store has been away for too long."""
        return self.away_since is not None and now - self.away_since > self.store_patience_s

    def wait_anew(self, now: float) -> None:
        """Restarts the wait for other nodes, as this agent was held up itself and has not heard them."""
        self._back_since = now

    def write(self, name: str, value: str) -> None:
        """Writes a permanent value, also into any later store."""
        self._permanent.setdefault(name, value)
        if self.away_since is None:
            self.store.compare_set(name, "", value)

    def come_back(self, node: int | None) -> int | None:
        """Comes (back) to the store, and writes what this agent knows, as the store may be a new one.

        Returns the node's number if it is still valid. Raises `LeftBehindError`."""
        self._find(node)
        self.moves = self.store.check([MOVES])
        if self._term == self._line:
            self._write_again()
        else:
            self._compare()
        if node is not None and not self._has_number(node):
            node = None
        for name, value in self._permanent.items():
            self.store.compare_set(name, "", value)
        if node is not None:
            self.come(node)
        self.is_open, self._back_since, self.away_since, self._read_in_store = False, time.monotonic(), None, 0
        return node

    def _find(self, node: int | None) -> None:
        """Connects to the store, where it was or on another node. Raises `LeftBehindError`."""
        if self._is_gathering:
            try:
                is_open = self.store.check([OPEN])
            except StoreLostError:  # The standby gave up.
                self._is_gathering = False
                self.discovery.found()
                raise
            if not is_open:
                raise StoreLostError("the store waits for more nodes")
        else:
            self._look_around(node)
        self._is_gathering, self._address = False, self.store.address
        self.discovery.found()

    def _look_around(self, node: int | None) -> None:
        now = time.monotonic()
        assert self.away_since is not None
        nodes = self.newest.all_nodes if self.moves and not self.is_out and self.newest is not None else ()
        before = self._address or self.store.address
        for whose, address in self.discovery.places(nodes, before, now - self.away_since):
            if whose is not None and whose == node:
                assert self._run is not None
                self.discovery.open_here(whose, self._term, self._run)
            began = time.monotonic()
            try:
                if self._is_there(address, is_elsewhere=whose is not None):
                    self._vote_if_asked(node)
                    return
            except StoreLostError:
                if self._is_gathering:
                    raise
                self.discovery.note_silent(address, time.monotonic() - began)
        self.store.address = before
        raise StoreLostError("no store is found")

    def _is_there(self, address: Address, *, is_elsewhere: bool) -> bool:
        """Connects; whether a store of this training is there, and not an older one than known."""
        self.store.connect(address)
        run = self.store.get(RUN)
        if self._run is not None and run != self._run:
            if is_elsewhere:
                return False
            raise LeftBehindError("another training has begun, or this one was started anew")
        self._run = run
        term = term_of(self.store)
        if term < self._term:
            return False
        self._term = term  # From now on no older store is heeded.
        return True

    def _vote_if_asked(self, node: int | None) -> None:
        """Votes at a store that gathers nodes, and raises `StoreLostError` as it is not open yet."""
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
        """Writes all known memberships."""
        for membership in self.known:
            is_newest = membership is self.newest
            if not is_newest and self.store.check([key("membership", membership.generation)]):
                continue
            if propose(self.store, membership) != membership and is_newest:
                raise LeftBehindError("the others went on without it while it did not reach the store")

    def _compare(self) -> None:
        """Drops the known memberships on which the others did not agree in a newer store."""
        for i, membership in enumerate(self.known):
            name = key("membership", membership.generation)
            if self.store.check([name]) and Membership.from_json(self.store.get(name)) == membership:
                continue
            if membership.generation <= self.called_in:
                raise LeftBehindError("the others went on without it, with another store")
            self.known = self.known[:i]
            return

    def come(self, node: int) -> None:
        """Announces the node in this store."""
        self.store.set(key("back", node), "")
        if self.moves:
            self.discovery.tell(self.store, node)

    def read_newer(self) -> list[Membership]:
        """Reads all memberships that are not known yet."""
        newer: list[Membership] = []
        last = self.newest
        while (last := next_membership(self.store, last.generation if last is not None else 0)) is not None:
            newer.append(last)
        # All at once, so that what a node knows of a store is what stood in it at some moment.
        self.known += newer
        self._line = self._term
        return newer

    def tell_read(self, node: int) -> None:
        """Records what this node has read, and reads what is settled and where the standbys are."""
        if not self.moves or self.newest is None:
            return
        generation = self.newest.generation
        if self._read_in_store < generation:
            self.store.set(key("read", generation, node), "")
            self._read_in_store = generation
        if self._settled < generation and self.store.check([key("settled", generation)]):
            self._settled = generation
        self.discovery.learn(self.store, self.newest.all_nodes)

    @property
    def may_end(self) -> bool:
        """Whether a node that is out may end. If the store were lost before the newest membership is settled, another
        store might need this node's vote."""
        return not self.moves or self.is_out or self.newest is None or self.newest.generation <= self._settled

    def may_train(self) -> bool:
        """Whether the newest membership is valid: nobody can have continued from an older one elsewhere."""
        return not self.moves or is_read_by_enough(self.store, self.known, self._settled, self.tolerate)

    def others_continued(self, node: int) -> bool:
        """Whether other nodes have continued with another store."""
        have_continued = any(self._is_newer(address) for address in self.discovery.others())
        self.store.connect(self._address)
        if not have_continued and not self.store.check([key("back", node)]):
            raise StoreLostError("meanwhile another one has taken its place")  # It needs what this agent knows.
        return have_continued

    def _is_newer(self, address: Address) -> bool:
        """Whether there is an open store of a later term."""
        began = time.monotonic()
        try:
            self.store.connect(address)
            is_newer = self.store.get(RUN) == self._run and term_of(self.store) > self._term
            return is_newer and self.store.check([OPEN])
        except StoreLostError:
            self.discovery.note_silent(address, time.monotonic() - began)
            return False

    def _has_number(self, node: int) -> bool:
        """Whether the number is still valid; a new store gives numbers that are in no membership again."""
        if self.newest is not None:
            return node < self.newest.num_admitted
        first = next_membership(self.store, FIRST_GENERATION - 1)
        return first is not None and node in first.nodes

    def opens(self, node: int | None, now: float) -> bool:
        """Opens the store for proposals when all nodes are back. Returns whether it is open."""
        if not self.store.check([OPEN]):
            if self.newest is None or node not in self.newest.all_nodes:
                return False
            if not self.all_are_back(self.newest, now - self._back_since):
                return False
            if next_membership(self.store, self.newest.generation) is not None:
                return False  # The last node to come back has brought it.
            self.store.compare_set(OPEN, "", str(self.newest.num_admitted))
        self.is_open = True
        return True

    def all_are_back(self, membership: Membership, waited_s: float) -> bool:
        """Whether all nodes of the membership are back or have ended, or have been away for too long."""
        away = [
            node
            for node in membership.all_nodes
            if not self.store.check([key("back", node)]) and not self.store.check([key("ended", node)])
        ]
        if not away:
            return True
        patience_s = self.silence_s + REJOIN_S
        if waited_s > patience_s and self._could_continue(membership, away):
            patience_s += self.store_patience_s
        return waited_s > patience_s

    def _could_continue(self, membership: Membership, nodes: Sequence[int]) -> bool:
        """Whether these nodes could continue without all others."""
        which = (membership.generation, tuple(nodes))
        if self._could is None or self._could[0] != which:
            at = time.time()
            lost = [Change("lost", node, "it is here", at) for node in membership.all_nodes if node not in nodes]
            try:
                self._could = which, self.successor(membership, lost).saves_checkpoint
            except Exception:
                traceback.print_exc()
                self._could = which, True
        return self._could[1]
