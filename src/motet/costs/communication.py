"""Seconds of collectives by algorithm and topology, and of messages, gradient reductions and resharding.

A collective takes latency + bytes / bandwidth, where bytes are those of one rank's whole tensor (the result of an
all-gather, the argument of a reduce-scatter). The faster one of two algorithms counts, as NCCL chooses:

* ring: n - 1 steps (twice that for an all-reduce), each with an n-th of the bytes over the slowest link of the ring;
* hierarchical: within the nodes, and between them in as many rings at once as a node has ranks of the group, each with
  its share of the bytes (a two-dimensional ring: Mikami et al. 2018).

Between nodes an all-reduce goes through a ring or, where that has less latency, a double binary tree (Sanders et al.
2009), in which each node sends and receives twice the tensor.

Groups of the same kind on the same nodes (one for each tensor-parallel rank, for example) communicate at the same time
and share the network cards of a node.

Where a profile has measured a collective of two ranks of a node, larger groups within a node are rings of such steps
(`with_measured_links`).

Limits: no reduction in switches; groups that fill their nodes unequally count as rings.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, log2
from typing import Literal

import numpy as np

from motet.cluster import Cluster, Link
from motet.costs.cost_model import CostTable, LinkCost
from motet.schedule.communicators import Communicators

NCCL_BUFFER_BYTES = 4 * 2**20 + 512 * 2**10 + 4_915_200
"""What a rank keeps for one channel on which it receives: NCCL's buffers for its protocols Simple, LL and LL128, of
their usual sizes (NCCL_BUFFSIZE, NCCL_LL_BUFFSIZE, NCCL_LL128_BUFFSIZE)."""
NCCL_CHANNELS = 16
"""Channels of a communicator, assumed: NCCL chooses 2 to 32 by the machine's links."""

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a collective's time: latency + bytes / bandwidth."""

    latency_s: float
    bytes_per_s: float
    algorithm: Literal["none", "ring", "tree", "hierarchical"]

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


NOTHING = Terms(0.0, float("inf"), "none")


MANY_BYTES = 1e15
"""A size of tensors at which latencies do not matter."""


def communicator_bytes(needed: Communicators, num_ranks: int) -> list[int]:
    """Device memory of each rank's NCCL communicators: receive buffers of the rings of its groups and of the links on
    which it receives. Computed, not measured."""
    per_ring = NCCL_CHANNELS * NCCL_BUFFER_BYTES
    groups, links = needed.groups_by_rank(num_ranks), needed.links_by_rank(num_ranks)
    return [per_ring * (of_groups + received) for of_groups, (_, received) in zip(groups, links, strict=True)]


def collective_terms(cluster: Cluster, collective: Collective, ranks: Sequence[int], num_bytes: float = 1e8) -> Terms:
    """Terms of the faster algorithm for tensors of about `num_bytes`."""
    members = tuple(dict.fromkeys(ranks))
    if len(members) < 2:
        return NOTHING
    measured = cluster.collectives.get(collective)
    if measured is not None and len({cluster.node(rank) for rank in members}) == 1:
        # Two ranks take one step with half of the bytes.
        num_steps = len(members) - 1
        return Terms(num_steps * measured.latency_s, measured.bytes_per_s * len(members) / num_steps / 2, "ring")
    choices = [ring_terms(cluster, collective, members)]
    tree = tree_terms(cluster, collective, members)
    if tree is not None:
        choices.append(tree)
    hierarchical = hierarchical_terms(cluster, collective, members, num_bytes)
    if hierarchical is not None:
        choices.append(hierarchical)
    return min(choices, key=lambda terms: terms.seconds(num_bytes))


def collective_seconds(cluster: Cluster, collective: Collective, ranks: Sequence[int], num_bytes: float) -> float:
    """`num_bytes`: of one rank's whole tensor."""
    return collective_terms(cluster, collective, ranks, num_bytes).seconds(num_bytes) if num_bytes else 0.0


def gather_s_per_byte(cluster: Cluster, num_ranks: int, most_in_node: int) -> float:
    """Least seconds per byte of an all-gather over so many ranks, wherever they are, but at most so many of them on a
    node."""
    if num_ranks < 2:
        return 0.0
    fastest = 0.0
    # How the ranks are divided among nodes matters only by the most on a node, and by whether all nodes have as many.
    for in_node in range(1, min(num_ranks, most_in_node) + 1):
        ranks = [i // in_node * cluster.devices_per_node + i % in_node for i in range(num_ranks)]
        fastest = max(fastest, collective_terms(cluster, "all_gather", ranks, MANY_BYTES).bytes_per_s)
    return 1 / fastest


def ring_terms(cluster: Cluster, collective: Collective, ranks: Sequence[int]) -> Terms:
    """Terms of a ring, which enters and leaves each node once, through a network card that parallel groups share."""
    per_node = Counter(cluster.node(rank) for rank in ranks)
    if len(per_node) == 1:
        link = cluster.within_node
        return _ring(collective, len(ranks), link.latency_s, link.bytes_per_s)
    num_sisters = max(1, cluster.devices_per_node // max(per_node.values()))
    outside = cluster.between_nodes.bytes_per_s * min(1.0, cluster.num_nics / num_sisters)
    slowest = min(outside, cluster.within_node.bytes_per_s) if max(per_node.values()) > 1 else outside
    return _ring(collective, len(ranks), cluster.between_nodes.latency_s, slowest)


def tree_terms(cluster: Cluster, collective: Collective, ranks: Sequence[int]) -> Terms | None:
    """Terms of a double binary tree over nodes, for an all-reduce of groups with one rank on each of several nodes."""
    per_node = Counter(cluster.node(rank) for rank in ranks)
    if collective != "all_reduce" or len(per_node) == 1 or set(per_node.values()) != {1}:
        return None
    return _tree(len(per_node), cluster.between_nodes.latency_s, cluster.network_bytes_per_s)


def hierarchical_terms(
    cluster: Cluster, collective: Collective, ranks: Sequence[int], num_bytes: float = 1e8
) -> Terms | None:
    """Terms within and between nodes; None if the group has one rank per node, one node, or unequal nodes."""
    per_node = Counter(cluster.node(rank) for rank in ranks)
    counts = set(per_node.values())
    if len(per_node) == 1 or len(counts) != 1 or counts == {1} or collective in ("all_to_all", "broadcast"):
        return None
    (num_inside,) = counts
    inside = _ring(collective, num_inside, cluster.within_node.latency_s, cluster.within_node.bytes_per_s)
    # All devices of a node send at the same time, each its share of the tensor.
    outside = _ring(collective, len(per_node), cluster.between_nodes.latency_s, cluster.network_bytes_per_s)
    if collective == "all_reduce":
        tree = _tree(len(per_node), cluster.between_nodes.latency_s, cluster.network_bytes_per_s)
        outside = min(outside, tree, key=lambda terms: terms.seconds(num_bytes / num_inside))
    s_per_byte = 1 / inside.bytes_per_s + 1 / outside.bytes_per_s / num_inside
    return Terms(inside.latency_s + outside.latency_s, 1 / s_per_byte, "hierarchical")


def _ring(collective: Collective, num_ranks: int, latency_s: float, bytes_per_s: float) -> Terms:
    steps = num_ranks - 1
    if collective == "broadcast":
        # The tensor passes every link once, in pieces.
        return Terms(steps * latency_s, bytes_per_s, "ring")
    rounds = 2 if collective == "all_reduce" else 1
    share = rounds * steps / num_ranks
    return Terms(rounds * steps * latency_s, bytes_per_s / share, "ring")


def _tree(num_nodes: int, latency_s: float, bytes_per_s: float) -> Terms:
    """An all-reduce up and down two trees, each for half of the tensor."""
    return Terms(2 * ceil(log2(num_nodes)) * latency_s, bytes_per_s / 2, "tree")


BUCKET_BYTES = 25 * 2**20
"""Gradients are summed in flat buckets of this size (a larger parameter has one of its own); each pays the latency."""


def message_link(table: CostTable, cluster: Cluster, sender: int, receiver: int) -> Link | LinkCost:
    """The link that messages between these ranks take; a measured one stands for all of the cluster's."""
    return table.message or cluster.link(sender, receiver)


def with_measured_links(cluster: Cluster, table: CostTable) -> Cluster:
    """The cluster with the links that the table measured between ranks of a node."""
    links = {name: Link(name=name, **asdict(link)) for name, link in table.collectives.items()}
    if table.message is None:
        return replace(cluster, collectives=links)
    return replace(cluster, within_node=Link(name="measured", **asdict(table.message)), collectives=links)


def all_reduce_seconds(table: CostTable, cluster: Cluster, ranks: Sequence[int], num_bytes: float) -> float:
    """Seconds of an all-reduce over these ranks, bucket by bucket.

    A measured all-reduce has two ranks: 2 steps with half of the bytes each. More ranks form a ring of such steps."""
    num_ranks = len(ranks)
    if num_ranks < 2 or not num_bytes:
        return 0.0
    num_buckets = max(1, -(-int(num_bytes) // BUCKET_BYTES))
    if table.all_reduce is not None:
        num_steps = 2 * (num_ranks - 1)
        volume = num_bytes * num_steps / num_ranks
        return num_buckets * num_steps * table.all_reduce.latency_s / 2 + volume / table.all_reduce.bytes_per_s
    terms = collective_terms(cluster, "all_reduce", ranks, min(num_bytes, BUCKET_BYTES))
    return num_buckets * terms.latency_s + num_bytes / terms.bytes_per_s


def resharding_seconds(cluster: Cluster, transfers: Iterable[tuple[int, int, float]]) -> float:
    """Seconds of transfers (sender, receiver, bytes) that begin together, as between modules with different groups.

    The busiest link counts: that of one device or the network cards of one node. Bytes that stay on a rank are free."""
    inside: dict[tuple[str, int], float] = defaultdict(float)
    outside: dict[tuple[str, int], float] = defaultdict(float)
    nodes: dict[tuple[str, int], float] = defaultdict(float)
    latency_s = 0.0
    for sender, receiver, num_bytes in transfers:
        if sender == receiver or not num_bytes:
            continue
        link = cluster.link(sender, receiver)
        latency_s = max(latency_s, link.latency_s)
        crosses = cluster.node(sender) != cluster.node(receiver)
        for way, rank in (("out", sender), ("in", receiver)):
            (outside if crosses else inside)[way, rank] += num_bytes
            if crosses:
                nodes[way, cluster.node(rank)] += num_bytes
    within, between = cluster.within_node.bytes_per_s, cluster.between_nodes.bytes_per_s
    return latency_s + max(
        [
            *(num_bytes / within for num_bytes in inside.values()),
            *(num_bytes / between for num_bytes in outside.values()),
            *(num_bytes / (between * cluster.num_nics) for num_bytes in nodes.values()),
            0.0,
        ]
    )


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> LinkCost:
    """Fits a link by least squares of the relative error, with non-negative latency and bandwidth.

    Raises `ValueError` with fewer than two different sizes."""
    from scipy.optimize import nnls

    if len(set(num_bytes)) < 2:
        raise ValueError("a link needs measurements of at least two sizes")
    sizes, times = np.asarray(num_bytes, dtype=float), np.asarray(seconds, dtype=float)
    (latency_s, s_per_byte), _ = nnls(np.stack([1 / times, sizes / times], axis=1), np.ones(len(times)))
    return LinkCost(latency_s=float(latency_s), bytes_per_s=1 / max(float(s_per_byte), 1e-15))
