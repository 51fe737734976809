"""The run files in examples/ are valid."""

from pathlib import Path

import pytest
from checkout import ROOT

from motet.cli.main import main
from motet.config import load_run_config

EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


def test_there_are_some() -> None:
    assert {path.stem for path in EXAMPLES} >= {"demo", "tiny"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_can_be_read(path: Path) -> None:
    assert load_run_config(path).train.output.startswith("runs/")


SMALL = [path for path in EXAMPLES if "hub:" not in path.read_text() and path.parent.name != "layout"]


@pytest.mark.parametrize("path", SMALL, ids=lambda p: p.stem)
def test_can_be_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(path)]) == 0, capsys.readouterr().err
