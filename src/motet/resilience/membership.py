"""The records that a training keeps in its store: the run itself, and the sequence of its memberships.

A membership says which nodes train together, and under which plan. Membership g + 1 is whatever was first written under
its key (compare and set), so there is no coordinator that could die: every agent proposes what follows from what it
sees, one proposal wins, and agents that see further changes propose the next. Ranks, copies and steps follow from the
membership, equally on every rank. (Thesis, sections 2.3.3 and 2.6.2: there a coordinator, with a TCP connection to each
node.)

Limits: files that a run file names (data, costs, a tokenizer) are compared by name, not by content.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from uuid import uuid4

from motet.addresses import Address, host_and_port
from motet.config import RunConfig
from motet.errors import UserError
from motet.plan import Plan
from motet.strict_parsing import parse_strictly

FIRST_GENERATION = 1

FAILURE = "failure"
"""JSON of kind and message of the first process that failed for another reason than a lost node."""
RUN = "run"
"""JSON of the `RunRecord`."""

MAX_NODES = 1_000_000
"""Numbers of nodes are below this."""
MAX_TRIAL_LENGTH = 500
"""Characters of a `TrialRequest` as JSON; its parts go on to processes that take short messages."""

Values = Mapping[str, str]
"""Values of a store, by key."""
KeyKind = Literal[
    "node", "alive", "membership", "meeting", "done", "left", "result", "logged", "seen_end", "trial", "tried"
]


def key(kind: KeyKind, *numbers: int) -> str:
    """Returns the store's key of a fact about a generation g or a node n.

    | key | what it says |
    |---|---|
    | node/n | the number was given to a node |
    | alive/n | the node gives signs of life |
    | membership/g | JSON of the membership |
    | meeting/g | HOST:PORT at which the ranks of that membership meet |
    | done/g/n | the node's processes have finished the training under that membership |
    | left/g/n | the leaving node has sent what it held |
    | result/g | JSON that `motet train --json` prints |
    | logged/g | the failure log has the membership's changes |
    | seen_end/n | the node's agent knows that the training is over |
    | trial/k | JSON of the `TrialRequest`: a node that wants to join is to sum with another one |
    | tried/k | JSON of the `TrialOutcome`, as the other one has seen it |
    """
    return "/".join((kind, *map(str, numbers)))


Kind = Literal["lost", "left", "joined", "leaving"]


@dataclass(frozen=True)
class Change:
    """A reason why a membership differs from the one before it."""

    kind: Kind
    node: int
    how: str
    """Description of a loss: what died, and how."""
    noticed_at: float
    """Seconds since the epoch, by the clock of the node that noticed."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The nodes that train together, and their plan."""

    generation: int
    nodes: tuple[int, ...]
    """Nodes in the order of ranks: with n devices a node, nodes[i] has the ranks [i n, (i + 1) n)."""
    leaving: tuple[int, ...] = ()
    """Nodes that only send what they hold; their ranks follow all others'. Nobody trains meanwhile."""
    waiting: tuple[int, ...] = ()
    """Spares: nodes that have no place, and wait for one with everything started."""
    staying: tuple[int, ...] = ()
    """Of the leaving nodes, those that the plan has no use for: when they have handed over, they wait as spares."""
    num_admitted: int
    """Nodes with smaller numbers have been members or spares before."""
    plan: str
    """JSON."""
    changes: tuple[Change, ...] = ()
    is_urgent: bool = True
    """Something has died: do not wait for the iteration to end."""
    note: str = ""
    """Description of how the plan responds to the changes."""
    stop: str | None = None
    """Why the training cannot continue; None: it can."""
    saves_checkpoint: bool = True
    """If the training stops: `plan` fits the remaining nodes, and they save a checkpoint first."""

    @property
    def all_nodes(self) -> tuple[int, ...]:
        return (*self.nodes, *self.leaving)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "Membership":
        values = json.loads(text)
        changes = tuple(Change(**change) for change in values.pop("changes"))
        for name in ("nodes", "leaving", "waiting", "staying"):
            values[name] = tuple(values[name])
        return Membership(changes=changes, **values)


def check_record(name: str, value: str) -> None:
    """Raises `UserError` unless the value is of the form that `key` lists for its key. Agents trust what they read, so
    the embedded store accepts no other value, and clients of etcd ignore it, even if its writer knew the secret."""
    kind, *numbers = name.split("/")
    if not all(re.fullmatch("[0-9]{1,9}", number) for number in numbers):
        raise UserError(f"{name[:100]!r} is not a key")
    match kind, [int(number) for number in numbers]:
        case "run", []:
            run = parse_strictly(RunRecord, value, name)
            if not isinstance(run.config.get("train"), dict) or "resume" not in run.config["train"]:
                raise UserError(f"{name}: config: is not a run file")
        case "failure", []:
            parse_strictly(_Failure, value, name)
        case "membership", [generation]:
            membership = parse_strictly(Membership, value, name)
            if membership.generation != generation:
                raise UserError(f"{name}: is of generation {membership.generation}")
            try:
                num_ranks = Plan.from_json(membership.plan).num_ranks
            except ValueError as error:
                raise UserError(f"{name}: {error}") from None
            listed = (*membership.all_nodes, *membership.waiting)
            if len(set(listed)) < len(listed) or not all(0 <= node < MAX_NODES for node in listed):
                raise UserError(f"{name}: its nodes are not different numbers from 0 to {MAX_NODES - 1}")
            if membership.nodes and num_ranks % len(membership.nodes):
                raise UserError(f"{name}: {len(membership.nodes)} nodes cannot share {num_ranks} ranks equally")
        case "meeting", [_]:
            if not _is_address(value):
                raise UserError(f"{name}: is not an address")
        case "trial", [_]:
            if len(value) > MAX_TRIAL_LENGTH:
                raise UserError(f"{name}: has more than {MAX_TRIAL_LENGTH} characters")
            if not _is_address(parse_strictly(TrialRequest, value, name).address):
                raise UserError(f"{name}: address: is not an address")
        case "tried", [_]:
            parse_strictly(TrialOutcome, value, name)
        case "result", [_]:
            parse_strictly(dict[str, Any], value, name)
        case (("node" | "alive"), [node]) if node >= MAX_NODES:
            raise UserError(f"{name}: is beyond {MAX_NODES - 1}")
        case (("node" | "alive" | "logged" | "seen_end"), [_]):
            pass
        case (("done" | "left"), [_, _]):
            pass
        case _:
            raise UserError(f"{name[:100]!r} is not a key")


def _is_address(text: str) -> bool:
    """Whether a socket can be asked to connect there."""
    return text.isascii() and text.isprintable() and host_and_port(text) is not None


@dataclass(frozen=True)
class _Failure:
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """Record of a sum that a joining node asks another one for (`motet.resilience.health.neighbours`)."""

    neighbour: int
    """Number of the other node."""
    address: str
    """HOST:PORT at which both meet."""
    name: str
    """Unique."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "TrialRequest":
        return TrialRequest(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    failure: str | None
    """What went wrong; None: the sum was right."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "TrialOutcome":
        return TrialOutcome(**json.loads(text))


def memberships_after(values: Values, generation: int) -> Iterator[Membership]:
    while (text := values.get(key("membership", generation + 1))) is not None:
        yield Membership.from_json(text)
        generation += 1


def num_registered(values: Values) -> int:
    """Returns the first number that no node has."""
    return max((int(name.removeprefix("node/")) + 1 for name in values if name.startswith("node/")), default=0)


def living_nodes(values: Values) -> list[int]:
    """Returns the numbers of the nodes that give signs of life."""
    return sorted(int(name.removeprefix("alive/")) for name in values if name.startswith("alive/"))


def is_over(values: Values, newest: Membership | None) -> bool:
    """Whether the training has failed, or all nodes have finished it."""
    if FAILURE in values:
        return True
    if newest is None or not newest.nodes or key("result", newest.generation) not in values:
        return False
    return all(key("done", newest.generation, node) in values for node in newest.nodes)


def unlogged_changes(values: Values, generation: int) -> tuple[Change, ...]:
    """Returns all changes up to `generation` that the failure log does not have yet, including those of a recovery that
    was interrupted by the next failure."""
    changes: tuple[Change, ...] = ()
    while generation > FIRST_GENERATION and key("logged", generation) not in values:
        if text := values.get(key("membership", generation)):
            changes = Membership.from_json(text).changes + changes
        generation -= 1
    return changes


def silence_s(detect_s: float) -> float:
    """Returns the silence after which a node counts as lost, so that a loss is noticed within `detect_s`: signs of life
    and looks for them follow each other with a small delay."""
    return max(detect_s - 0.1, detect_s / 2)


def store_timeout_s(detect_s: float) -> float:
    """Returns how long a store may take to answer."""
    return max(5.0, 2 * detect_s)


@dataclass(frozen=True)
class MembershipNotice:
    """Message of the agent to one training process: a membership, and the process's rank in it."""

    membership: Membership
    rank: int | None
    """Rank of the process; None: the process waits, as its node is a spare."""
    run: "RunRecord"
    host: str
    """This machine's address: rank 0 opens the meeting place there."""
    member_since: int = FIRST_GENERATION
    """The generation since which the node has been a member. What it held before may be of an older step."""
    heard_at: float = 0.0
    """When the process received it, by its `time.monotonic()`."""


@dataclass(frozen=True)
class MeetingPlace:
    """Message of the agent to all its processes: where the ranks of a membership meet."""

    generation: int
    address: Address


OWN_KEYS = (
    "train.resume",
    "train.overwrite",
    "train.failures.secret_file",
    "data.servers",
    "data.server_timeout_s",
    "data.token_file",
    "data.tls_roots",
    "data.workers",
)
"""Keys of the run file that may differ between nodes. `train.resume` and `train.overwrite` are
read where the run is started."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The facts that all nodes of a run share. It is in the store before any node joins."""

    config: dict[str, Any]
    """The run file as JSON."""
    name: str = field(default_factory=lambda: uuid4().hex)
    """Unique for the run, and kept across restarts."""
    restarts: int = 0
    """How often all nodes have been restarted."""
    plan: str | None = None
    """JSON of the first plan."""
    rank_device_bytes: int = 0
    """Most memory of its accelerator that a rank of that plan is predicted to need; 0: unknown."""
    rank_host_bytes: int = 0
    """The same of its machine."""

    @property
    def resume(self) -> str | None:
        """`train.resume`."""
        resume: str | None = self.config["train"]["resume"]
        return resume

    def to_json(self) -> str:
        return json.dumps(asdict(self))

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
