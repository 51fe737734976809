"""Agents whose store is lost again and again, who are cut off from it and held up: never are two memberships trained
under at once, and in the end all that are left are in one.

Time is counted, not waited for. The store's keeper knows the first membership alone here: the agents write again
what was in it.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
)
from motet.resilience.membership import (
    RUN as RUN_KEY,
)
from motet.resilience.store import store_failover as reunion_module
from motet.resilience.store.store_failover import StoreDiscovery, StoreFailover

SEED = os.environ.get("MOTET_CHAOS_SEED") or str(time.time_ns())
NUM_NODES = 4
TICK_S = 0.05
DETECT_S = 1.0
PATIENCE_S = 3.0
NUM_TICKS = 500
QUIET_TICKS = 250
FIRST = Membership(generation=FIRST_GENERATION, nodes=tuple(range(NUM_NODES)), num_admitted=NUM_NODES, plan="")


def successor(membership: Membership, changes: Sequence[Change]) -> Membership:
    """Any node could go on by itself."""
    gone = {change.node for change in changes if change.kind == "lost"}
    nodes = tuple(node for node in membership.nodes if node not in gone)
    following = replace(membership, generation=membership.generation + 1, nodes=nodes, changes=tuple(changes))
    return replace(following, saves_checkpoint=bool(nodes))


class Cluster:
    """What there is now: the time, a store or none, and who is cut off from it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store: dict[str, str] | None = {
            RUN_KEY: "a run",
            OPEN: str(NUM_NODES),
            key("membership", 1): FIRST.to_json(),
        }
        self.cut_until = [0.0] * NUM_NODES
        self.held_up_until = [0.0] * NUM_NODES
        self.store_back_at = 0.0
        self._newest = FIRST_GENERATION

    def lose_store(self, rng: Random) -> None:
        self.store = None
        self.store_back_at = self.now + rng.choice([0.0, 0.1, 0.5, 2.0])
        if rng.random() < 0.3:  # As where a link is cut, and the store was beyond it.
            for node in rng.sample(range(NUM_NODES), rng.randrange(NUM_NODES)):
                self.cut_until[node] = self.now + 4 * rng.random()
        for node in rng.sample(range(NUM_NODES), rng.randrange(NUM_NODES)):
            self.held_up_until[node] = self.now + 1.5 * rng.random()

    def has_new_membership(self) -> bool:
        """Since this was last asked."""
        if self.store is None or key("membership", self._newest + 1) not in self.store:
            return False
        self._newest += 1
        return True


class Client:
    """One node's. It loses the store when that is another one than it has connected to."""

    def __init__(self, cluster: Cluster, node: int) -> None:
        self._cluster, self._node = cluster, node
        self._connected: dict[str, str] | None = None

    address = ("here", 1)

    def connect(self, address: Address | None = None) -> None:
        self._connected = self._cluster.store
        self._values()

    def _values(self) -> dict[str, str]:
        is_cut = self._cluster.cut_until[self._node] > self._cluster.now
        if is_cut or self._connected is None or self._connected is not self._cluster.store:
            raise StoreLostError("lost")
        return self._connected

    def check(self, keys: list[str]) -> bool:
        values = self._values()
        return all(key in values for key in keys)

    def get(self, key: str) -> bytes:
        return self._values()[key].encode()

    def set(self, key: str, value: str) -> None:
        self._values()[key] = value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._values().setdefault(key, desired).encode()

    def add(self, key: str, amount: int) -> int:
        values = self._values()
        values[key] = str(int(values.get(key, "0")) + amount)
        return int(values[key])


@contextmanager
def counted_time(cluster: Cluster) -> Iterator[None]:
    clock = SimpleNamespace(monotonic=lambda: cluster.now, time=lambda: cluster.now)
    with mock.patch.object(agent_module, "time", clock), mock.patch.object(reunion_module, "time", clock):
        yield


def trained_under(agents: Sequence[NodeAgent], ended: set[int]) -> set[Membership]:
    """All whose nodes are there and know nothing newer."""
    newest = {node: agent.membership for node, agent in enumerate(agents) if node not in ended}
    return {m for m in newest.values() if m is not None and all(newest.get(node) == m for node in m.nodes)}


def test_who_comes_back_last_brings_a_newer_membership() -> None:
    """While another agent looks who is back: numbers are given from what the newer one says."""
    cluster = Cluster()
    cluster.store = {
        RUN_KEY: "a run",
        key("membership", 1): FIRST.to_json(),
        **{key("back", node): "" for node in (1, 2)},
    }
    newer = replace(FIRST, generation=2, num_admitted=NUM_NODES + 1)

    class Watching(Client):
        def check(self, keys: list[str]) -> bool:
            if keys == [key("back", 3)] and cluster.store is not None:
                cluster.store |= {key("membership", 2): newer.to_json(), key("back", 3): ""}
            return super().check(keys)

    agent = NodeAgent(0, Watching(cluster, 0), (), successor, DETECT_S, PATIENCE_S)
    agent._failover.away_since = cluster.now
    with counted_time(cluster):
        for _ in range(4):
            agent.is_over()
    assert agent.membership == newer
    assert cluster.store[OPEN] == str(NUM_NODES + 1)


def test_a_store_that_is_started_again_while_others_are_asked_is_told_what_is_known() -> None:
    """Nothing is proposed in it before."""
    cluster = Cluster()
    client = Client(cluster, 0)
    reunion = StoreFailover(client, successor, DETECT_S, PATIENCE_S, 1, StoreDiscovery(None, DETECT_S))
    with counted_time(cluster):
        assert reunion.come_back(0) == 0
        assert not reunion.others_continued(0)
        cluster.store = {RUN_KEY: "a run", key("membership", 1): FIRST.to_json()}
        with pytest.raises(StoreLostError, match="another one has taken its place"):
            reunion.others_continued(0)


@pytest.mark.parametrize("seed", range(30))
def test_one_membership_at_a_time(seed: int) -> None:
    check_one_membership_at_a_time(Random(seed))


@pytest.mark.campaign
def test_one_membership_at_a_time_often() -> None:
    for i in range(1000):
        seed = f"{SEED}/{i}"
        try:
            check_one_membership_at_a_time(Random(seed))
        except BaseException as error:
            error.add_note(f"check_one_membership_at_a_time(Random({seed!r}))")
            raise


def check_one_membership_at_a_time(rng: Random) -> None:
    cluster = Cluster()
    agents = [NodeAgent(node, Client(cluster, node), (), successor, DETECT_S, PATIENCE_S) for node in range(NUM_NODES)]
    for agent in agents:
        agent._last_round = agent._failover.away_since = cluster.now
    ended = set[int]()
    with counted_time(cluster):
        for tick in range(NUM_TICKS + QUIET_TICKS):
            cluster.now += TICK_S
            is_quiet = tick >= NUM_TICKS
            if not is_quiet and rng.random() < 0.02:
                cluster.lose_store(rng)
            if cluster.store is None and cluster.now >= cluster.store_back_at:
                cluster.store = {RUN_KEY: "a run", key("membership", 1): FIRST.to_json()}
            for node in rng.sample(range(NUM_NODES), NUM_NODES):
                if not is_quiet and rng.random() < 0.003:
                    cluster.cut_until[node] = cluster.now + rng.choice([0.1, 1.0, 2.5, 4.0, 8.0])
                if not is_quiet and rng.random() < 0.003:
                    cluster.held_up_until[node] = cluster.now + rng.choice([0.1, 0.8, 2.0])
                if node not in ended and cluster.held_up_until[node] <= cluster.now and agents[node].is_over():
                    ended.add(node)
                if not is_quiet and cluster.has_new_membership() and rng.random() < 0.4:
                    cluster.lose_store(rng)  # Some have read it, others have not.
            assert len(trained_under(agents, ended)) <= 1
        left = set(range(NUM_NODES)) - ended
        assert [set(m.nodes) for m in trained_under(agents, ended)] == ([left] if left else [])
