"""How long messages and reductions take: latency + bytes / bandwidth, from the cluster or fitted to measurements."""

from collections.abc import Sequence

import numpy as np

from motet.cluster import Cluster
from motet.costs.cost_model import CostTable, LinkCost

BUCKET_BYTES = 25 * 2**20
"""Gradients are summed in flat buckets of this size; each pays the latency."""


def message_seconds(table: CostTable, cluster: Cluster, sender: int, receiver: int, num_bytes: float) -> float:
    """Measured links stand for all of the cluster's."""
    if table.message is not None:
        return table.message.seconds(num_bytes)
    link = cluster.link(sender, receiver)
    return link.latency_s + num_bytes / link.bytes_per_s


def all_reduce_seconds(table: CostTable, cluster: Cluster, ranks: Sequence[int], num_bytes: float) -> float:
    """A ring over these ranks: 2 (n - 1) steps with an n-th of the bytes each, for every bucket.

    A measured all-reduce is one of two ranks: 2 steps, with half of the bytes each."""
    num_ranks = len(ranks)
    if num_ranks < 2 or not num_bytes:
        return 0.0
    num_steps = 2 * (num_ranks - 1)
    num_buckets = max(1, -(-int(num_bytes) // BUCKET_BYTES))
    if table.all_reduce is not None:
        per_step = table.all_reduce.latency_s / 2
        volume = num_bytes * num_steps / num_ranks
        return num_buckets * num_steps * per_step + volume / table.all_reduce.bytes_per_s
    link = cluster.slowest_link(tuple(ranks))
    return num_buckets * num_steps * link.latency_s + num_bytes * num_steps / num_ranks / link.bytes_per_s


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> LinkCost:
    """Least squares of the relative error, with neither latency nor bandwidth below zero.

    Raises `ValueError` with fewer than two different sizes."""
    from scipy.optimize import nnls

    if len(set(num_bytes)) < 2:
        raise ValueError("a link needs measurements of at least two sizes")
    sizes, times = np.asarray(num_bytes, dtype=float), np.asarray(seconds, dtype=float)
    (latency_s, s_per_byte), _ = nnls(np.stack([1 / times, sizes / times], axis=1), np.ones(len(times)))
    return LinkCost(latency_s=float(latency_s), bytes_per_s=1 / max(float(s_per_byte), 1e-15))
