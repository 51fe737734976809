"""A picture of a run's data: how tokens are distributed, how the modules' work relates, how long ranks would idle."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from motet.report.data_stats import DataStats

WIDE = 50
"""Tokens that differ by this factor are drawn on a logarithmic axis."""


def plot_data_stats(stats: DataStats) -> Figure:
    """Three panels, as thesis Figures 4.3 and 4.5, and the idle time of each way to cut batches."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    tokens, ratios, idle = figure.subplots(1, 3)
    _draw_tokens(tokens, stats)
    _draw_ratios(ratios, stats)
    _draw_idle(idle, stats)
    for axis in (tokens, ratios, idle):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def save_data_stats(stats: DataStats, path: Path) -> None:
    """Writes the picture; the file's suffix (.png, .svg, .pdf) says how."""
    plot_data_stats(stats).savefig(path, dpi=150)


def _draw_tokens(axis: Axes, stats: DataStats) -> None:
    for name, module in stats.modules.items():
        values = np.sort(module.own_tokens[module.tokens > 0])
        if len(values):
            share = np.arange(1, len(values) + 1) / len(values)
            axis.step(values, share, where="post", label=f"{name} ({module.share_of_samples:.0%} of samples)")
    smallest, largest = axis.get_xlim()
    if largest > WIDE * max(smallest, 1):
        axis.set_xscale("log")
    axis.set_xlabel("tokens of a sample")
    axis.set_ylabel("share of the samples that have some")
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


def _draw_idle(axis: Axes, stats: DataStats) -> None:
    names = list(stats.assignments)
    shares = [100 * each.bubble_fraction for each in stats.assignments.values()]
    colors = ["tab:orange" if name == stats.plan.assignment else "tab:blue" for name in names]
    bars = axis.barh(names, shares, color=colors)
    times = [f"{each.iteration_time_s * 1e3:.4g} ms" for each in stats.assignments.values()]
    axis.bar_label(bars, labels=times, padding=3, fontsize=7)
    axis.set_xlim(0, 1.25 * max([*shares, 1.0]))
    axis.invert_yaxis()
    axis.set_xlabel("% of the ranks' time idle, predicted")
    axis.set_title("cuts of the batch; orange: the plan's", loc="left")
