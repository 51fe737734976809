"""The catalogue is sane and sourced."""

import pytest

from motet.cluster import ALIASES, DEVICES, LINKS

ASKED_FOR = ("a40", "a100-40", "a100-80", "a800", "h100", "h800", "h200", "v100-16", "b200", "cpu")


def test_it_has_the_devices_of_the_papers_and_their_kin():
    assert set(ASKED_FOR) <= set(DEVICES)
    assert set(ALIASES.values()) <= set(DEVICES)
    for kind in ("nvlink", "pcie", "infiniband", "roce", "ethernet"):
        assert any(name.startswith(kind) for name in LINKS), kind


@pytest.mark.parametrize("name", DEVICES)
def test_device(name):
    device = DEVICES[name]
    assert device.name == name
    assert device.source
    assert device.within_node in LINKS
    assert 0 < device.efficiency <= 1
    wide_to_narrow = [
        device.peak_flops[d] for d in ("float64", "float32", "tf32", "float16", "float8") if d in device.peak_flops
    ]
    assert wide_to_narrow == sorted(wide_to_narrow)
    # FLOPs for each byte from memory.
    assert 0.5 < device.peak_flops["float32"] / device.memory_bytes_per_s < 200
    assert LINKS[device.within_node].bytes_per_s < device.memory_bytes_per_s


@pytest.mark.parametrize("name", LINKS)
def test_link(name):
    link = LINKS[name]
    assert link.name == name
    assert link.source
    assert 1e-6 <= link.latency_s <= 1e-4
    assert link.seconds(0) == link.latency_s
    assert link.seconds(link.bytes_per_s) == pytest.approx(link.latency_s + 1)


@pytest.mark.parametrize("kind", ["nvlink", "pcie", "infiniband", "roce", "ethernet"])
def test_later_generations_are_faster(kind):
    generations = sorted((int(name.removeprefix(kind)), name) for name in LINKS if name.removeprefix(kind).isdigit())
    speeds = [LINKS[name].bytes_per_s for _, name in generations]
    assert len(speeds) > 1
    assert speeds == sorted(set(speeds))
