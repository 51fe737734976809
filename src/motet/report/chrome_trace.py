"""A timeline as a trace in Chrome's event format, for ui.perfetto.dev or chrome://tracing.

Ranks are processes. Computation is a thread of complete events ("X"); messages and reductions, which overlap, are
asynchronous events ("b" and "e") of the rank that sends or takes part. Memory is a counter ("C") of each rank. Times
are in microseconds, as the format has it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from motet.timeline import BUSY_KINDS, SPAN_KINDS, Lanes, MemoryCurve, Timeline, lane_name, lanes_by_title

Memory = Mapping[str, Sequence[MemoryCurve]]
"""By title, of each rank; titles without may be left out."""


def trace_events(
    timelines: Mapping[str, Timeline], memory: Memory | None = None, lanes: Lanes | None = None
) -> list[dict[str, Any]]:
    """The events of the timelines by title, each title's ranks as processes of their own."""
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
    """Writes one JSON file with the traces of all the timelines."""
    events = trace_events(timelines, memory, lanes)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
