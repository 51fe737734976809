"""How long messages, reductions and resharding take: from the cluster's links, or fitted to measurements."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from motet.cluster.cluster import Cluster
from motet.costs.communication import collective_terms
from motet.costs.cost_model import CostTable, LinkCost

BUCKET_BYTES = 25 * 2**20
"""Gradients are summed in flat buckets of this size (a larger parameter has one of its own); each pays the latency."""


def message_seconds(table: CostTable, cluster: Cluster, sender: int, receiver: int, num_bytes: float) -> float:
    """Measured links stand for all of the cluster's."""
    if table.message is not None:
        return table.message.seconds(num_bytes)
    return cluster.link(sender, receiver).seconds(num_bytes)


def all_reduce_seconds(table: CostTable, cluster: Cluster, ranks: Sequence[int], num_bytes: float) -> float:
    """Over these ranks, bucket by bucket.

    A measured all-reduce is one of two ranks: 2 steps, with half of the bytes each; of more ranks, a ring of them."""
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
    """Of (sender, receiver, bytes) that all begin together, as between modules with unlike groups.

    What takes longest counts: what one device sends or receives over its own link, or what the network cards of one
    node send or receive. Bytes that stay on their rank are free."""
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
    """Least squares of the relative error, with neither latency nor bandwidth below zero.

    Raises `ValueError` with fewer than two different sizes."""
    from scipy.optimize import nnls

    if len(set(num_bytes)) < 2:
        raise ValueError("a link needs measurements of at least two sizes")
    sizes, times = np.asarray(num_bytes, dtype=float), np.asarray(seconds, dtype=float)
    (latency_s, s_per_byte), _ = nnls(np.stack([1 / times, sizes / times], axis=1), np.ones(len(times)))
    return LinkCost(latency_s=float(latency_s), bytes_per_s=1 / max(float(s_per_byte), 1e-15))
