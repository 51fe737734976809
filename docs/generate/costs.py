"""Generates the catalogue of devices and links in docs/costs.md."""

from collections.abc import Sequence

from motet.cluster import CATALOGUE, DEVICES, LINKS

DTYPES = ("bfloat16", "float16", "tf32", "float32", "float64")
DEVICES_HEADING, LINKS_HEADING = "## Devices\n", "## Links\n"


def describe(page: str) -> str:
    """The page with everything from the headings of the catalogue on replaced."""
    return page.partition(DEVICES_HEADING)[0] + "\n".join(
        [DEVICES_HEADING, *_devices(), "", LINKS_HEADING, *_links(), ""]
    )


def _devices() -> list[str]:
    peaks_of = (f"{name} TFLOP/s" for name in DTYPES)
    shares = ("matrix products", "attention by kernel", "efficiencies from")
    lines = _header(("device", *peaks_of, "memory GB", "GB/s", "usual link", *shares, "source"))
    for device in DEVICES.values():
        peaks = (f"{device.peak_flops[d] / 1e12:g}" if d in device.peak_flops else "" for d in DTYPES)
        memory = (f"{device.memory_bytes / 1e9:.3g}", f"{device.memory_bytes_per_s / 1e9:g}")
        attention = ", ".join(f"{kernel} {share:.0%}" for kernel, share in device.attention_efficiency.items())
        reached = (f"{device.efficiency:.0%}", attention, device.efficiency_source)
        lines.append(_row((f"`{device.name}`", *peaks, *memory, f"`{device.within_node}`", *reached, device.source)))
    return lines


def _links() -> list[str]:
    lines = _header(("link", "GB/s", "reached", "latency us", "source"))
    for link in LINKS.values():
        entry = CATALOGUE["links"][link.name]
        reached = f"{entry.get('efficiency', 1.0):.0%}"
        values = (f"{entry['bytes_per_s'] / 1e9:g}", reached, f"{link.latency_s * 1e6:g}")
        lines.append(_row((f"`{link.name}`", *values, link.source)))
    return lines


def _header(cells: Sequence[str]) -> list[str]:
    return [_row(cells), _row(["---"] * len(cells))]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
