"""Collectives against rings walked step by step, by hand, and within bounds that no algorithm can beat."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.cluster import Cluster, Link, cluster_from_dict
from motet.costs.communication import (
    collective_seconds,
    collective_terms,
    hierarchical_terms,
    resharding_seconds,
    ring_terms,
    tree_terms,
)

A800 = cluster_from_dict(
    {
        "num_devices": 16,
        "devices_per_node": 8,
        "device": "a800",
        "within_node": {"latency_s": 3e-6, "bytes_per_s": 200e9},
        "between_nodes": {"latency_s": 10e-6, "bytes_per_s": 25e9},
        "nics_per_node": 4,
    }
)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


@st.composite
def groups(draw) -> tuple[Cluster, tuple[int, ...], int]:
    """A cluster, and one of the equal groups into which a stride cuts all its devices."""
    num_nodes, per_node = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4, 8]))
    stride = draw(st.sampled_from([s for s in (1, 2, 4, 8) if s <= per_node]))
    cluster = replace(
        A800,
        num_devices=num_nodes * per_node,
        devices_per_node=per_node,
        nics_per_node=draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= per_node])),
        within_node=Link(name="in", latency_s=1e-6, bytes_per_s=draw(st.sampled_from([5e9, 100e9]))),
    )
    return cluster, tuple(range(0, cluster.num_devices, stride)), stride


def walk_ring(cluster: Cluster, stride: int, num_steps: int, num_bytes: float) -> float:
    """All sister groups at once; in every step every rank sends one piece to the next of its ring."""
    rings = [range(first, cluster.num_devices, stride) for first in range(stride)]
    size = len(rings[0])
    piece, seconds = num_bytes / size, 0.0
    for _ in range(num_steps):
        times, leaving = [], [0.0] * cluster.num_nodes
        for ring in rings:
            for place, rank in enumerate(ring):
                other = ring[(place + 1) % size]
                times.append(piece / cluster.link(rank, other).bytes_per_s)
                if cluster.node(rank) != cluster.node(other):
                    leaving[cluster.node(rank)] += piece
        times += [sent / (cluster.between_nodes.bytes_per_s * cluster.num_nics) for sent in leaving]
        latency = cluster.between_nodes if cluster.num_nodes > 1 else cluster.within_node
        seconds += latency.latency_s + max(times)
    return seconds


@given(groups(), st.sampled_from(COLLECTIVES), st.floats(1, 1e9))
def test_rings_are_walked_step_by_step(group, collective, num_bytes):
    cluster, ranks, stride = group
    if len(ranks) == 1:
        assert collective_seconds(cluster, collective, ranks, num_bytes) == 0
        return
    num_steps = (len(ranks) - 1) * (2 if collective == "all_reduce" else 1)
    expected = walk_ring(cluster, stride, num_steps, num_bytes)
    assert ring_terms(cluster, collective, ranks).seconds(num_bytes) == pytest.approx(expected)


@given(groups(), st.sampled_from(COLLECTIVES), st.floats(1, 1e9))
def test_the_quicker_algorithm_counts_and_beats_no_bound(group, collective, num_bytes):
    cluster, ranks, stride = group
    chosen = collective_seconds(cluster, collective, ranks, num_bytes)
    if len(ranks) == 1:
        return
    every = [
        ring_terms(cluster, collective, ranks),
        tree_terms(cluster, collective, ranks),
        hierarchical_terms(cluster, collective, ranks, num_bytes),
    ]
    assert chosen == min(terms.seconds(num_bytes) for terms in every if terms)
    # Each node's share of the result must come from the others, over its cards, for all sister groups.
    times = 2 if collective == "all_reduce" else 1
    crossing = times * (cluster.num_nodes - 1) / cluster.num_nodes * num_bytes * stride
    assert chosen >= crossing / (cluster.between_nodes.bytes_per_s * cluster.num_nics) * (1 - 1e-9)


@given(groups())
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(group):
    cluster, ranks, _ = group
    one, *two = (collective_seconds(cluster, kind, ranks, 1e8) for kind in COLLECTIVES)
    assert one == pytest.approx(sum(two))


def test_hierarchical_by_hand():
    """16 ranks on 2 nodes: 7 + 7 steps inside, and 8 rings of 2 ranks at half a card each."""
    terms = hierarchical_terms(A800, "all_reduce", range(16))
    num_bytes = 1.6e9
    inside = 14 * (3e-6 + num_bytes / 8 / 200e9)
    outside = 2 * (10e-6 + num_bytes / 16 / 12.5e9)
    assert terms.seconds(num_bytes) == pytest.approx(inside + outside)
    assert collective_terms(A800, "all_reduce", range(16)).algorithm == "hierarchical"


def test_one_rank_on_each_node_is_a_ring():
    terms = collective_terms(A800, "all_reduce", (0, 8))
    # Eight such rings share four cards.
    assert terms.algorithm == "ring"
    assert terms.seconds(1e9) == pytest.approx(2 * 10e-6 + 1e9 / 12.5e9)


def test_many_nodes_sum_small_tensors_in_a_tree():
    """64 ranks, each on a node of its own, on four cards for eight: a tree of six levels, up and down."""
    cluster = replace(A800, num_devices=512)
    ranks = range(0, 512, 8)
    small, large = (collective_terms(cluster, "all_reduce", ranks, num_bytes) for num_bytes in (1e6, 1e9))
    assert (small.algorithm, large.algorithm) == ("tree", "ring")
    assert small.seconds(1e6) == pytest.approx(12 * 10e-6 + 2e6 / 12.5e9)
    assert collective_terms(cluster, "all_gather", ranks, 1e6).algorithm == "ring"


def test_broadcast_and_all_to_all():
    assert collective_seconds(A800, "broadcast", range(4), 200e9) == pytest.approx(1 + 9e-6)
    assert collective_seconds(A800, "all_to_all", range(4), 200e9) == pytest.approx(0.75 + 9e-6)


def test_resharding_takes_as_long_as_its_narrowest_place():
    assert resharding_seconds(A800, [(3, 3, 1e9), (1, 2, 0)]) == 0
    assert resharding_seconds(A800, [(0, 1, 200e9), (0, 2, 200e9)]) == pytest.approx(2 + 3e-6)
    # One card carries one rank's bytes; the four cards of a node carry all eight ranks'.
    assert resharding_seconds(A800, [(0, 8, 25e9)]) == pytest.approx(1 + 10e-6)
    assert resharding_seconds(A800, [(r, 8 + r, 25e9) for r in range(8)]) == pytest.approx(2 + 10e-6)
