"""The failure log is told of what happened, and never the reason why training ends."""

import json
from pathlib import Path

import pytest

from motet.resilience.failure_log import FAILURES, write_end
from motet.resilience.membership import Change


def test_an_end_is_one_line(tmp_path: Path) -> None:
    write_end(tmp_path / "run", [Change("lost", 1, "it burned", 17.0)], "started anew")
    [line] = (tmp_path / "run" / FAILURES).read_text().splitlines()
    assert json.loads(line) == {
        "changes": [{"kind": "lost", "node": 1, "how": "it burned", "noticed_at": 17.0}],
        "done": "started anew",
    }


def test_a_log_that_cannot_be_written_is_told_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("a file in its place")
    write_end(tmp_path / "run", [], "started anew")
    assert "failures.jsonl cannot be written (File exists): started anew" in capsys.readouterr().err
