"""Known devices and links, with the source of each. Data for `motet.cluster.cluster`.

Peaks are the vendors' *dense* numbers (half of what is advertised with sparsity), bandwidths those of *one* direction
(half of what is advertised as bidirectional), 1 GB = 1e9 bytes. `float32` is that of the vector units: by
default PyTorch uses no TF32, whose peak stands under `tf32`.

Limits: vendors publish no latencies. Those of links are motet's round numbers for one step of a collective or one
message, start-up of the kernel included; measure yours with `motet profile`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from motet.errors import UserError

# What a device and a link are: peaks, bandwidths, latency. `motet.cluster.catalogue` has known ones.


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


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="cpu",
            peak_flops={"float64": 4e10, "float32": 8e10, "bfloat16": 8e10},
            memory_bytes=4 * 2**30,
            memory_bytes_per_s=2e10,
            within_node="loopback",
            source="one core of a current server: 2.5 GHz, two fused multiply-adds of 256 bits a cycle",
        ),
        Device(
            name="v100-16",
            peak_flops={"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12},
            memory_bytes=16e9,
            memory_bytes_per_s=900e9,
            within_node="nvlink2",
            source="NVIDIA V100 Tensor Core GPU data sheet (SXM2, 16 GB)",
        ),
        Device(
            name="a40",
            peak_flops={
                "float64": 0.58e12,
                "float32": 37.4e12,
                "tf32": 74.8e12,
                "bfloat16": 149.7e12,
                "float16": 149.7e12,
            },
            memory_bytes=48e9,
            memory_bytes_per_s=696e9,
            within_node="pcie4",
            source="NVIDIA A40 data sheet; float64: a 64th of float32 (GA102 white paper)",
        ),
        Device(
            name="a100-40",
            peak_flops={
                "float64": 9.7e12,
                "float32": 19.5e12,
                "tf32": 156e12,
                "bfloat16": 312e12,
                "float16": 312e12,
            },
            memory_bytes=40e9,
            memory_bytes_per_s=1.555e12,
            within_node="nvlink3",
            source="NVIDIA A100 Tensor Core GPU data sheet (SXM4, 40 GB)",
        ),
        Device(
            name="a100-80",
            peak_flops={
                "float64": 9.7e12,
                "float32": 19.5e12,
                "tf32": 156e12,
                "bfloat16": 312e12,
                "float16": 312e12,
            },
            memory_bytes=80e9,
            memory_bytes_per_s=2.039e12,
            within_node="nvlink3",
            source="NVIDIA A100 Tensor Core GPU data sheet (SXM4, 80 GB)",
        ),
        Device(
            name="a800",
            peak_flops={
                "float64": 9.7e12,
                "float32": 19.5e12,
                "tf32": 156e12,
                "bfloat16": 312e12,
                "float16": 312e12,
            },
            memory_bytes=80e9,
            memory_bytes_per_s=2.039e12,
            within_node="nvlink-a800",
            source="the A100 80 GB, NVLink cut to 400 GB/s both ways: NVIDIA's announcement, Reuters 2022-11",
        ),
        Device(
            name="h100",
            peak_flops={
                "float64": 34e12,
                "float32": 67e12,
                "tf32": 494.5e12,
                "bfloat16": 989e12,
                "float16": 989e12,
                "float8": 1979e12,
            },
            memory_bytes=80e9,
            memory_bytes_per_s=3.35e12,
            within_node="nvlink4",
            source="NVIDIA H100 Tensor Core GPU data sheet (SXM)",
        ),
        Device(
            name="h800",
            peak_flops={
                "float64": 1e12,
                "float32": 67e12,
                "tf32": 494.5e12,
                "bfloat16": 989e12,
                "float16": 989e12,
                "float8": 1979e12,
            },
            memory_bytes=80e9,
            memory_bytes_per_s=3.35e12,
            within_node="nvlink-h800",
            source="NVIDIA H800 Tensor Core GPU data sheet (SXM): H100 with float64 and NVLink cut",
        ),
        Device(
            name="h200",
            peak_flops={
                "float64": 34e12,
                "float32": 67e12,
                "tf32": 494.5e12,
                "bfloat16": 989e12,
                "float16": 989e12,
                "float8": 1979e12,
            },
            memory_bytes=141e9,
            memory_bytes_per_s=4.8e12,
            within_node="nvlink4",
            source="NVIDIA H200 Tensor Core GPU data sheet (SXM)",
        ),
        Device(
            name="b200",
            peak_flops={
                "float64": 40e12,
                "float32": 80e12,
                "tf32": 1.1e15,
                "bfloat16": 2.25e15,
                "float16": 2.25e15,
                "float8": 4.5e15,
            },
            memory_bytes=180e9,
            memory_bytes_per_s=8e12,
            within_node="nvlink5",
            source="NVIDIA Blackwell architecture technical brief (HGX B200, 1000 W); memory: DGX B200 data sheet",
        ),
    )
}

LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link(
            name="loopback",
            latency_s=40e-6,
            bytes_per_s=3e9,
            source="measured: gloo on a server of 2 cores, 10 MB in 3.2 ms, a ping-pong in 74 us",
        ),
        Link(name="pcie3", latency_s=5e-6, bytes_per_s=15.75e9, source="PCI Express 3.0, 16 lanes"),
        Link(name="pcie4", latency_s=5e-6, bytes_per_s=31.5e9, source="PCI Express 4.0, 16 lanes"),
        Link(name="pcie5", latency_s=5e-6, bytes_per_s=63e9, source="PCI Express 5.0, 16 lanes"),
        Link(name="nvlink2", latency_s=4e-6, bytes_per_s=150e9, source="NVIDIA V100 data sheet: 300 GB/s both ways"),
        Link(name="nvlink-a40", latency_s=4e-6, bytes_per_s=56.25e9, source="NVIDIA A40 data sheet: a bridged pair"),
        Link(name="nvlink3", latency_s=3e-6, bytes_per_s=300e9, source="NVIDIA A100 data sheet: 600 GB/s both ways"),
        Link(name="nvlink-a800", latency_s=3e-6, bytes_per_s=200e9, source="as the device a800: 400 GB/s both ways"),
        Link(name="nvlink4", latency_s=3e-6, bytes_per_s=450e9, source="NVIDIA H100 data sheet: 900 GB/s both ways"),
        Link(
            name="nvlink-h800", latency_s=3e-6, bytes_per_s=200e9, source="NVIDIA H800 data sheet: 400 GB/s both ways"
        ),
        Link(
            name="nvlink5", latency_s=3e-6, bytes_per_s=900e9, source="NVIDIA DGX B200 data sheet: 1.8 TB/s both ways"
        ),
        Link(name="infiniband100", latency_s=6e-6, bytes_per_s=12.5e9, source="InfiniBand EDR, 4 lanes"),
        Link(name="infiniband200", latency_s=6e-6, bytes_per_s=25e9, source="InfiniBand HDR, 4 lanes"),
        Link(name="infiniband400", latency_s=6e-6, bytes_per_s=50e9, source="InfiniBand NDR, 4 lanes"),
        Link(name="infiniband800", latency_s=6e-6, bytes_per_s=100e9, source="InfiniBand XDR, 4 lanes"),
        Link(name="roce100", latency_s=10e-6, bytes_per_s=12.5e9, source="RoCE v2 on 100 Gbit/s Ethernet"),
        Link(name="roce200", latency_s=10e-6, bytes_per_s=25e9, source="RoCE v2 on 200 Gbit/s Ethernet"),
        Link(name="roce400", latency_s=10e-6, bytes_per_s=50e9, source="RoCE v2 on 400 Gbit/s Ethernet"),
        Link(name="ethernet10", latency_s=30e-6, bytes_per_s=1.25e9, source="IEEE 802.3, 10 Gbit/s, TCP"),
        Link(name="ethernet25", latency_s=30e-6, bytes_per_s=3.125e9, source="IEEE 802.3, 25 Gbit/s, TCP"),
        Link(name="ethernet100", latency_s=30e-6, bytes_per_s=12.5e9, source="IEEE 802.3, 100 Gbit/s, TCP"),
    )
}

ALIASES: Mapping[str, str] = {"a100": "a100-80", "v100": "v100-16"}
"""Short names of devices."""
