"""A planner, a schedule, an assignment policy and a data format are each added with one file or function and one entry.

The files stand in a temporary package; a run file then names what they add."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from tiny_run import TINY_RUN, write_tiny_run

from motet.balancing.policies import ASSIGNMENTS
from motet.cli.main import main
from motet.data.formats.registry import FILE_FORMATS, open_conversations
from motet.planner.registry import PLANNERS, Planner
from motet.schedule.generators import GENERATORS

FILES = {
    "planner": '''
from motet.planner.layouts.layout import build_plan
from motet.planner.problem import Degrees


def one_stage_each(problem, *, placement=None):
    """Every module is one stage; data parallelism takes the other devices."""
    return build_plan(problem, dict.fromkeys(problem.modules, Degrees()), planner="one_stage_each")
''',
    "schedule": '''
from motet.schedule.generators.list_schedule import list_schedule


def forwards_first(routes, costs=None, *, memory=None):
    """All forwards come first, in the order in which the list scheduler finds them."""
    return list_schedule(routes, costs, memory=memory, all_forwards_first=True)
''',
    "policy": '''
from motet.assignment.batch_assignment import assignment_of_shares, cut_evenly


def reversed_order(plan, samples, works):
    """The last sample comes first."""
    return assignment_of_shares(plan, samples, cut_evenly(plan, list(range(len(samples)))[::-1]))
''',
    "text_lines": '''
import hashlib

from motet.data.example import Example, Message


class TextLines:
    """A question and its answer on each line, parted by a tab."""

    notes = ()

    def __init__(self, reader):
        text = reader.file.read_text()
        self.lines = [line.split("\\t") for line in text.splitlines()]
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        question, answer = self.lines[index]
        return Example(str(index), (Message("user", question), Message("assistant", answer)))
''',
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    folder = tmp_path / "added_to_motet"
    folder.mkdir()
    for name, text in {"__init__": "", **FILES}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = {name: importlib.import_module(f"added_to_motet.{name}") for name in FILES}
    for name in [name for name in sys.modules if name.partition(".")[0] == "added_to_motet"]:
        monkeypatch.delitem(sys.modules, name)
    return modules


def test_a_run_file_names_what_is_added(
    package: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PLANNERS, "one_stage_each", Planner(plan=package["planner"].one_stage_each))
    monkeypatch.setitem(GENERATORS, "forwards_first", package["schedule"].forwards_first)
    monkeypatch.setitem(ASSIGNMENTS, "reversed", package["policy"].reversed_order)
    run_file = write_tiny_run(tmp_path)
    added = {"planner": "one_stage_each", "schedule": "forwards_first", "assignment": "reversed"}
    run_file.write_text(yaml.safe_dump({**TINY_RUN, "parallel": {**added, "num_microbatches": 2}}))
    plan_file = tmp_path / "plan.json"
    assert main(["simulate", str(run_file), "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["planner"] == "one_stage_each"
    assert main(["plan", str(run_file), "--out", str(plan_file)]) == 0
    plan = json.loads(plan_file.read_text())
    assert (plan["schedule"], plan["assignment"]) == ("forwards_first", "reversed")
    assert main(["verify", str(run_file), "--dtype", "float64", "--json"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("key", ["planner", "schedule", "assignment"])
def test_what_is_not_added_is_refused(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(write_tiny_run(tmp_path)), "--set", f"parallel.{key}=one_stage_each"]) == 2
    assert f"parallel.{key}: " in capsys.readouterr().err


def test_a_format_is_found_by_its_suffix(
    package: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FILE_FORMATS, ".tsv", package["text_lines"].TextLines)
    (tmp_path / "questions.tsv").write_text("How many?\tThree.\nWhich?\tThis one.\n")
    examples = open_conversations([str(tmp_path / "*.tsv")], {})
    assert [message.content for message in examples[1].messages] == ["Which?", "This one."]
