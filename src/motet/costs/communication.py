"""How long collectives over a group of ranks take, by algorithm and topology.

Every collective is latency + bytes / bandwidth, bytes being those of one rank's whole tensor (the result of an
all-gather, the argument of a reduce-scatter). Two algorithms are known and the quicker one counts, as NCCL chooses:

* ring: n - 1 steps (twice that for an all-reduce), each with an n-th of the bytes over the slowest link of the ring;
* hierarchical: within the nodes, and between them in as many rings at once as a node has ranks of the group, each with
  its share of the bytes (a two-dimensional ring: Mikami et al. 2018).

While one group communicates, so do its sisters on the same nodes (there is one group for each tensor-parallel rank, and
so on): network cards are shared by all devices of a node.

Limits: no reduction in switches, no trees for small messages, groups that fill their nodes unequally count as rings.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from motet.cluster.cluster import Cluster

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


@dataclass(frozen=True, slots=True)
class Terms:
    """latency + bytes / bandwidth."""

    latency_s: float
    bytes_per_s: float
    algorithm: Literal["none", "ring", "hierarchical"]

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


NOTHING = Terms(0.0, float("inf"), "none")


def collective_terms(cluster: Cluster, collective: Collective, ranks: Sequence[int], num_bytes: float = 1e8) -> Terms:
    """Of the quicker algorithm for tensors of about so many bytes."""
    members = tuple(dict.fromkeys(ranks))
    if len(members) < 2:
        return NOTHING
    choices = [ring_terms(cluster, collective, members)]
    hierarchical = hierarchical_terms(cluster, collective, members)
    if hierarchical is not None:
        choices.append(hierarchical)
    return min(choices, key=lambda terms: terms.seconds(num_bytes))


def collective_seconds(cluster: Cluster, collective: Collective, ranks: Sequence[int], num_bytes: float) -> float:
    """`num_bytes`: of one rank's whole tensor."""
    return collective_terms(cluster, collective, ranks, num_bytes).seconds(num_bytes) if num_bytes else 0.0


def ring_terms(cluster: Cluster, collective: Collective, ranks: Sequence[int]) -> Terms:
    """A ring enters and leaves each node once, through one network card, which the sister groups share."""
    per_node = Counter(cluster.node(rank) for rank in ranks)
    if len(per_node) == 1:
        link = cluster.within_node
        return _ring(collective, len(ranks), link.latency_s, link.bytes_per_s)
    num_sisters = max(1, cluster.devices_per_node // max(per_node.values()))
    outside = cluster.between_nodes.bytes_per_s * min(1.0, cluster.num_nics / num_sisters)
    slowest = min(outside, cluster.within_node.bytes_per_s) if max(per_node.values()) > 1 else outside
    return _ring(collective, len(ranks), cluster.between_nodes.latency_s, slowest)


def hierarchical_terms(cluster: Cluster, collective: Collective, ranks: Sequence[int]) -> Terms | None:
    """None where the group has one rank on each node, or lies within one, or fills its nodes unequally."""
    per_node = Counter(cluster.node(rank) for rank in ranks)
    counts = set(per_node.values())
    if len(per_node) == 1 or len(counts) != 1 or counts == {1} or collective in ("all_to_all", "broadcast"):
        return None
    (num_inside,) = counts
    inside = _ring(collective, num_inside, cluster.within_node.latency_s, cluster.within_node.bytes_per_s)
    # All devices of a node send at once, each an own share of the tensor.
    outside = _ring(collective, len(per_node), cluster.between_nodes.latency_s, cluster.network_bytes_per_s)
    s_per_byte = 1 / inside.bytes_per_s + 1 / outside.bytes_per_s / num_inside
    return Terms(inside.latency_s + outside.latency_s, 1 / s_per_byte, "hierarchical")


def _ring(collective: Collective, num_ranks: int, latency_s: float, bytes_per_s: float) -> Terms:
    steps = num_ranks - 1
    if collective == "broadcast":
        # Cut into pieces, the tensor passes every link once.
        return Terms(steps * latency_s, bytes_per_s, "ring")
    rounds = 2 if collective == "all_reduce" else 1
    share = rounds * steps / num_ranks
    return Terms(rounds * steps * latency_s, bytes_per_s / share, "ring")
