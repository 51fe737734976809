"""Two files of planned results are compared; what a file has is not planned again."""

import json
from pathlib import Path

import pytest

from benchmarks import planned_results

OPTIONS = ["--only", "VLM-S with the small|examples: tiny", "--planners", "even,distmm,run file"]


@pytest.mark.campaign
def test_differences_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configurations = planned_results.problems()  # Making them takes seconds.
    monkeypatch.setattr(planned_results, "problems", lambda: configurations)
    own, other = tmp_path / "own.json", tmp_path / "other.json"
    assert planned_results.main([str(own), *OPTIONS]) == 0
    results = json.loads(own.read_text())
    (what,) = (name for name in results if name.startswith("Cornstarch"))
    assert set(results) == {what, "examples: tiny.yaml"}
    assert results["examples: tiny.yaml"]["run file"]["iteration_time_s"] > 0
    assert "refused" in results[what]["distmm"]

    def compare() -> tuple[int, str]:
        other.write_text(json.dumps(results))
        return planned_results.main([str(own), *OPTIONS, "--compare", str(other)]), capsys.readouterr().out

    monkeypatch.setattr(planned_results, "make_plan", None)  # Nothing is planned again.
    results[what]["distmm"]["refused"] = "in other words"
    assert compare() == (0, "no differences\n")
    results[what]["even"]["iteration_time_s"] *= 1 + 1e-13
    assert compare()[0] == 0
    results[what]["even"]["iteration_time_s"] *= 1 + 1e-11
    code, printed = compare()
    assert code == 1
    assert printed.startswith(f"{what}: even: iteration_time_s: ")
    del results[what]["even"]
    assert compare() == (1, f"{what}: even: only in this file\n")
