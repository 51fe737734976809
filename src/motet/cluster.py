"""Devices and the links between them: what analytic costs, messages and memory are computed from.

Peaks and bandwidths are the vendors' dense numbers for one direction; `efficiency` is the share of the peak that the
linears of a transformer reach. Users add their own devices and links in YAML (`cluster_from_dict`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from motet.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    peak_flops: Mapping[str, float]
    """FLOP/s by dtype."""
    memory_bytes: float
    memory_bytes_per_s: float
    efficiency: float = 0.5

    def flops_per_s(self, dtype: str) -> float:
        if dtype not in self.peak_flops:
            raise UserError(f"cluster: device {self.name} has no peak_flops for {dtype}; add it")
        return self.peak_flops[dtype] * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Link:
    name: str
    latency_s: float
    bytes_per_s: float


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        # One core of a current server.
        Device(
            name="cpu",
            peak_flops={"float64": 4e10, "float32": 8e10, "bfloat16": 8e10},
            memory_bytes=4 * 2**30,
            memory_bytes_per_s=2e10,
        ),
        # NVIDIA data sheets: A40, A100 80GB SXM, H100 SXM, H200 SXM.
        Device(
            name="a40",
            peak_flops={"float32": 37.4e12, "bfloat16": 149.7e12, "float16": 149.7e12},
            memory_bytes=48e9,
            memory_bytes_per_s=696e9,
        ),
        Device(
            name="a100",
            peak_flops={"float64": 9.7e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
            memory_bytes=80e9,
            memory_bytes_per_s=2.039e12,
        ),
        Device(
            name="h100",
            peak_flops={"float64": 34e12, "float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
            memory_bytes=80e9,
            memory_bytes_per_s=3.35e12,
        ),
        Device(
            name="h200",
            peak_flops={"float64": 34e12, "float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
            memory_bytes=141e9,
            memory_bytes_per_s=4.8e12,
        ),
    )
}

LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        # docs/decisions: gloo over the loopback, 10 MB in 3.2 ms, a ping-pong in 74 us.
        Link(name="loopback", latency_s=40e-6, bytes_per_s=3e9),
        Link(name="pcie4", latency_s=5e-6, bytes_per_s=25e9),
        Link(name="nvlink3", latency_s=3e-6, bytes_per_s=300e9),
        Link(name="nvlink4", latency_s=3e-6, bytes_per_s=450e9),
        Link(name="infiniband200", latency_s=6e-6, bytes_per_s=25e9),
        Link(name="infiniband400", latency_s=6e-6, bytes_per_s=50e9),
        Link(name="ethernet100", latency_s=30e-6, bytes_per_s=12.5e9),
    )
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices; ranks fill a node before they go to the next."""

    num_devices: int
    device: Device
    devices_per_node: int
    within_node: Link
    between_nodes: Link

    def link(self, rank: int, other: int) -> Link:
        return (
            self.within_node if rank // self.devices_per_node == other // self.devices_per_node else self.between_nodes
        )

    def slowest_link(self, ranks: tuple[int, ...]) -> Link:
        """Of a collective over these ranks."""
        nodes = {rank // self.devices_per_node for rank in ranks}
        return self.within_node if len(nodes) == 1 else self.between_nodes


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_cluster(num_devices: int) -> Cluster:
    """Processes on one machine."""
    return Cluster(
        num_devices=num_devices,
        device=DEVICES["cpu"],
        devices_per_node=num_devices,
        within_node=LINKS["loopback"],
        between_nodes=LINKS["loopback"],
    )


def cluster_from_dict(values: Mapping[str, Any]) -> Cluster:
    """A cluster as it stands in YAML.

    `num_devices` is needed. `device`, `within_node`, `between_nodes` are a name or a mapping with the values of a new
    one; `devices_per_node` is all of them if it is not given. Raises `ValueError` naming the key.
    """
    known = [f.name for f in fields(Cluster)]
    for key in values:
        if key not in known:
            raise UserError(f"cluster: {key} is not known; known are {', '.join(known)}")
    num_devices = values.get("num_devices")
    if not isinstance(num_devices, int) or num_devices < 1:
        raise UserError(f"cluster: num_devices is {num_devices!r}; give at least 1")
    devices_per_node = values.get("devices_per_node", num_devices)
    if not isinstance(devices_per_node, int) or devices_per_node < 1:
        raise UserError(f"cluster: devices_per_node is {devices_per_node!r}; give at least 1")
    within = _entry(Link, LINKS, "within_node", values.get("within_node", "loopback"))
    return Cluster(
        num_devices=num_devices,
        device=_entry(Device, DEVICES, "device", values.get("device", "cpu")),
        devices_per_node=devices_per_node,
        within_node=within,
        between_nodes=_entry(Link, LINKS, "between_nodes", values["between_nodes"])
        if "between_nodes" in values
        else within,
    )


def _entry(kind: Any, catalogue: Mapping[str, Any], key: str, value: Any) -> Any:
    if isinstance(value, str):
        if value not in catalogue:
            raise UserError(f"cluster: {key} {value!r} is not known; give one of {', '.join(catalogue)}, or its values")
        return catalogue[value]
    if not isinstance(value, Mapping):
        raise UserError(f"cluster: {key} is {value!r}; give a name or a mapping of its values")
    try:
        return kind(**{"name": key, **value})
    except TypeError as error:
        names = ", ".join(f.name for f in fields(kind))
        raise UserError(f"cluster: {key} needs {names} ({error})") from error
