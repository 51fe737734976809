"""Clusters from YAML: names, entries of the user's, network cards, and mistakes in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.cluster import DEVICES, LINKS, Cluster, cluster_from_dict
from motet.config import load_catalogue
from motet.errors import UserError

MINE = {"peak_flops": {"bfloat16": 1e15}, "memory_bytes": 1e11, "memory_bytes_per_s": 4e12}


@given(st.integers(1, 64), st.integers(1, 8), st.data())
def test_ranks_fill_a_node_before_the_next(num_devices, devices_per_node, data):
    cluster = cluster_from_dict(
        {
            "num_devices": num_devices,
            "devices_per_node": devices_per_node,
            "device": "a40",
            "between_nodes": "ethernet10",
        }
    )
    nodes = [node for node in range(num_devices) for _ in range(devices_per_node)][:num_devices]
    assert [cluster.node(rank) for rank in range(num_devices)] == nodes
    assert cluster.num_nodes == len(set(nodes))
    rank, other = (data.draw(st.integers(0, num_devices - 1)) for _ in range(2))
    assert cluster.link(rank, other).name == ("pcie4" if nodes[rank] == nodes[other] else "ethernet10")


def test_names_are_found_in_any_case_and_by_their_short_form():
    cluster = cluster_from_dict({"num_devices": 8, "device": "A100", "between_nodes": "RoCE200"})
    assert cluster.device is DEVICES["a100-80"]
    assert cluster.within_node is LINKS["nvlink3"]
    assert cluster.between_nodes is LINKS["roce200"]


@pytest.mark.parametrize(("nics", "share"), [(None, 1), (1, 1 / 8), (4, 1 / 2), (8, 1), (16, 1)])
def test_devices_share_their_nodes_network_cards(nics, share):
    values = {"num_devices": 16, "devices_per_node": 8, "device": "a800", "between_nodes": "roce200"}
    cluster = cluster_from_dict({**values, "nics_per_node": nics})
    assert cluster.network_bytes_per_s == LINKS["roce200"].bytes_per_s * share


def test_entries_of_the_users():
    cluster = cluster_from_dict(
        {"num_devices": 2, "device": "mine", "between_nodes": "wire"},
        devices={"mine": {**MINE, "within_node": "wire"}},
        links={"wire": {"latency_s": 1e-3, "bytes_per_s": 1e6}},
    )
    assert isinstance(cluster, Cluster)
    assert cluster.device.name == "mine"
    assert cluster.within_node == cluster.between_nodes
    assert cluster.link(0, 1).seconds(1e6) == 1.001


def test_a_catalogue_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("links: {wire: {latency_s: 1e-3, bytes_per_s: 1e6}}\n")
    assert load_catalogue(file).links["wire"].bytes_per_s == 1e6
    file.write_text("links: {wire: {latency_s: 1e-3, bytes_per_sec: 1e6}}\n")
    with pytest.raises(UserError, match=r"mine.yaml: links.wire.bytes_per_sec: .*did you mean 'bytes_per_s'"):
        load_catalogue(file)
    with pytest.raises(UserError, match=r"absent.yaml: cannot be read .*; give the path of a catalogue"):
        load_catalogue(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "num_devices is None; give at least 1"),
        ({"num_devices": 2, "speed": 1}, "speed is not known; known are num_devices"),
        ({"num_devices": 2, "device": "abacus"}, "device 'abacus' is not known; give one of cpu, v100-16, a40"),
        ({"num_devices": 2, "between_nodes": "string"}, "between_nodes 'string' is not known; give one of loopback"),
        ({"num_devices": 2, "within_node": {"latency": 1}}, "within_node needs name, latency_s, bytes_per_s"),
        ({"num_devices": 2, "within_node": 3}, "within_node is 3; give a name or a mapping"),
        ({"num_devices": 2, "devices_per_node": 0}, "devices_per_node is 0"),
        ({"num_devices": 2, "nics_per_node": 0}, "nics_per_node is 0"),
    ],
)
def test_wrong_clusters(values, message):
    with pytest.raises(UserError, match=message):
        cluster_from_dict(values)


def test_a_dtype_that_a_device_has_no_peak_for():
    device = cluster_from_dict({"num_devices": 8, "device": {**MINE, "name": "mine"}}).device
    assert device.flops_per_s("bfloat16") == 0.5e15
    with pytest.raises(UserError, match="device mine has no peak_flops for float32, only for bfloat16; add it"):
        device.flops_per_s("float32")
