"""Pictures of timelines, of memory over time, and of a run's data, drawn with matplotlib.

A picture of timelines has one lane per rank (one rank can stand for several with the same timeline) and one colour per
module, whose shade tells the kind of action; messages are not drawn. Several timelines (predicted and measured) stand
below each other on one time axis. Limit: more than some thousand spans are too narrow to distinguish; use the trace
(`motet.report.timelines.save_trace`) instead.

A picture of memory has a line for each rank, and the limit of the device. Limit: only the `MAX_LINES` highest distinct
curves are drawn.
"""

import colorsys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from motet.report.data_stats import DataStats
from motet.timeline import BUSY_KINDS, SPAN_KINDS, Lanes, MemoryCurve, Span, Timeline, lane_name, lanes_by_title

LIGHTNESS = {"F": 0.72, "B": 0.45, "I": 0.52, "W": 0.36, "optimizer": 0.6, "reduce": 0.8, "gather": 0.7}
MAX_LABELS = 400
"""Actions are labelled only if there are at most this many."""
MAX_LINES = 10
"""The number of colours of lines."""
LOG_SCALE_RATIO = 50
"""Token counts whose ratio exceeds this are drawn on a logarithmic axis."""


def plot_timelines(timelines: Mapping[str, Timeline], lanes: Lanes | None = None) -> Figure:
    """Draws timelines, by title."""
    groups = lanes_by_title(timelines, lanes)
    longest_s = max((timeline.iteration_time_s for timeline in timelines.values()), default=0.0)
    unit, unit_s = ("s", 1.0) if longest_s >= 10 else ("ms", 1e-3)
    num_lanes = sum(map(len, groups.values()))
    figure = Figure(figsize=(12, 1.2 + 0.9 * len(timelines) + 0.32 * num_lanes), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(timelines),
        sharex=True,
        squeeze=False,
        height_ratios=[max(1, len(group)) for group in groups.values()],
    )[:, 0]
    modules = sorted({s.module for t in timelines.values() for s in t.spans if s.kind in "FBIW"})
    for axis, (title, timeline) in zip(axes, timelines.items(), strict=True):
        _draw(axis, timeline, groups[title], modules, unit_s, narrowest_label_s=0.015 * longest_s)
        took = f"{timeline.iteration_time_s / unit_s:.4g} {unit}"
        axis.set_title(f"{title}: {took}, bubble {_bubble_fraction(timeline, groups[title]):.1%}", loc="left")
    axes[-1].set_xlabel(unit)
    axes[-1].set_xlim(0, 1.01 * longest_s / unit_s if longest_s else 1)
    kinds = sorted(
        {s.kind for t in timelines.values() for s in t.spans if s.kind in LIGHTNESS}, key=list(LIGHTNESS).index
    )
    handles = [Patch(color=_color(Span(0, f"{m}[0]", "F", 0, 0), modules), label=m) for m in modules]
    handles += [Patch(color=_color(Span(0, "", kind, 0, 0), []), label=SPAN_KINDS[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, min(8, len(handles))), frameon=False)
    return figure


def save_timelines(timelines: Mapping[str, Timeline], path: Path, lanes: Lanes | None = None) -> None:
    """Writes the picture in the format of the path's suffix (.png, .svg, .pdf)."""
    plot_timelines(timelines, lanes).savefig(path, dpi=150)


def _bubble_fraction(timeline: Timeline, groups: Sequence[Sequence[int]]) -> float:
    """Over all ranks that the lanes stand for."""
    available = sum(map(len, groups)) * timeline.iteration_time_s
    busy_s = sum(len(ranks) * timeline.busy_s[ranks[0]] for ranks in groups)
    return 1.0 - busy_s / available if available else 0.0


def _draw(
    axis: Axes,
    timeline: Timeline,
    groups: Sequence[Sequence[int]],
    modules: list[str],
    unit_s: float,
    *,
    narrowest_label_s: float,
) -> None:
    lane_of = {ranks[0]: lane for lane, ranks in enumerate(groups)}
    bars: dict[tuple[int, tuple[float, float, float], bool], list[tuple[float, float]]] = defaultdict(list)
    labels = []
    for span in timeline.spans:
        if span.kind in LIGHTNESS and span.rank in lane_of:
            start = (span.start - timeline.start_s) / unit_s
            length = (span.end - span.start) / unit_s
            lane = lane_of[span.rank]
            bars[lane, _color(span, modules), span.kind in BUSY_KINDS].append((start, length))
            if span.kind in "FBIW" and span.end - span.start >= narrowest_label_s:
                labels.append((start + length / 2, lane, span.name))
    for (lane, color, busy), intervals in bars.items():
        # Reductions overlap with the computation: they are thin lines below it.
        below, height = (lane - 0.4, 0.7) if busy else (lane + 0.32, 0.12)
        axis.broken_barh(intervals, (below, height), facecolors=color, edgecolor="white", linewidth=0.4)
    if len(labels) <= MAX_LABELS:
        for x, lane, name in labels:
            label = axis.text(x, lane - 0.05, name.rpartition(".")[2], ha="center", va="center", fontsize=6)
            label.set_in_layout(False)
    axis.set_yticks(range(len(groups)), [lane_name(ranks) for ranks in groups])
    axis.set_ylim(len(groups) - 0.4, -0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _color(span: Span, modules: list[str]) -> tuple[float, float, float]:
    """The module's hue (grey if it is not in `modules`) with the lightness of the span's kind."""
    lightness = LIGHTNESS[span.kind]
    if span.module not in modules:
        return (lightness, lightness, lightness)
    hue = (0.58 + modules.index(span.module) / max(1, len(modules))) % 1.0
    return colorsys.hls_to_rgb(hue, lightness, 0.55)


def plot_memory(memory: Mapping[str, Sequence[MemoryCurve]], *, limit_bytes: float | None = None) -> Figure:
    """Draws each rank's memory over time, by title. `limit_bytes`: the memory that a rank may use."""
    figure = Figure(figsize=(12, 1.0 + 3.2 * len(memory)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(memory), sharex=True, squeeze=False)[:, 0]
    for axis, (title, curves) in zip(axes, memory.items(), strict=True):
        _draw_memory_picture(axis, curves, limit_bytes)
        peak = max((curve.peak_bytes for curve in curves), default=0)
        axis.set_title(f"{title}: peak {peak / 2**30:.3g} GiB", loc="left")
        axis.set_ylabel("GiB")
    axes[-1].set_xlabel("s")
    return figure


def save_memory(memory: Mapping[str, Sequence[MemoryCurve]], path: Path, *, limit_bytes: float | None = None) -> None:
    """Writes the picture in the format of the path's suffix (.png, .svg, .pdf)."""
    plot_memory(memory, limit_bytes=limit_bytes).savefig(path, dpi=150)


def _draw_memory_picture(axis: Axes, curves: Sequence[MemoryCurve], limit_bytes: float | None) -> None:
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


def plot_data_stats(stats: DataStats) -> Figure:
    """Draws three panels: the distributions of tokens and the ratios of work (thesis Figures 4.3 and 4.5), and the
    bubble under each assignment."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    tokens, ratios, bubbles = figure.subplots(1, 3)
    _draw_tokens(tokens, stats)
    _draw_ratios(ratios, stats)
    _draw_bubbles(bubbles, stats)
    for axis in (tokens, ratios, bubbles):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def save_data_stats(stats: DataStats, path: Path) -> None:
    """Writes the picture in the format of the path's suffix (.png, .svg, .pdf)."""
    plot_data_stats(stats).savefig(path, dpi=150)


def _draw_tokens(axis: Axes, stats: DataStats) -> None:
    for name, module in stats.modules.items():
        values = np.sort(module.own_tokens[module.tokens > 0])
        if len(values):
            share = np.arange(1, len(values) + 1) / len(values)
            axis.step(values, share, where="post", label=f"{name} ({module.share_of_samples:.0%} of samples)")
    smallest, largest = axis.get_xlim()
    if largest > LOG_SCALE_RATIO * max(smallest, 1):
        axis.set_xscale("log")
    axis.set_xlabel("tokens of a sample")
    axis.set_ylabel("share of the samples with tokens")
    axis.set_ylim(0, 1.02)
    axis.set_title("tokens", loc="left")
    axis.legend(fontsize=7)


def _draw_ratios(axis: Axes, stats: DataStats) -> None:
    for name, ratio in stats.ratios.items():
        sizes = list(ratio.by_batch_size)
        low, middle, high = (
            [float(np.quantile(values, q)) for values in ratio.by_batch_size.values()] for q in (0.05, 0.5, 0.95)
        )
        (line,) = axis.plot(sizes, middle, label=name)
        axis.fill_between(sizes, low, high, color=line.get_color(), alpha=0.25, linewidth=0)
        axis.axhline(ratio.whole, color=line.get_color(), linestyle=":", linewidth=1)
    if stats.profiling_size is not None:
        axis.axvline(stats.profiling_size.num_samples, color="black", linestyle="--", linewidth=1, label="b_min")
    axis.axvline(stats.global_batch_size, color="grey", linewidth=1, label="global batch")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("samples of a batch")
    axis.set_title("encoder's work over the language model's, 5% to 95%", loc="left", fontsize=9)
    axis.legend(fontsize=7)


def _draw_bubbles(axis: Axes, stats: DataStats) -> None:
    names = list(stats.assignments)
    shares = [100 * each.bubble_fraction for each in stats.assignments.values()]
    colors = ["tab:orange" if name == stats.plan.assignment else "tab:blue" for name in names]
    bars = axis.barh(names, shares, color=colors)
    times = [f"{each.iteration_time_s * 1e3:.4g} ms" for each in stats.assignments.values()]
    axis.bar_label(bars, labels=times, padding=3, fontsize=7)
    axis.set_xlim(0, 1.25 * max([*shares, 1.0]))
    axis.invert_yaxis()
    axis.set_xlabel("predicted bubble, % of the ranks' time")
    axis.set_title("assignments; orange: the plan's", loc="left")
