"""What a device and a link are: peaks, bandwidths, latency. `motet.cluster.catalogue` has known ones."""

from collections.abc import Mapping
from dataclasses import dataclass

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
    within_node: str = "pcie4"
    """The link of the catalogue that joins such devices in the usual server."""
    source: str = ""
    """Where the numbers are from."""

    def peak(self, dtype: str) -> float:
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise UserError(f"cluster: device {self.name} has no peak_flops for {dtype}, only for {known}; add it")
        return self.peak_flops[dtype]

    def flops_per_s(self, dtype: str) -> float:
        return self.peak(dtype) * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Link:
    """Between two devices of a node, or one network card and the network; a card serves one or several devices."""

    name: str
    latency_s: float
    bytes_per_s: float
    """In one direction."""
    source: str = ""
    """Where the numbers are from."""

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s
