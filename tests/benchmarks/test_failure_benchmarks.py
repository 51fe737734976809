"""The benchmarks of templates and failures run, and say what they promise."""

from pathlib import Path

import pytest

from benchmarks import failures, templates


@pytest.mark.campaign
def test_templates(tmp_path: Path) -> None:
    text = templates.main(["--runs", "1", "--problems", "3"]).write(tmp_path).read_text()
    assert text.count("x) |") == 36
    assert "6,843,277,824 combinations" in text


@pytest.mark.campaign
def test_failures(tmp_path: Path) -> None:
    trace = tmp_path / "made.csv"
    trace.write_text("".join(f"0,add,n{i}\n" for i in range(12)) + "7200000,remove,n3\n9000000,add,n12\n")
    text = failures.main([str(trace)]).write(tmp_path).read_text()
    assert text.count("| made | ") == 15
    assert text.count("in the published order in") == 1
