"""A picture of memory over time: a line for each rank, and the limit of the device.

Limit: of many ranks only those that hold most are drawn, each different curve once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from motet.timeline import MemoryCurve, lane_name

MAX_LINES = 10
"""As many as there are colours."""


def plot_memory(memory: Mapping[str, Sequence[MemoryCurve]], *, limit_bytes: float | None = None) -> Figure:
    """Each rank's curve, by title. `limit_bytes`: that a rank may hold."""
    figure = Figure(figsize=(12, 1.0 + 3.2 * len(memory)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(memory), sharex=True, squeeze=False)[:, 0]
    for axis, (title, curves) in zip(axes, memory.items(), strict=True):
        _draw(axis, curves, limit_bytes)
        peak = max((curve.peak_bytes for curve in curves), default=0)
        axis.set_title(f"{title}: peak {peak / 2**30:.3g} GiB", loc="left")
        axis.set_ylabel("GiB")
    axes[-1].set_xlabel("s")
    return figure


def save_memory(memory: Mapping[str, Sequence[MemoryCurve]], path: Path, *, limit_bytes: float | None = None) -> None:
    """Writes the picture; the file's suffix (.png, .svg, .pdf) says how."""
    plot_memory(memory, limit_bytes=limit_bytes).savefig(path, dpi=150)


def _draw(axis: Axes, curves: Sequence[MemoryCurve], limit_bytes: float | None) -> None:
    ranks_of_curve: dict[tuple[bytes, bytes], list[int]] = {}
    for rank, curve in enumerate(curves):
        ranks_of_curve.setdefault((curve.times_s.tobytes(), curve.bytes_held.tobytes()), []).append(rank)
    groups = sorted(ranks_of_curve.values(), key=lambda ranks: -curves[ranks[0]].peak_bytes)[:MAX_LINES]
    for ranks in sorted(groups):
        curve = curves[ranks[0]]
        axis.step(curve.times_s, curve.bytes_held / 2**30, where="post", linewidth=1, label=lane_name(ranks))
    # A limit far above the curves would flatten them.
    if limit_bytes is not None and limit_bytes < 2 * max((curve.peak_bytes for curve in curves), default=0):
        axis.axhline(limit_bytes / 2**30, color="black", linestyle="--", linewidth=1, label="limit")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    axis.spines[["top", "right"]].set_visible(False)
