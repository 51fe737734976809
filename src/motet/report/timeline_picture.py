"""A picture of timelines: one lane per rank, a colour per module, its shade by what is done; messages are not drawn.
Of ranks that do the same at the same time one can stand for all.

Several timelines (predicted and measured) stand below each other on one time axis. Limit: beyond some thousand spans
the picture is a texture; use the trace (motet.report.chrome_trace) to look closer.
"""

import colorsys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from motet.timeline import BUSY_KINDS, SPAN_KINDS, Lanes, Span, Timeline, lane_name, lanes_by_title

LIGHTNESS = {"F": 0.72, "B": 0.45, "I": 0.52, "W": 0.36, "optimizer": 0.6, "reduce": 0.8, "gather": 0.7}
MAX_LABELS = 400


def plot_timelines(timelines: Mapping[str, Timeline], lanes: Lanes | None = None) -> Figure:
    """The timelines by title."""
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
    """Writes the picture; the file's suffix (.png, .svg, .pdf) says how."""
    plot_timelines(timelines, lanes).savefig(path, dpi=150)


def _bubble_fraction(timeline: Timeline, groups: Sequence[Sequence[int]]) -> float:
    """Of all the ranks that the lanes stand for."""
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
        # Reductions run beside the computation: a thin line below it.
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
    """The module's hue (grey if it is none of `modules`) in the kind's lightness."""
    lightness = LIGHTNESS[span.kind]
    if span.module not in modules:
        return (lightness, lightness, lightness)
    hue = (0.58 + modules.index(span.module) / max(1, len(modules))) % 1.0
    return colorsys.hls_to_rgb(hue, lightness, 0.55)
