"""`make gpu`: its driver, and its steps on CPUs, so that none of them runs for the first time on a GPU."""

import json
from pathlib import Path

import pytest
import torch
from sampling import in_campaigns

from benchmarks.gpu import __main__ as driver
from benchmarks.gpu.steps import Step, steps


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPU_REPORT", str(tmp_path / "report"))
    monkeypatch.delenv("GPU_REHEARSAL", raising=False)
    return tmp_path / "report"


def test_without_a_gpu_it_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert driver.main([]) == 2
    assert capsys.readouterr().err == (
        "make gpu: torch finds no GPU on this machine; GPU_REHEARSAL=1 rehearses on CPUs\n"
    )
    assert not folder.exists()


def test_goes_on_after_failures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has a line, with what it printed last."""
    listed = [
        Step("hangs", ("-c", "import time; print('begun', flush=True); time.sleep(1000)"), 1),
        Step("fails", ("-c", "raise SystemExit('no such device')"), 60),
        Step(
            "counts", ("-c", "import os; print('text'); print('{\"number\": %s}' % os.environ['N'])"), 60, (("N", "7"),)
        ),
    ]
    monkeypatch.setattr(driver, "steps", lambda *args, **options: listed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert driver.main([]) == 1
    hangs, fails, counts = map(json.loads, (folder / "steps.jsonl").read_text().splitlines())
    assert (hangs["ok"], hangs["timed_out"]) == (False, True)
    assert (fails["ok"], fails["code"], fails["timed_out"]) == (False, 1, False)
    assert "no such device" in fails["tail"]
    assert (counts["ok"], counts["result"]) == (True, {"number": 7})
    text = (folder / "summary.md").read_text()
    assert "| counts | ok |" in text
    assert "1 of 3 steps succeeded" in text


def test_limits_leave_nine_minutes_for_one_gpu() -> None:
    """Steps usually take a part of their limits; all limits together are what a hanging machine takes."""
    one, two = (steps(number, rehearsal=False, output=Path("runs")) for number in (1, 2))
    names = [step.name for step in two]
    assert len(set(names)) == len(names)
    assert two[: len(one)] == one
    assert sum(step.limit_s for step in one) <= 24 * 60
    assert not any("--tiny" in step.command for step in two)


@pytest.mark.parametrize("name", ["versions", *in_campaigns([None])])
def test_rehearsal(name: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_REHEARSAL", "1")
    code = driver.main([] if name is None else ["--only", name])
    results = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert code == 0, [(result["step"], result["tail"]) for result in results if not result["ok"]]
    assert name is not None or len(results) == len(steps(2, rehearsal=True, output=folder))
