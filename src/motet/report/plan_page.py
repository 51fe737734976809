"""One HTML file, readable offline, with the report of `motet.report.expert_report`: tables, and pictures as SVG."""

import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from motet.report.expert_report import CAUSES, report_values_of_link

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 4px 8px; border-bottom: 1px solid #eee; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.chosen { background: #eef6ee; } tr.misfit { color: #a33; }
.figures { display: flex; flex-wrap: wrap; gap: 1em 2em; margin: 1em 0; }
.figures div b { display: block; font-size: 1.4em; }
svg { max-width: 100%; height: auto; }
"""
COLORS = {
    "compute": "#4878a8",
    "optimizer": "#8a8ac0",
    "tensor_parallel": "#e0a040",
    "warm_up": "#d0d0d0",
    "cool_down": "#b8b8b8",
    "imbalance": "#9a9a9a",
    "reduction": "#d06060",
    "gather": "#c080a0",
}
MEMORY_COLORS = {
    "weights": "#4878a8",
    "gradients": "#e0a040",
    "moments": "#70a070",
    "gathered": "#c080a0",
    "recomputed": "#b0a070",
    "activations": "#d06060",
    "logits": "#8a6aa8",
    "messages": "#999999",
    "static": "#4878a8",
}
GIB = 2**30


def plan_page(values: Mapping[str, Any]) -> str:
    """The page of a report."""
    chosen = values["plans"][0]
    devices = values["devices"]
    sections = [
        f"<h1>Plan for {devices['given']} {escape(devices['name'])}</h1>",
        _key_figures(values, chosen),
        "<h2>Why this plan</h2>",
        *(f"<p>{escape(sentence)}</p>" for sentence in values["why"]),
        "<h2>The plans compared</h2>",
        _plan_table(values["plans"]),
        "<h2>Memory against time</h2>",
        "<p>Each point is a simulated plan. The line joins plans of which no other is both faster and smaller.</p>",
        _pareto(values),
        "<h2>Where the time goes</h2>",
        _bars(_rank_seconds(values["ranks"]), COLORS, CAUSES, "ms", None),
        "<p>Communication that computation hides costs nothing; exposed seconds lie within the bubbles, or within "
        "computation as exchanges.</p>",
        _rank_table(values["ranks"], values["num_rank_groups"]),
        "<h2>Memory by kind</h2>",
        "<p>What each rank holds at the moment when it holds most.</p>",
        _bars(
            [(_label(rank), {k: v / GIB for k, v in rank["memory_bytes"].items()}) for rank in values["ranks"]],
            MEMORY_COLORS,
            {kind: kind for kind in MEMORY_COLORS},
            "GiB",
            values["usable_memory_bytes"] / GIB,
        ),
        _memory_table(values["ranks"]),
        "<h2>Sensitivity</h2>",
        _sensitivity_table(values["sensitivity"], values["plans"]),
        "<h2>How far to believe it</h2>",
        f"<p>{escape(values['accuracy']['text_of_it'])}.</p>",
        f"<p>Costs: {escape(', '.join(values['costs'].values()))}. Simulated step by step; temporary memory within an "
        "operation and fragmentation are not simulated, and a tenth of each device is left free for them.</p>",
    ]
    data = json.dumps(values).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Plan</title><style>{STYLE}</style></head>'
        f'<body>{"".join(sections)}<script type="application/json" id="report">{data}</script></body></html>\n'
    )


def _key_figures(values: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    hours = values["gpu_hours"]
    figures = [
        (f"{chosen['iteration_time_s'] * 1e3:.4g} ms", "a step"),
        (f"{chosen['tokens_per_s_per_device']:,.0f}", "tokens/s per device"),
        (f"{chosen['samples_per_s']:.4g}", "samples/s"),
        (_percent(chosen["mfu"]), "MFU"),
        (_percent(chosen["hfu"]), "HFU"),
        (f"{chosen['bubble_fraction']:.1%}", "bubble"),
        (f"{chosen['peak_memory_bytes'] / GIB:.2f} of {values['usable_memory_bytes'] / GIB:.2f} GiB", "peak memory"),
        (f"{hours['used']:,.4g}", f"device-hours for {hours['steps']} steps"),
    ]
    if hours["reserved"] > hours["used"]:
        figures.append((f"{hours['reserved']:,.4g}", "with the idle devices"))
    if values["lower_bound_s"] is not None and values["lower_bound_s"] < float("inf"):
        figures.append((f"{values['lower_bound_s'] * 1e3:.4g} ms", "no plan takes less"))
    blocks = "".join(f"<div><b>{escape(value)}</b>{escape(what)}</div>" for value, what in figures)
    return f'<div class="figures">{blocks}</div>'


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _plan_table(plans: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "",
        "found by",
        "differences from the first",
        "step",
        "slower by",
        "peak",
        "bubble",
        "tokens/s",
        "MFU",
        "HFU",
    )
    rows = []
    for number, plan in enumerate(plans, 1):
        told = plan["differences"] if number > 1 else plan["features"]
        words = "<br>".join(f"{escape(name)}: {escape(value)}" for name, value in told.items()) or "groups of ranks"
        cells = [
            ("", str(number)),
            ("", escape(plan["planner"])),
            ("", words),
            ("number", f"{plan['iteration_time_s'] * 1e3:.4g} ms"),
            ("number", f"{plan['slower_by']:+.1%}" if number > 1 else ""),
            ("number", f"{plan['peak_memory_bytes'] / GIB:.2f} GiB" + ("" if plan["fits"] else "<br>does not fit")),
            ("number", f"{plan['bubble_fraction']:.1%}"),
            ("number", f"{plan['tokens_per_s_per_device']:,.0f}"),
            ("number", _percent(plan["mfu"])),
            ("number", _percent(plan["hfu"])),
        ]
        kind = "chosen" if number == 1 else "" if plan["fits"] else "misfit"
        rows.append((kind, cells))
    return _table(head, rows)


def _rank_seconds(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, float]]]:
    return [(_label(rank), {cause: s * 1e3 for cause, s in rank["seconds"].items()}) for rank in ranks]


def _rank_table(ranks: Sequence[Mapping[str, Any]], num_groups: int) -> str:
    head = ("ranks", "layers", "computation", "exchanges within it", "bubble by cause", "communication by link")
    rows = []
    for rank in ranks:
        seconds = rank["seconds"]
        bubbles = ("warm_up", "cool_down", "imbalance", "reduction", "gather")
        causes = ", ".join(f"{CAUSES[cause]} {seconds[cause] * 1e3:.1f} ms" for cause in bubbles if seconds[cause] > 0)
        cells = [
            ("", _ranks(rank["ranks"])),
            ("", escape(rank["holds"])),
            ("number", f"{(seconds['compute'] + seconds['optimizer']) * 1e3:.1f} ms"),
            ("number", f"{seconds['tensor_parallel'] * 1e3:.1f} ms"),
            ("", escape(causes) or "none"),
            ("", escape(report_values_of_link(rank))),
        ]
        rows.append(("", cells))
    left = num_groups - len(ranks)
    return _table(head, rows) + (f"<p>{left} more groups of ranks are not shown.</p>" if left else "")


def _memory_table(ranks: Sequence[Mapping[str, Any]]) -> str:
    kinds = [kind for kind in MEMORY_COLORS if any(kind in rank["memory_bytes"] for rank in ranks)]
    rows = []
    for rank in ranks:
        sizes = rank["memory_bytes"]
        numbers = [("number", f"{sizes.get(kind, 0) / GIB:.2f}") for kind in kinds]
        whole = ("number", f"{sum(sizes.values()) / GIB:.2f}")
        rows.append(("", [("", _ranks(rank["ranks"])), ("", escape(rank["holds"])), *numbers, whole]))
    return _table(("ranks", "layers", *kinds, "GiB in all"), rows, first_number=2)


def _sensitivity_table(found: Sequence[Mapping[str, Any]], plans: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return "<p>Nothing can be varied.</p>"
    number = len(found[0]["iteration_times_s"])
    rows = []
    for each in found:
        changes = [
            f"{seconds * 1e3:.4g} ms ({seconds / plan['iteration_time_s'] - 1:+.1%})"
            for seconds, plan in zip(each["iteration_times_s"], plans, strict=False)
        ]
        cells = [("", f"{escape(each['knob'])} {each['change']:+.0%}"), *(("number", text) for text in changes)]
        rows.append(("", cells))
    return _table(("speed of", *(f"plan {i + 1}" for i in range(number))), rows, first_number=1)


def _table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[str, str]]]], first_number: int = 99) -> str:
    """`rows`: each with its class, and cells with theirs; cells are HTML. `first_number`: first column of numbers."""
    of_numbers = {i for _, cells in rows for i, (kind, _) in enumerate(cells) if kind == "number"}
    titles = "".join(
        f"<th{' class=number' if i in of_numbers or i >= first_number else ''}>{escape(title)}</th>"
        for i, title in enumerate(head)
    )
    body = "".join(
        f'<tr class="{kind}">' + "".join(f'<td class="{own}">{text}</td>' for own, text in cells) + "</tr>"
        for kind, cells in rows
    )
    return f"<table><tr>{titles}</tr>{body}</table>"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return str(ranks[0])
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return f"{ranks[0]}, {ranks[1]}, ... ({len(ranks)} ranks)" if len(ranks) > 2 else f"{ranks[0]}, {ranks[1]}"


def _label(rank: Mapping[str, Any]) -> str:
    return _ranks(rank["ranks"])


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    picture = text.getvalue()
    return picture[picture.index("<svg") :]


def _bars(
    lanes: Sequence[tuple[str, Mapping[str, float]]],
    colors: Mapping[str, str],
    names: Mapping[str, str],
    unit: str,
    limit: float | None,
) -> str:
    """A bar for each lane, stacked by kind. `limit`: drawn as a line."""
    figure = Figure(figsize=(10, 1.3 + 0.26 * len(lanes)), layout="constrained")
    axis = figure.subplots()
    labels = [label for label, _ in lanes]
    left = [0.0] * len(lanes)
    for kind, color in colors.items():
        values = [parts.get(kind, 0.0) for _, parts in lanes]
        if any(value > 0 for value in values):
            axis.barh(range(len(lanes)), values, left=left, color=color, label=names[kind], height=0.8)
            left = [a + b for a, b in zip(left, values, strict=True)]
    if limit is not None and limit < 2 * max(left):
        axis.axvline(limit, color="black", linestyle="--", linewidth=1, label="usable")
    axis.set_yticks(range(len(lanes)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    axis.set_ylabel("ranks")
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.01)
    figure.legend(loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    return _svg(figure)


def _pareto(values: Mapping[str, Any]) -> str:
    points, limit = values["points"], values["usable_memory_bytes"] / GIB
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axis = figure.subplots()
    for fits, color, label in ((True, "#4878a8", "fits"), (False, "#d06060", "does not fit")):
        own = [point for point in points if point["fits"] is fits]
        if own:
            times = [point["iteration_time_s"] * 1e3 for point in own]
            axis.scatter(times, [point["peak_memory_bytes"] / GIB for point in own], s=18, color=color, label=label)
    front: list[tuple[float, float]] = []
    for seconds, size in sorted((p["iteration_time_s"] * 1e3, p["peak_memory_bytes"] / GIB) for p in points):
        if not front or size < front[-1][1]:
            front.append((seconds, size))
    axis.step(*zip(*front, strict=True), where="post", color="#666666", linewidth=1)
    chosen = values["plans"][0]
    place = chosen["iteration_time_s"] * 1e3, chosen["peak_memory_bytes"] / GIB
    axis.scatter(*place, s=90, facecolors="none", edgecolors="#207020", linewidths=2, label="chosen")
    axis.axhline(limit, color="black", linestyle="--", linewidth=1, label="usable memory")
    if values["lower_bound_s"] is not None and values["lower_bound_s"] < float("inf"):
        axis.axvline(values["lower_bound_s"] * 1e3, color="#207020", linestyle=":", linewidth=1, label="lower bound")
    if max(p["iteration_time_s"] for p in points) > 10 * min(p["iteration_time_s"] for p in points):
        axis.set_xscale("log")
    if max(p["peak_memory_bytes"] for p in points) > 20 * min(p["peak_memory_bytes"] for p in points):
        axis.set_yscale("log")
    axis.set_xlabel("step [ms]")
    axis.set_ylabel("peak memory of the fullest rank [GiB]")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    return _svg(figure)
