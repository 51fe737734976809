"""A cluster: equal nodes of equal devices, and the links within and between nodes.

Known devices and links stand in `catalogue.yaml`. Users add their own in the run file, or in a file of the same form
that `cluster.catalogue` names.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from motet.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    peak_flops: Mapping[str, float]
    """FLOP/s by dtype, dense."""
    memory_bytes: float
    memory_bytes_per_s: float
    efficiency: float = 0.5
    """Share of the peak that large matrix products reach."""
    efficiency_by_dtype: Mapping[str, float] = field(default_factory=dict)
    """The same for dtypes that reach another share."""
    attention_efficiency: Mapping[str, float] = field(default_factory=dict)
    """Share of the peak that an attention kernel reaches on the pairs that it computes, by the kernel's name."""
    convolution_efficiency: float | None = None
    """Share of the peak that convolutions reach; None: that of matrix products."""
    memory_efficiency: float = 0.8
    """Share of the memory's bandwidth that kernels reach."""
    kernel_overhead_s: float = 3e-6
    """Fixed time of a kernel, or of PyTorch's operators for it on a CPU."""
    host_bytes_per_s: float = 2.5e10
    """Bandwidth of copies between the device and pinned memory of its host, in one direction."""
    within_node: str = "pcie4"
    """The link of the catalogue that joins such devices in the usual server."""
    source: str = ""
    """Source of the numbers."""
    efficiency_source: str = "assumed"
    """Source of the efficiencies, and the rows that they were fitted to."""

    def peak(self, dtype: str) -> float:
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise UserError(f"cluster: device {self.name} has no peak_flops for {dtype}, only for {known}; add it")
        return self.peak_flops[dtype]

    def flops_per_s(self, dtype: str) -> float:
        return self.peak(dtype) * self.gemm_efficiency(dtype)

    def gemm_efficiency(self, dtype: str) -> float:
        """Share of the peak that large matrix products reach."""
        return self.efficiency_by_dtype.get(dtype, self.efficiency)


@dataclass(frozen=True, kw_only=True)
class Link:
    """Between two devices of a node, or one network card and the network; a card serves one or several devices."""

    name: str
    latency_s: float
    bytes_per_s: float
    """Bandwidth in one direction that messages and collectives reach."""
    source: str = ""
    """Source of the numbers."""

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


CATALOGUE: Mapping[str, Mapping[str, Any]] = yaml.safe_load(Path(__file__).with_name("catalogue.yaml").read_text())
DEVICES: Mapping[str, Device] = {name: Device(name=name, **values) for name, values in CATALOGUE["devices"].items()}
LINKS: Mapping[str, Link] = {
    name: Link(
        name=name,
        latency_s=values["latency_s"],
        bytes_per_s=values["bytes_per_s"] * values.get("efficiency", 1.0),
        source=values["source"],
    )
    for name, values in CATALOGUE["links"].items()
}
ALIASES: Mapping[str, str] = CATALOGUE["aliases"]
"""Short names of devices."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices; ranks fill a node before they go to the next."""

    num_devices: int
    device: Device
    devices_per_node: int
    within_node: Link
    between_nodes: Link
    """Through one network card."""
    nics_per_node: int | None = None
    """Network cards of a node, shared by its devices; None: one for each device."""
    collectives: Mapping[str, Link] = field(default_factory=dict)
    """Measured collectives of two devices of a node, by name: seconds as a function of the bytes of a whole tensor."""

    @property
    def num_nodes(self) -> int:
        return -(-self.num_devices // self.devices_per_node)

    @property
    def num_nics(self) -> int:
        """Network cards of one node."""
        return self.nics_per_node or self.devices_per_node

    @property
    def network_bytes_per_s(self) -> float:
        """Bandwidth of one device while all devices of its node send to other nodes."""
        return self.between_nodes.bytes_per_s * min(1.0, self.num_nics / self.devices_per_node)

    def node(self, rank: int) -> int:
        return rank // self.devices_per_node

    def link(self, rank: int, other: int) -> Link:
        return self.within_node if self.node(rank) == self.node(other) else self.between_nodes


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


def cluster_from_dict(
    values: Mapping[str, Any],
    *,
    devices: Mapping[str, Mapping[str, Any]] | None = None,
    links: Mapping[str, Mapping[str, Any]] | None = None,
) -> Cluster:
    """A cluster as it stands in YAML.

    `num_devices` is needed. `device`, `within_node`, `between_nodes` are a name or a mapping with the values of a new
    one; `devices_per_node` is all of them if it is not given, `within_node` the usual link of the device.
    `devices`, `links`: entries of the user's, by name, which go before the catalogue's.
    Raises `UserError` naming the key.
    """
    known = [f.name for f in fields(Cluster) if f.name != "collectives"]
    for key in values:
        if key not in known:
            raise UserError(f"cluster: {key} is not known; known are {', '.join(known)}")
    num_devices = _count(values, "num_devices", None)
    all_devices = {**DEVICES, **{name: _own(Device, name, entry) for name, entry in (devices or {}).items()}}
    all_links = {**LINKS, **{name: _own(Link, name, entry) for name, entry in (links or {}).items()}}
    device = _entry(Device, all_devices, "device", values.get("device", "cpu"))
    within = _entry(Link, all_links, "within_node", values.get("within_node", device.within_node))
    return Cluster(
        num_devices=num_devices,
        device=device,
        devices_per_node=_count(values, "devices_per_node", num_devices),
        within_node=within,
        between_nodes=_entry(Link, all_links, "between_nodes", values["between_nodes"])
        if "between_nodes" in values
        else within,
        nics_per_node=_count(values, "nics_per_node", None) if values.get("nics_per_node") is not None else None,
    )


def _count(values: Mapping[str, Any], key: str, otherwise: int | None) -> int:
    value = values.get(key, otherwise)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"cluster: {key} is {value!r}; give at least 1")
    return value


def _entry(kind: Any, known: Mapping[str, Any], key: str, value: Any) -> Any:
    if isinstance(value, str):
        name = value if value in known else ALIASES.get(value.lower(), value.lower())
        if name not in known:
            raise UserError(f"cluster: {key} {value!r} is not known; give one of {', '.join(known)}, or its values")
        return known[name]
    if not isinstance(value, Mapping):
        raise UserError(f"cluster: {key} is {value!r}; give a name or a mapping of its values")
    return _own(kind, str(value.get("name", key)), value)


def _own(kind: Any, name: str, values: Mapping[str, Any]) -> Any:
    """A device or link that the user describes."""
    try:
        return kind(**{"source": "the user", **values, "name": name})
    except TypeError as error:
        names = ", ".join(f.name for f in fields(kind))
        raise UserError(f"cluster: {name} needs {names} ({error})") from error
