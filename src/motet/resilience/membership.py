"""Which nodes train together: a sequence of memberships in a store that every node agent reads and any may extend.

Membership g + 1 is whatever was first written under its key (compare and set), so there is no coordinator that could
die: every agent proposes what follows from what it sees, one proposal wins, and whoever is not content with it proposes
the next. All else (ranks, copies, steps) follows from the membership alike on every rank. (Thesis, sections 2.3.3 and
2.6.2: there a coordinator, and a TCP connection to it from each node.)

The store may be lost, and another one take its place: then whoever knows a membership writes it again, and nothing new
is proposed before that has happened (`OPEN`; reunion.py says when). Nothing that is written here is a count of what was
done: whatever is written may be written twice.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

FIRST_GENERATION = 1
BEAT_S = 0.05
"""Between two signs of life of a node, and two looks at the others'; a little more, as nobody is punctual."""

OPEN = "open"
"""There if memberships may be proposed and nodes may register; its value: the first number that is free."""
OVER = "over"
"""There if the training is over, and whoever keeps the store knows how it has ended."""
FAILURE = "failure"
"""JSON of kind and message: of the first process that has failed for a reason that is no lost node's."""

Kind = Literal["start", "lost", "left", "joined", "leaving", "again"]
"""again: the store was lost before all had met under this membership, which needs it; they meet anew."""


Address = tuple[str, int]
"""Host and port."""


class StoreLostError(RuntimeError):
    """It does not answer any more. Another one may take its place."""


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True)
class Change:
    """Why a membership differs from the one before it."""

    kind: Kind
    node: int
    how: str
    """Of a lost node: what died and how, in words."""
    noticed_at: float
    """Seconds since the epoch, by the clock of the node that noticed."""
    is_certain: bool = False
    """The node itself said that it is out: it takes no part in anything any more."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    generation: int
    nodes: tuple[int, ...]
    """In the order of ranks: with n devices a node, nodes[i] has ranks [i n, (i + 1) n)."""
    leaving: tuple[int, ...] = ()
    """Nodes that only hand over what they hold; their ranks follow after all others'. Nobody trains meanwhile."""
    waiting: tuple[int, ...] = ()
    """Nodes that have joined and have no part yet."""
    num_known: int
    """Nodes with smaller numbers have been taken in before, or were in from the start."""
    plan: str
    """JSON."""
    changes: tuple[Change, ...] = ()
    is_urgent: bool = True
    """Something has died: do not wait for the iteration to end."""
    note: str = ""
    """What the plan does about the changes, in words."""
    stop: str | None = None
    """The training cannot go on, and why."""
    saves: bool = True
    """Of one that stops: `plan` fits the nodes that are left, and a checkpoint is saved before."""

    @property
    def meeting(self) -> str:
        """Where its ranks meet: none of a membership of the same generation that has lost would be met."""
        return f"generation/{self.generation}/{hashlib.sha256(self.to_json().encode()).hexdigest()[:16]}"

    @property
    def everyone(self) -> tuple[int, ...]:
        return (*self.nodes, *self.leaving)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "Membership":
        values = json.loads(text)
        changes = tuple(Change(**change) for change in values.pop("changes"))
        for name in ("nodes", "leaving", "waiting"):
            values[name] = tuple(values[name])
        return Membership(changes=changes, **values)


def key_of(generation: int) -> str:
    return f"membership/{generation}"


def propose(store: Store, membership: Membership) -> Membership:
    """Returns the membership of this generation: this one, or another that was proposed before."""
    winner = store.compare_set(key_of(membership.generation), "", membership.to_json())
    return Membership.from_json(winner)


def next_membership(store: Store, generation: int) -> Membership | None:
    """The one after `generation`, if there is one."""
    key = key_of(generation + 1)
    return Membership.from_json(store.get(key)) if store.check([key]) else None


def register(store: Store) -> int:
    """A number for a node that wants to join; none is given twice. The store must be open."""
    node = int(store.get(OPEN)) + store.add("nodes", 1) - 1
    store.set(f"beat/{node}", "0")
    return node


def registered(store: Store) -> int:
    """All numbers that have been given are smaller. The store must be open."""
    return int(store.get(OPEN)) + store.add("nodes", 0)


def done_key(generation: int, node: int) -> str:
    """There if a node's processes have come to the end of the training under that membership."""
    return f"done/{generation}/{node}"


def left_key(generation: int, node: int) -> str:
    """There if a node that is leaving has handed over what it held."""
    return f"left/{generation}/{node}"


def back_key(node: int) -> str:
    """There if a node has found this store and has written what it knows; of use where another store was lost."""
    return f"back/{node}"


def ended_key(node: int) -> str:
    """There if a node's agent has ended, as far as whoever keeps the store can see."""
    return f"ended/{node}"


def result_key(generation: int) -> str:
    return f"result/{generation}"


def logged_key(generation: int) -> str:
    """There if the failure log tells of that membership's changes."""
    return f"logged/{generation}"


def standby_key(node: int) -> str:
    """HOST:PORT at which another store is to be looked for, on that node's machine, if this one is lost."""
    return f"standby/{node}"


def read_key(generation: int, node: int) -> str:
    """There if that node's agent has read that membership."""
    return f"read/{generation}/{node}"


def settled_key(generation: int) -> str:
    """There if whoever keeps the store has seen that enough nodes have read that membership (votes.py)."""
    return f"settled/{generation}"


def unlogged_changes(store: Store, generation: int) -> tuple[Change, ...]:
    """All changes of which the failure log does not tell yet, up to those of `generation`; that of a recovery that was
    interrupted by the next failure too."""
    changes: tuple[Change, ...] = ()
    while generation > FIRST_GENERATION and not store.check([logged_key(generation)]):
        if store.check([key_of(generation)]):
            changes = Membership.from_json(store.get(key_of(generation))).changes + changes
        generation -= 1
    return changes


def silence_s(detect_s: float) -> float:
    """How long a silence tells that somebody is lost, so that it is noticed within `detect_s`: the last sign is seen up
    to a beat after it was given, and looked for again a beat later."""
    return max(detect_s - 3 * BEAT_S, detect_s / 2)


def call_s(detect_s: float) -> float:
    """For whoever keeps the store to wait for an answer; then its process is killed. A client waits for twice as long,
    so that it sees the end of a store that is stopped, and does not try to reach it again."""
    return max(5.0, 2 * detect_s)


@dataclass(frozen=True)
class Call:
    """What the agent tells one training process: a membership, and the process's rank in it."""

    membership: Membership
    rank: int
    store: Address
    """Where the ranks find each other."""
    heard_at: float = 0.0
    """When that process heard of it, by its `time.monotonic()`."""


class Beats:
    """Which nodes still give a sign of life. `timeout_s` without one: they are lost."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._own = 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        """By node: its last sign, and when it was first seen here."""
        self._last_look = -math.inf

    def give(self, node: int) -> None:
        self._own += 1
        self._store.set(f"beat/{node}", str(self._own))

    def missing(self, nodes: Sequence[int], now: float) -> list[int]:
        """Nodes whose sign has not changed for the timeout, by this machine's clock (`time.monotonic()`)."""
        if now - self._last_look > max(self._timeout_s / 2, 2 * BEAT_S):
            self._seen.clear()  # Held up itself, it cannot tell for how long others were silent.
        self._last_look = now
        lost = []
        for node in nodes:
            beat = self._beat(node)
            last, since = self._seen.setdefault(node, (beat, now))
            if beat != last:
                self._seen[node] = (beat, now)
            elif now - since > self._timeout_s:
                lost.append(node)
        return lost

    def _beat(self, node: int) -> bytes:
        """Empty if it has a number and died before its first one: `get` would wait for it."""
        key = f"beat/{node}"
        return self._store.get(key) if self._store.check([key]) else b""
