"""Rows, tables, their errors, and the command that shows them."""

import json
import sys
from types import ModuleType

import pytest

import papers
from papers.__main__ import main
from papers.tables import Row, Table, as_json, as_text


def row(published: float | None, ours: float, *, held_out: bool = True) -> Row:
    return Row("a number", published, ours, "nothing", held_out, "none")


def test_ratio_is_ours_over_the_published_number() -> None:
    assert row(4.0, 5.0).ratio == 1.25
    assert row(None, 5.0).ratio is None


def test_only_held_out_rows_count_in_the_error() -> None:
    table = Table("Table 1", (row(10.0, 9.0), row(10.0, 20.0, held_out=False), row(None, 3.0), row(10.0, 10.5)))
    assert table.max_rel_err == pytest.approx(0.1)
    assert Table("Table 2", (row(10.0, 20.0, held_out=False),)).max_rel_err is None


def test_labels() -> None:
    fitted, held_out = row(10.0, 9.0, held_out=False), row(10.0, 9.0)
    assert (fitted.label, held_out.label) == ("fitted", "held out")
    informed = Table("Table 1", (fitted, held_out)).informed()
    assert [each.label for each in informed.rows] == ["fitted", "reading chosen with knowledge of it"]
    assert informed.max_rel_err is None


def test_json_has_what_the_design_asks_for() -> None:
    (table,) = as_json("some", [Table("Table 1", (row(10.0, 9.0),))])["tables"]
    assert set(table) >= {"table", "rows", "max_rel_err"}
    assert set(table["rows"][0]) == {
        "what",
        "published",
        "ours",
        "ratio",
        "calibrated_on",
        "held_out",
        "informed",
        "label",
        "assumptions",
    }


def test_text_shows_every_number_and_note() -> None:
    text = as_text(as_json("some", [Table("Table 7", (row(10.0, 9.0), row(None, 3.25)), "the paper omits it")]))
    for shown in ("Table 7", "10", "0.9", "3.25", "10.0%", "the paper omits it"):
        assert shown in text


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_paper")
    module.tables = lambda: [Table("Table 1", (row(10.0, 9.0),))]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_paper", module)
    monkeypatch.setattr(papers, "PAPERS", {"first": "a_paper", "second": "a_paper"})


@pytest.mark.usefixtures("paper")
def test_one_paper_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["first", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["paper"] == "first"
    assert shown["tables"][0]["max_rel_err"] == pytest.approx(0.1)


@pytest.mark.usefixtures("paper")
def test_all_papers_keep_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["all", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["paper"] == "all"
    assert [table["paper"] for table in shown["tables"]] == ["first", "second"]


def test_unknown_paper_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nature"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "nature" in error
    assert "cornstarch" in error
