import json
from pathlib import Path

import numpy as np

from motet.report.timelines import save_trace, trace_events
from motet.timeline import MemoryCurve, Span, Timeline

TIMELINE = Timeline(
    (
        Span(0, "llm[0].0F0", "F", 5.0, 5.5),
        Span(0, "llm[0].0:0->llm[0].1:0 0>1", "message", 5.5, 5.75),
        Span(1, "llm[0].1F0", "F", 5.75, 6.0),
    )
)


def test_computation_is_complete_events_in_microseconds() -> None:
    events = [event for event in trace_events({"predicted": TIMELINE}) if event["ph"] == "X"]
    assert [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events] == [
        ("llm[0].0F0", 0, 0.0, 500_000.0),
        ("llm[0].1F0", 1, 750_000.0, 250_000.0),
    ]


def test_messages_are_asynchronous_events_that_begin_and_end() -> None:
    begin, end = (event for event in trace_events({"predicted": TIMELINE}) if event["ph"] in "be")
    assert (begin["ph"], begin["ts"], end["ph"], end["ts"]) == ("b", 500_000.0, "e", 750_000.0)
    assert begin["id"] == end["id"]
    assert begin["cat"] == end["cat"] == "message"


def test_several_timelines_have_processes_of_their_own() -> None:
    events = trace_events({"predicted": TIMELINE, "measured": TIMELINE})
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "predicted rank 0", 1: "predicted rank 1", 2: "measured rank 0", 3: "measured rank 1"}
    assert {e["pid"] for e in events if e["ph"] == "X"} == {0, 1, 2, 3}
    identities = [e["id"] for e in events if e["ph"] == "b"]
    assert len(set(identities)) == len(identities) == 2


def test_the_file_is_one_json_object(tmp_path: Path) -> None:
    save_trace({"predicted": TIMELINE}, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["traceEvents"] == trace_events({"predicted": TIMELINE})


def test_memory_is_a_counter_of_each_rank() -> None:
    curves = [MemoryCurve(np.array([5.0, 5.5]), np.array([7, 9])), MemoryCurve(np.array([5.0]), np.array([3]))]
    events = trace_events({"measured": TIMELINE, "predicted": TIMELINE}, {"predicted": curves})
    counters = [(e["pid"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters == [(2, 0.0, {"bytes": 7}), (2, 500_000.0, {"bytes": 9}), (3, 0.0, {"bytes": 3})]


def test_only_ranks_that_stand_for_others_are_traced() -> None:
    curves = [MemoryCurve(np.array([5.0]), np.array([size])) for size in (7, 3)]
    events = trace_events({"predicted": TIMELINE}, {"predicted": curves}, {"predicted": [(1, 4)]})
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["predicted rank 1 and 1 alike"]
    assert {e["pid"] for e in events} == {1}
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C"] == [3]
