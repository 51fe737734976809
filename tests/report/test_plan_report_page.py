"""`motet plan --report`: the report's numbers against the simulation's, and the page."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from mistakes import expect_mistake
from small_problem import small_problem
from tiny_run import write_tiny_run

from motet.cli.main import main
from motet.planner.evaluate import evaluate
from motet.planner.registry import make_plan
from motet.report.plan_report import report_evaluation, report_text
from motet.report.time_of_ranks import times_of_ranks

OPTIONS = ("--set", "parallel.planner=auto", "--set", "parallel.num_microbatches=2", "--set", "cluster.num_devices=4")


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "br", "link"):
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    folder = tmp_path_factory.mktemp("report")
    reports = ["--report", str(folder / "plan.html"), "--report", str(folder / "plan.json")]
    assert main(["plan", str(write_tiny_run(folder)), *OPTIONS, *reports]) == 0
    return (folder / "plan.html").read_text(), json.loads((folder / "plan.json").read_text())


def test_the_page_is_whole_and_needs_no_other_file(written: tuple[str, dict]) -> None:
    text, values = written
    page = Page(text)
    assert page.open == []
    assert all(link.startswith("#") for link in page.links)
    assert json.loads(re.search(r'id="report">(.*?)</script>', text)[1]) == values  # type: ignore[index]


def test_plans_are_in_order_and_all_different(written: tuple[str, dict]) -> None:
    plans = written[1]["plans"]
    assert 1 < len(plans) <= 10
    fitting = [plan["iteration_time_s"] for plan in plans if plan["fits"]]
    assert fitting == sorted(fitting)
    assert plans[0]["differences"] == {}
    assert all(plan["differences"] for plan in plans[1:])
    assert len(written[1]["points"]) >= len(plans)
    assert min(point["iteration_time_s"] for point in written[1]["points"] if point["fits"]) == fitting[0]


def test_causes_add_up_to_the_step_and_kinds_to_the_peak(written: tuple[str, dict]) -> None:
    values = written[1]
    chosen = values["plans"][0]
    for rank in values["ranks"]:
        assert sum(rank["seconds"].values()) == pytest.approx(chosen["iteration_time_s"])
    assert max(sum(rank["memory_bytes"].values()) for rank in values["ranks"]) == chosen["peak_memory_bytes"]
    hours = values["gpu_hours"]
    assert hours["used"] == pytest.approx(4 * chosen["iteration_time_s"] * hours["steps"] / 3600)


def test_faster_assumptions_shorten_the_step(written: tuple[str, dict]) -> None:
    values = written[1]
    step_s = values["plans"][0]["iteration_time_s"]
    of_plan = {(each["knob"], each["change"]): each["iteration_times_s"][0] for each in values["sensitivity"]}
    assert {knob for knob, _ in of_plan} == {"matrix products", "attention", "links"}
    for (knob, change), seconds in of_plan.items():
        assert (seconds <= step_s) if change > 0 else (seconds >= step_s), knob
    assert of_plan["matrix products", 0.1] < step_s < of_plan["matrix products", -0.1]


def test_communication_is_hidden_or_exposed() -> None:
    problem = small_problem(num_devices=4)
    evaluation = evaluate(problem, make_plan(problem, "megatron_balanced"))
    result = evaluation.result
    timeline = result.timeline
    for each in times_of_ranks(evaluation):
        rank = each.ranks[0]
        own = [span for span in timeline.spans if span.rank == rank]
        busy = [(span.start, span.end) for span in own if span.kind in ("F", "B", "I", "W", "optimizer")]
        sent = [
            (begin, end)
            for sender, receiver, begin, end in zip(
                evaluation.program.message_sender,
                evaluation.program.message_receiver,
                result.times.message_start,
                result.times.message_end,
                strict=True,
            )
            if rank in (sender, receiver)
        ]
        sent += [(span.start, span.end) for span in own if span.kind in ("reduce", "gather")]
        exposed, hidden = split_by_sampling(sent, busy)
        found = each.links.get("within a node")
        if not sent:
            assert found is None
            continue
        assert found is not None
        assert found.exposed_s == pytest.approx(exposed, abs=1e-9)
        assert found.hidden_s == pytest.approx(hidden, abs=1e-9)
    assert any(each.links for each in times_of_ranks(evaluation))


def split_by_sampling(used: list[tuple[float, float]], busy: list[tuple[float, float]]) -> tuple[float, float]:
    """Between all moments at which something begins or ends, nothing changes."""
    moments = sorted({moment for pair in used + busy for moment in pair})
    exposed = hidden = 0.0
    for begin, end in pairwise(moments):
        middle = (begin + end) / 2
        if any(a < middle < b for a, b in used):
            is_busy = any(a < middle < b for a, b in busy)
            hidden, exposed = hidden + is_busy * (end - begin), exposed + (not is_busy) * (end - begin)
    return exposed, hidden


def test_memory_by_kind_is_printed() -> None:
    problem = small_problem(num_devices=4)
    values = report_evaluation(evaluate(problem, make_plan(problem, "megatron_balanced")))
    assert [rank for group in values["memory_by_kind"] for rank in group["ranks"]] == [0, 1, 2, 3]
    for group in values["memory_by_kind"]:
        assert sum(group["bytes"].values()) == values["peak_memory_bytes"][group["ranks"][0]]
        assert {"weights", "activations"} <= group["bytes"].keys()
    (header,) = (line for line in report_text(values).splitlines() if line.startswith("memory in MiB"))
    assert header.split()[-1] == "peak"


def test_a_report_is_a_page_or_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = ["plan", write_tiny_run(tmp_path), "--report", str(tmp_path / "plan.pdf")]
    expect_mistake(capsys, wrong, "--report .*plan.pdf: is neither a page nor JSON; give a path that ends with .html")
