"""The records that a training keeps in its store: the run itself, and the sequence of its memberships.

A membership says which nodes train together, and under which plan. Membership g + 1 is whatever was first written under
its key (compare and set), so there is no coordinator that could die: every agent proposes what follows from what it
sees, one proposal wins, and agents that see further changes propose the next. Ranks, copies and steps follow from the
membership, equally on every rank. (Thesis, sections 2.3.3 and 2.6.2: there a coordinator, with a TCP connection to each
node.)

If the store is lost and another one replaces it, whoever knows a membership writes it again, and nothing new is
proposed before that has happened (`OPEN`; see store_failover.py). Every value may be written twice: none counts events.

Limits: files that a run file names (data, costs, a tokenizer) are compared by name, not by content.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol
from uuid import uuid4

from motet.config import RunConfig

FIRST_GENERATION = 1
HEARTBEAT_S = 0.05
"""Interval between two heartbeats of a node, and between two checks of the others'."""

OPEN = "open"
"""Key that exists once memberships may be proposed and nodes may register; its value is the first free node number."""
OVER = "over"
"""Key that exists once the training is over and the store's keeper knows its result."""
FAILURE = "failure"
"""JSON of kind and message of the first process that failed for another reason than a lost node."""
RUN = "run"
"""JSON of the `RunRecord`."""

KeyKind = Literal[
    "membership", "beat", "done", "left", "back", "ended", "result", "logged", "standby", "read", "settled"
]


def key(kind: KeyKind, *numbers: int) -> str:
    """Returns the store's key of a fact about a generation g or a node n.

    | key | what it says |
    |---|---|
    | membership/g | JSON of the membership |
    | beat/n | changes with each heartbeat of the node's agent |
    | done/g/n | the node's processes have finished the training under that membership |
    | left/g/n | the leaving node has sent what it held |
    | back/n | the node has found this store and has written what it knows, after another store was lost |
    | ended/n | the node's agent has ended, as far as the store's keeper can see |
    | result/g | JSON that `motet train --json` prints |
    | logged/g | the failure log has the membership's changes |
    | standby/n | HOST:PORT on the node's machine at which another store may be opened if this one is lost |
    | read/g/n | the node's agent has read that membership |
    | settled/g | the keeper has seen that enough nodes have read that membership (`is_valid`) |
    """
    return "/".join((kind, *map(str, numbers)))


Kind = Literal["start", "lost", "left", "joined", "leaving", "again"]
"""again: the store was lost before all ranks had met under this membership, so they meet under the next one."""


Address = tuple[str, int]
"""Host and port."""


class StoreLostError(RuntimeError):
    """The store does not answer any more. Another one may replace it."""


class Store(Protocol):
    """The subset of `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True)
class Change:
    """A reason why a membership differs from the one before it."""

    kind: Kind
    node: int
    how: str
    """Of a lost node: what died and how, in words."""
    noticed_at: float
    """Seconds since the epoch, by the clock of the node that noticed."""
    is_self_reported: bool = False
    """The node itself said that it is out: it takes no part in anything any more."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The nodes that train together, and their plan."""

    generation: int
    nodes: tuple[int, ...]
    """In the order of ranks: with n devices a node, nodes[i] has the ranks [i n, (i + 1) n)."""
    leaving: tuple[int, ...] = ()
    """Nodes that only send what they hold; their ranks follow all others'. Nobody trains meanwhile."""
    waiting: tuple[int, ...] = ()
    """Spares: nodes that have joined and have no place yet."""
    num_admitted: int
    """Nodes with smaller numbers have been members or spares before."""
    plan: str
    """JSON."""
    changes: tuple[Change, ...] = ()
    is_urgent: bool = True
    """Something has died: do not wait for the iteration to end."""
    note: str = ""
    """What the plan does about the changes, in words."""
    stop: str | None = None
    """Why the training cannot continue; None: it can."""
    saves_checkpoint: bool = True
    """If the training stops: `plan` fits the remaining nodes, and they save a checkpoint first."""

    @property
    def rendezvous_prefix(self) -> str:
        """The prefix under which ranks meet; a losing proposal of the same generation has another one."""
        return f"generation/{self.generation}/{hashlib.sha256(self.to_json().encode()).hexdigest()[:16]}"

    @property
    def all_nodes(self) -> tuple[int, ...]:
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


def propose(store: Store, membership: Membership) -> Membership:
    """Returns the membership of this generation: this one, or another that was proposed before."""
    winner = store.compare_set(key("membership", membership.generation), "", membership.to_json())
    return Membership.from_json(winner)


def next_membership(store: Store, generation: int) -> Membership | None:
    """Returns the membership after `generation`, if there is one."""
    following = key("membership", generation + 1)
    return Membership.from_json(store.get(following)) if store.check([following]) else None


def register(store: Store) -> int:
    """Returns a unique number for a node that wants to join. The store must be open."""
    node = int(store.get(OPEN)) + store.add("nodes", 1) - 1
    store.set(key("beat", node), "0")
    return node


def registered(store: Store) -> int:
    """Returns the first number that no node has. The store must be open."""
    return int(store.get(OPEN)) + store.add("nodes", 0)


def unlogged_changes(store: Store, generation: int) -> tuple[Change, ...]:
    """Returns all changes up to `generation` that the failure log does not have yet, including those of a recovery that
    was interrupted by the next failure."""
    changes: tuple[Change, ...] = ()
    while generation > FIRST_GENERATION and not store.check([key("logged", generation)]):
        if store.check([key("membership", generation)]):
            changes = Membership.from_json(store.get(key("membership", generation))).changes + changes
        generation -= 1
    return changes


def silence_s(detect_s: float) -> float:
    """Returns the silence after which somebody counts as lost, so that a loss is noticed within `detect_s`: the last
    heartbeat is seen up to an interval after it was sent, and the check follows up to an interval later."""
    return max(detect_s - 3 * HEARTBEAT_S, detect_s / 2)


def store_timeout_s(detect_s: float) -> float:
    """Returns how long the store's keeper waits for an answer before it kills the store's process. Other clients wait
    twice as long, so that they see the end of a store that is stopped and do not try to reach it again."""
    return max(5.0, 2 * detect_s)


@dataclass(frozen=True)
class MembershipNotice:
    """What the agent sends to one training process: a membership, and the process's rank in it."""

    membership: Membership
    rank: int
    store: Address
    """Where the ranks meet."""
    heard_at: float = 0.0
    """When the process received it, by its `time.monotonic()`."""


class Heartbeats:
    """Sends a node's heartbeats through the store and watches the others'. `timeout_s`: silence of a lost node."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._own = 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        """By node: its last heartbeat, and when it was first seen here."""
        self._last_look = -math.inf

    def send(self, node: int) -> None:
        self._own += 1
        self._store.set(key("beat", node), str(self._own))

    def missing(self, nodes: Sequence[int], now: float) -> list[int]:
        """Returns the nodes whose heartbeat has not changed for the timeout, by this machine's `time.monotonic()`."""
        if now - self._last_look > max(self._timeout_s / 2, 2 * HEARTBEAT_S):
            self._seen.clear()  # This process was held up itself, so it cannot tell how long others were silent.
        self._last_look = now
        lost = []
        for node in nodes:
            beat_key = key("beat", node)
            # Absent if the node was registered and died before its first heartbeat: `get` would wait for it.
            beat = self._store.get(beat_key) if self._store.check([beat_key]) else b""
            last, since = self._seen.setdefault(node, (beat, now))
            if beat != last:
                self._seen[node] = (beat, now)
            elif now - since > self._timeout_s:
                lost.append(node)
        return lost


OWN_KEYS = (
    "train.resume",
    "data.servers",
    "data.server_timeout_s",
    "data.token_file",
    "data.tls_roots",
    "data.workers",
)
"""Keys of the run file that may differ between nodes. `train.resume` is read where the run is started."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What all nodes of a run must agree on. It is in the store before any node comes."""

    config: dict[str, Any]
    """The run file as JSON."""
    name: str = field(default_factory=lambda: uuid4().hex)
    """Unique for the run, and kept across restarts."""
    restarts: int = 0
    """How often all nodes have been restarted."""

    @property
    def resume(self) -> str | None:
        """`train.resume`."""
        resume: str | None = self.config["train"]["resume"]
        return resume

    def write(self, store: Store) -> None:
        store.set(RUN, json.dumps(asdict(self)))

    @staticmethod
    def read(store: Store) -> "RunRecord":
        """Waits for the record as long as the store's timeout allows."""
        return RunRecord.from_json(store.get(RUN))

    @staticmethod
    def from_json(text: str | bytes) -> "RunRecord":
        return RunRecord(**json.loads(text))


def as_json(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def first_difference(here: RunConfig, run: RunRecord) -> str | None:
    """Describes the first key in which a node's run file differs from the run's; None if the node may take part."""
    mine, theirs = dict(_leaves(as_json(here))), dict(_leaves(run.config))
    for name in {**mine, **theirs}:
        if name in OWN_KEYS or (name in mine and name in theirs and mine[name] == theirs[name]):
            continue
        told = (f"is {json.dumps(leaves[name])}" if name in leaves else "is not given" for leaves in (mine, theirs))
        return "{}: {} here and {} there".format(name, *told)
    return None


def _leaves(values: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(values, dict) and values:
        for part, value in values.items():
            yield from _leaves(value, f"{name}.{part}" if name else part)
    else:
        yield name, values
