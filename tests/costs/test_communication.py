"""Messages and reductions by hand, and links fitted to measurements."""

from dataclasses import replace

import pytest

from motet.cluster import LINKS, cpu_cluster
from motet.costs.communication import (
    BUCKET_BYTES,
    all_reduce_seconds,
    collective_seconds,
    fit_link,
    message_link,
    with_measured_links,
)
from motet.costs.cost_model import CostTable, LinkCost

ANALYTIC = CostTable(modules={}, source="analytic", hardware="", date="")
LINK = LINKS["loopback"]
MEASURED = replace(
    ANALYTIC,
    message=LinkCost(latency_s=1e-3, bytes_per_s=1e6),
    all_reduce=LinkCost(latency_s=2e-3, bytes_per_s=1e6),
    collectives={"all_gather": LinkCost(latency_s=3e-3, bytes_per_s=1e6)},
)


def test_messages():
    assert message_link(ANALYTIC, cpu_cluster(2), 0, 1).seconds(3e6) == pytest.approx(
        LINK.latency_s + 3e6 / LINK.bytes_per_s
    )
    assert message_link(MEASURED, cpu_cluster(2), 0, 1).seconds(1e6) == pytest.approx(1.001)


def test_ring_all_reduce():
    cluster = cpu_cluster(4)
    four = all_reduce_seconds(ANALYTIC, cluster, (0, 1, 2, 3), 4e6)
    assert four == pytest.approx(6 * LINK.latency_s + 6 * 1e6 / LINK.bytes_per_s)
    assert all_reduce_seconds(ANALYTIC, cluster, (0,), 4e6) == 0
    # What was measured is an all-reduce of two ranks.
    assert all_reduce_seconds(MEASURED, cluster, (0, 1), 1e6) == pytest.approx(2e-3 + 1)
    assert all_reduce_seconds(MEASURED, cluster, (0, 1, 2, 3), 1e6) == pytest.approx(6e-3 + 1.5)


def test_measured_collectives_stand_for_larger_groups_of_a_node():
    """What was measured is a gather of two ranks: one step, with half of the bytes."""
    cluster = with_measured_links(cpu_cluster(8), MEASURED)
    assert collective_seconds(cluster, "all_gather", (0, 1), 1e6) == pytest.approx(3e-3 + 1)
    assert collective_seconds(cluster, "all_gather", (0, 1, 2, 3), 1e6) == pytest.approx(3 * 3e-3 + 1.5)
    # Others go over the measured link of messages, and without measurements over the catalogue's.
    assert collective_seconds(cluster, "reduce_scatter", (0, 1), 1e6) == pytest.approx(1e-3 + 0.5)
    without = with_measured_links(cpu_cluster(8), ANALYTIC)
    assert collective_seconds(without, "all_gather", (0, 1), 1e6) == pytest.approx(
        LINK.latency_s + 0.5e6 / LINK.bytes_per_s
    )
    two_nodes = replace(cluster, devices_per_node=1)
    assert collective_seconds(two_nodes, "all_gather", (0, 1), 1e6) == pytest.approx(
        LINK.latency_s + 0.5e6 / LINK.bytes_per_s
    )


def test_every_bucket_pays_the_latency():
    cluster = cpu_cluster(2)
    one = all_reduce_seconds(ANALYTIC, cluster, (0, 1), BUCKET_BYTES)
    two = all_reduce_seconds(ANALYTIC, cluster, (0, 1), BUCKET_BYTES + 1)
    assert two - one == pytest.approx(2 * LINK.latency_s, rel=1e-3)


def test_fitting_a_link():
    sizes = [4, 4e3, 4e5, 4e6]
    fitted = fit_link(sizes, [5e-5 + size / 2e9 for size in sizes])
    assert fitted.latency_s == pytest.approx(5e-5)
    assert fitted.bytes_per_s == pytest.approx(2e9)
    with pytest.raises(ValueError, match="two sizes"):
        fit_link([4, 4], [1, 1])
