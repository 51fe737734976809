"""`motet data-stats`: what it prints, what it draws, what it refuses."""

import json
from pathlib import Path

import pytest
from mistakes import expect_mistake
from test_without_torch import run_blocked
from tiny_run import write_tiny_run

from motet.balancing.policies import ASSIGNMENTS
from motet.cli.demo import RUN_FILE
from motet.cli.main import main


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_tiny_run(tmp_path)


def test_json_picture_and_table(capsys: pytest.CaptureFixture[str], run_file: Path, tmp_path: Path) -> None:
    picture, plan = tmp_path / "stats.png", tmp_path / "plan.json"
    assert main(["plan", str(run_file), "--out", str(plan)]) == 0
    capsys.readouterr()
    options = ["--samples", "40", "--batches", "2", "--plan", str(plan), "--picture", str(picture), "--json"]
    assert main(["data-stats", str(run_file), *options]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (found["num_samples"], found["global_batch_size"], found["num_batches"]) == (40, 8, 2)
    assert set(found["modules"]) == {"vision", "audio", "language_model"}
    assert sum(module["share_of_work"] for module in found["modules"].values()) == pytest.approx(1)
    assert set(found["assignments"]) == set(ASSIGNMENTS)
    assert [name for name, each in found["assignments"].items() if each["is_plans_own"]] == ["contiguous"]
    for name in [*found["modules"], *ASSIGNMENTS, "b_min"]:
        assert name in err


def test_query_tokens_take_no_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data-stats", str(RUN_FILE), "--samples", "40", "--batches", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["modules"]) == {"vision", "audio", "language_model", "image"}
    assert found["profiling_size"] is not None


def test_no_sample_has_a_modality(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    arguments = ["--set", "data.no_image=1.0", "--set", "data.no_sound=0.0", "--samples", "16", "--json"]
    assert main(["data-stats", str(run_file), *arguments]) == 0
    vision = json.loads(capsys.readouterr().out)["modules"]["vision"]
    assert (vision["share_of_samples"], vision["tokens"], vision["share_of_work"]) == (0.0, None, 0.0)


@pytest.mark.campaign
def test_without_torch(run_file: Path) -> None:
    result = run_blocked("data-stats", run_file)
    assert result.returncode == 0, result.stderr
    assert "b_min" in result.stderr


@pytest.mark.parametrize("option", ["samples", "batches"])
def test_mistakes(capsys: pytest.CaptureFixture[str], run_file: Path, option: str) -> None:
    expect_mistake(capsys, ["data-stats", run_file, f"--{option}", "0"], f"--{option}: is 0; give at least 1")
    expect_mistake(capsys, ["data-stats", run_file, "--plan", "no.json"], "--plan no.json: cannot be read")
