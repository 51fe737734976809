"""Machines are lost and held up, the network is cut, stores die and are opened elsewhere: what is trained under is one
sequence of memberships, whoever sees what; and who is left goes on.

Time is counted, not waited for. The agents are the real ones, and so is what decides; whoever keeps a store is played
here by `Keeping`.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from unittest import mock

import pytest

from motet.resilience import agent as agent_module
from motet.resilience.agent import NodeAgent
from motet.resilience.membership import (
    FIRST_GENERATION,
    OPEN,
    Address,
    Change,
    Membership,
    StoreLostError,
    key,
    next_membership,
    propose,
)
from motet.resilience.membership import (
    RUN as RUN_KEY,
)
from motet.resilience.store import store_failover as reunion_module
from motet.resilience.store import store_failover as whereabouts_module
from motet.resilience.store.store_failover import (
    FIRST_TERM,
    GATHERING,
    MOVES,
    TERM,
    Term,
    gathered,
    is_read_by_enough,
    may_open,
    term_text,
)

SEED = os.environ.get("MOTET_CHAOS_SEED") or str(time.time_ns())
NUM_NODES = 6
TICK_S = 0.1
DETECT_S = 1.0
PATIENCE_S = 40.0
STORMY_TICKS, QUIET_TICKS = 1000, 1200
RUN = "a run"
FIRST = Membership(generation=FIRST_GENERATION, nodes=tuple(range(NUM_NODES)), num_admitted=NUM_NODES, plan="")


def successor(membership: Membership, changes: Sequence[Change]) -> Membership:
    """Any node could go on by itself."""
    gone = {change.node for change in changes if change.kind == "lost"}
    nodes = tuple(node for node in membership.nodes if node not in gone)
    following = replace(membership, generation=membership.generation + 1, nodes=nodes, changes=tuple(changes))
    return replace(following, saves_checkpoint=bool(nodes))


@dataclass
class Keeping:
    """Who keeps a store, on one machine: as keeper.py and standby.py do, with what is theirs alone left out."""

    address: Address
    term: Term
    tolerate: int
    began: float
    line: list[Membership] = field(default_factory=list)
    """Empty: it gathers."""
    settled: int = FIRST_GENERATION
    values: dict[str, str] | None = None
    """None: the store's process has died."""
    back_at: float = 0.0
    enough_since: float | None = None

    def round(self, now: float, rng: Random) -> bool:
        """Whether it goes on."""
        if self.values is None:
            if now < self.back_at:
                return True
            if not self.line and self.term != FIRST_TERM and self.began < now:
                return False
            self.values = {RUN_KEY: RUN, MOVES: "", TERM: term_text(self.term)}
            if not self.line:
                self.values[GATHERING] = ""
            for membership in self.line:
                self.values[key("membership", membership.generation)] = membership.to_json()
            for generation in range(FIRST_GENERATION, self.settled + 1):
                self.values[key("settled", generation)] = ""
            return True
        store = Local(self.values)
        if not self.line:
            found = gathered(store, self.tolerate)
            if found is not None and may_open(found.tail, found.nodes, self.tolerate):
                self.enough_since = self.enough_since or now
                if found.nodes >= {*found.line[-1].all_nodes} or now - self.enough_since > 2.0:
                    self.line, self.settled = list(found.line), found.settled
                    for membership in self.line:
                        assert propose(store, membership) == membership
                    self.values[key("settled", self.settled)] = ""
                    self.values[OPEN] = str(NUM_NODES)
            return bool(self.line) or now - self.began < 20.0
        if rng.random() < 0.5:  # Later than the agents.
            return True
        while (newer := next_membership(store, self.line[-1].generation)) is not None:
            self.line.append(newer)
        if is_read_by_enough(store, self.line, self.settled, self.tolerate):
            self.settled = self.line[-1].generation
            self.values[key("settled", self.settled)] = ""
        return True


class Local:
    """A store as whoever is beside it reaches it."""

    def __init__(self, values: dict[str, str]) -> None:
        self.values = values

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.values.setdefault(key, desired).encode()

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])


class Cluster:
    """Machine i has node i; the first store is on one of them, or on a machine more."""

    def __init__(self, rng: Random, tolerate: int) -> None:
        self.rng, self.tolerate, self.now = rng, tolerate, 100.0
        machines = range(NUM_NODES + 1)
        self.lost = [False for _ in machines]
        self.held_until = [0.0 for _ in machines]
        self.side = [0 for _ in machines]
        """Machines reach those on the same side of a cut."""
        self.loss_rate = 0.0
        """Of connections, in the middle of what is done over them."""
        home = rng.randrange(NUM_NODES + 1)
        self.first = (f"machine{home}", 1)
        store = {RUN_KEY: RUN, MOVES: "", OPEN: str(NUM_NODES), key("membership", 1): FIRST.to_json()}
        self.keepings: dict[Address, Keeping] = {
            self.first: Keeping(self.first, FIRST_TERM, tolerate, self.now, [FIRST], values=store)
        }

    def home(self, address: Address) -> int:
        return int(address[0].removeprefix("machine"))

    def is_up(self, machine: int) -> bool:
        return not self.lost[machine] and self.held_until[machine] <= self.now

    def values(self, node: int, address: Address) -> dict[str, str] | None:
        keeping, home = self.keepings.get(address), self.home(address)
        if keeping is None or not self.is_up(home) or self.side[node] != self.side[home]:
            return None
        return keeping.values

    def keep_stores(self) -> None:
        for address, keeping in list(self.keepings.items()):
            if self.is_up(self.home(address)) and not keeping.round(self.now, self.rng):
                del self.keepings[address]

    def storm(self) -> None:
        """Something happens."""
        rng, machines = self.rng, range(NUM_NODES + 1)
        what = rng.choice(["lost", "held", "cut", "cut", "healed", "healed", "store", "store"])
        stores = [self.home(address) for address in self.keepings]
        machine = rng.choice([*machines, *stores])
        if what == "lost" and sum(self.lost) < 2:
            self.lost[machine] = True
        elif what == "held":
            self.held_until[machine] = self.now + rng.choice([0.5, 3.0, 12.0, 25.0, 60.0])
        elif what == "cut":
            some = rng.sample(machines, rng.randrange(1, NUM_NODES))
            self.side = [int(machine in some) for machine in machines]
        elif what == "healed":
            self.side = [0 for _ in machines]
        elif what == "store" and self.keepings:
            keeping = self.keepings[rng.choice(list(self.keepings))]
            keeping.values, keeping.back_at = None, self.now + rng.choice([0.1, 1.0, 4.0])


class Client(Local):
    """One node's."""

    def __init__(self, cluster: Cluster, node: int) -> None:
        self._cluster, self._node, self.address = cluster, node, cluster.first
        self._connected: dict[str, str] | None = None

    def connect(self, address: Address | None = None) -> None:
        self.address = address or self.address
        self._connected = self._cluster.values(self._node, self.address)
        if self._connected is None:
            raise StoreLostError("nobody listens")

    @property
    def values(self) -> dict[str, str]:  # type: ignore[override]
        is_cut = self._cluster.rng.random() < self._cluster.loss_rate
        if is_cut or self._connected is None or self._cluster.values(self._node, self.address) is not self._connected:
            self._connected = None
            raise StoreLostError("lost")
        return self._connected


class Standby:
    def __init__(self, cluster: Cluster, node: int) -> None:
        self._cluster, self.address = cluster, (f"machine{node}", 2)

    @property
    def is_free(self) -> bool:
        return self.address not in self._cluster.keepings

    def begin(self, term: Term, run: bytes) -> None:
        assert run == RUN.encode()
        self._cluster.keepings[self.address] = Keeping(self.address, term, self._cluster.tolerate, self._cluster.now)


@contextmanager
def counted_time(cluster: Cluster) -> Iterator[None]:
    clock = SimpleNamespace(monotonic=lambda: cluster.now, time=lambda: cluster.now)
    modules = (agent_module, reunion_module, whereabouts_module)
    patches = [mock.patch.object(module, "time", clock) for module in modules]
    for patch in patches:
        patch.start()
    yield
    for patch in patches:
        patch.stop()


def called(agent: NodeAgent) -> Membership | None:
    """Under which its processes work."""
    reunion = agent._failover
    return next((m for m in reunion.known if m.generation == reunion.called_in), None)


@dataclass
class Story:
    """What has come of it."""

    trained: list[Membership] = field(default_factory=list)
    """Under which all its nodes worked at one time."""
    num_stores: int = 1
    left: set[int] = field(default_factory=set)
    ends: dict[int, str | None] = field(default_factory=dict)

    def look(self, agents: Sequence[NodeAgent]) -> None:
        now = {node: called(agent) for node, agent in enumerate(agents) if node not in self.ends}
        for membership in {m for m in now.values() if m is not None}:
            if any(now.get(node) != membership for node in membership.nodes):
                continue
            if self.trained and membership == self.trained[-1]:
                continue
            assert not self.trained or membership.generation > self.trained[-1].generation, (membership, self.trained)
            self.trained.append(membership)


def tell_story(rng: Random, *, is_stormy: bool = True, losses: Sequence[int] = (), tolerate: int = 1) -> Story:
    """`losses`: machines that are lost at the beginning, counted from the store's."""
    cluster, story = Cluster(rng, tolerate), Story()
    event_rate, loss_rate = rng.choice([0.004, 0.01, 0.05]), rng.choice([0.0, 0.0003])
    agents = []
    with counted_time(cluster):
        for node in range(NUM_NODES):
            standby = Standby(cluster, node)
            agents.append(
                NodeAgent(
                    node, Client(cluster, node), (), successor, DETECT_S, PATIENCE_S, tolerate=tolerate, standby=standby
                )
            )
        for tick in range(STORMY_TICKS + QUIET_TICKS):
            cluster.now += TICK_S
            if is_stormy and 20 < tick < STORMY_TICKS:
                cluster.loss_rate = loss_rate
                if rng.random() < event_rate:
                    cluster.storm()
            elif tick == 40:
                for machine in losses:
                    cluster.lost[(cluster.home(cluster.first) + machine) % (NUM_NODES + 1)] = True
            elif tick == STORMY_TICKS:
                cluster.loss_rate = 0.0
                cluster.side = [0 for _ in cluster.side]
                cluster.held_until = [0.0 for _ in cluster.side]
            cluster.keep_stores()
            for node in rng.sample(range(NUM_NODES), NUM_NODES):
                if node not in story.ends and cluster.is_up(node) and agents[node].is_over():
                    story.ends[node] = agents[node]._end_reason
                if rng.random() < 0.1:
                    cluster.keep_stores()
            story.ends |= {node: "lost" for node in range(NUM_NODES) if cluster.lost[node]}
            story.look(agents)
    story.left = {*range(NUM_NODES)} - story.ends.keys()
    story.num_stores = len(cluster.keepings)
    working = {called(agents[node]) for node in story.left}
    assert all(m is not None and {*m.nodes} == story.left for m in working), (story, working)
    return story


@pytest.mark.parametrize("losses", [(0,), (0, 1), (0, 3), (2,)])
@pytest.mark.parametrize("seed", range(3))
def test_whoever_is_left_goes_on(losses: tuple[int, ...], seed: int) -> None:
    """The store's machine is lost, or others."""
    story = tell_story(Random(seed), is_stormy=False, losses=losses)
    lost = {node for node, why in story.ends.items() if why == "lost"}
    assert story.ends.keys() == lost
    assert story.trained[-1].nodes == tuple(sorted(story.left))


@pytest.mark.parametrize("seed", range(12))
def test_one_sequence(seed: int) -> None:
    tell_story(Random(seed), tolerate=1 + seed % 2)


@pytest.mark.campaign
def test_one_sequence_often() -> None:
    for i in range(1000):
        seed = f"{SEED}/{i}"
        try:
            tell_story(Random(seed), tolerate=1 + i % 2)
        except BaseException as error:
            error.add_note(f"tell_story(Random({seed!r}), tolerate={1 + i % 2})")
            raise
