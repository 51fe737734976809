"""Timelines as text for a terminal, and as traces for ui.perfetto.dev or chrome://tracing.

A text has one line per rank, time from left to right. Each module is a letter, lower case where it computes forward and
upper case where it computes backward; dots are bubbles. Limit: a column shows the action that takes most of its time,
so actions much shorter than a column do not appear.

A trace is in Chrome's event format, times in microseconds. Ranks are processes. Computation is a thread of complete
events ("X"). Messages and reductions, which overlap, are asynchronous events ("b" and "e") of the rank that sends or
takes part. Memory is a counter ("C") of each rank.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from motet.timeline import BUSY_KINDS, SPAN_KINDS, Lanes, MemoryCurve, Timeline, lane_name, lanes_by_title

BUBBLE = "."
OPTIMIZER = "*"

Memory = Mapping[str, Sequence[MemoryCurve]]
"""Memory of each rank, by title; titles without it may be left out."""


def timeline_text(timeline: Timeline, width: int = 100) -> str:
    """One line of `width` columns per rank, and a legend."""
    modules = sorted({span.module for span in timeline.spans if span.kind in "FBIW"})
    letters = _letters(modules)
    column_s = timeline.iteration_time_s / width
    shares: list[dict[tuple[int, str], float]] = [defaultdict(float) for _ in range(timeline.num_ranks)]
    for span in timeline.spans:
        if span.kind not in BUSY_KINDS or not column_s:
            continue
        letter = OPTIMIZER if span.kind == "optimizer" else letters[span.module]
        text = letter.upper() if span.kind in "BIW" else letter
        start, end = span.start - timeline.start_s, span.end - timeline.start_s
        for column in range(int(start / column_s), min(width, int(end / column_s) + 1)):
            shares[span.rank][column, text] += min(end, (column + 1) * column_s) - max(start, column * column_s)
    digits = len(str(timeline.num_ranks - 1))
    lines = [f"rank {rank:>{digits}} |{_line(shares[rank], width, column_s)}|" for rank in range(timeline.num_ranks)]
    legend = ", ".join(f"{letters[module]} {module}" for module in modules)
    return "\n".join([*lines, f"{legend}; capital: backward; {OPTIMIZER} optimizer; {BUBBLE} bubble"])


def _line(share_s: dict[tuple[int, str], float], width: int, column_s: float) -> str:
    line = []
    for column in range(width):
        busy = {text: seconds for (at, text), seconds in share_s.items() if at == column}
        bubble_s = column_s - sum(busy.values())
        longest = max(busy, key=lambda text: busy[text], default=BUBBLE)
        line.append(longest if busy and busy[longest] >= bubble_s else BUBBLE)
    return "".join(line)


def _letters(modules: Iterable[str]) -> dict[str, str]:
    """Returns a letter for each module: the first of its name that no other module has."""
    taken: dict[str, str] = {}
    for module in modules:
        free = [c for c in module.lower() + "abcdefghijklmnopqrstuvwxyz" if c.isalpha() and c not in taken.values()]
        taken[module] = free[0] if free else "?"
    return taken


def trace_events(
    timelines: Mapping[str, Timeline], memory: Memory | None = None, lanes: Lanes | None = None
) -> list[dict[str, Any]]:
    """The events of timelines by title, with processes of their own for each title's ranks."""
    events: list[dict[str, Any]] = []
    first_process = 0
    for title, timeline in timelines.items():
        groups = lanes_by_title(timelines, lanes)[title]
        drawn = {ranks[0] for ranks in groups}
        for ranks in groups:
            process = {"pid": first_process + ranks[0], "tid": 0, "ph": "M"}
            events.append(process | {"name": "process_name", "args": {"name": f"{title} {lane_name(ranks)}"}})
            events.append(process | {"name": "process_sort_index", "args": {"sort_index": first_process + ranks[0]}})
        for i, span in enumerate(timeline.spans):
            if span.rank not in drawn:
                continue
            begin = 1e6 * (span.start - timeline.start_s)
            duration = 1e6 * (span.end - span.start)
            event = {
                "name": span.name,
                "cat": SPAN_KINDS[span.kind],
                "pid": first_process + span.rank,
                "tid": 0,
                "ts": begin,
            }
            if span.kind in BUSY_KINDS or span.kind == "wait":
                events.append(event | {"ph": "X", "dur": duration, "args": {"module": span.module}})
            else:
                identity = f"{first_process}.{i}"
                events.append(event | {"ph": "b", "id": identity})
                events.append(event | {"ph": "e", "id": identity, "ts": begin + duration})
        curves = (memory or {}).get(title, ())
        for rank in sorted(drawn) if curves else ():
            curve = curves[rank]
            counter = {"name": "memory", "ph": "C", "pid": first_process + rank}
            moments = zip(curve.times_s.tolist(), curve.bytes_held.tolist(), strict=True)
            events += [counter | {"ts": 1e6 * (at - timeline.start_s), "args": {"bytes": held}} for at, held in moments]
        first_process += timeline.num_ranks
    return events


def save_trace(
    timelines: Mapping[str, Timeline], path: Path, memory: Memory | None = None, lanes: Lanes | None = None
) -> None:
    """Writes one JSON file with the traces of all timelines."""
    events = trace_events(timelines, memory, lanes)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
