"""`motet plan` with planner auto, and limits on degrees."""

import json
from pathlib import Path
from typing import Any

import pytest
from mistakes import expect_mistake
from tiny_run import write_tiny_run

from motet.cli.main import main

AUTO = ("--set", "parallel.planner=auto", "--set", "parallel.num_microbatches=2")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_tiny_run(tmp_path)


def plan_json(capsys: pytest.CaptureFixture[str], run_file: Path, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", str(run_file), *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_auto_says_what_it_compared_and_how_far_the_best_possible_is(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    shown = plan_json(capsys, run_file, *AUTO)
    choice = shown["choice"]
    assert shown["planner"] == "auto"
    fastest = min(value["iteration_time_s"] for value in choice["named"].values() if value["fits"])
    assert shown["iteration_time_s"] <= fastest
    assert choice["problem_lower_bound_s"] <= shown["iteration_time_s"]
    assert choice["found_by"] in {"auto", *choice["named"]}
    assert main(["plan", str(run_file), *AUTO]) == 0
    assert choice["why"] in capsys.readouterr().out


def test_a_schedule_in_the_run_file_is_kept(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    assert plan_json(capsys, run_file, *AUTO, "--set", "parallel.schedule=gpipe")["schedule"] == "gpipe"


def test_limits_reach_the_planner(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    limits = ("--set", "parallel.limits={dp: [2], modules: {language_model: {max_pp: 1}}}")
    devices = ("--set", "cluster.num_devices=4", "--set", "parallel.num_microbatches=2")
    shown = plan_json(capsys, run_file, *limits, *devices, "--set", "parallel.planner=cornstarch")
    stages = [stage for stage in shown["stages"] if stage["module"] == "language_model"]
    assert {stage["replica"] for stage in stages} == {0, 1}
    assert len(stages) == 2


def test_limits_of_an_unknown_module(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    limits = ["--set", "parallel.limits.modules={smell: {max_pp: 1}}"]
    expect_mistake(capsys, ["plan", run_file, *limits], "parallel.limits.modules: there is no module 'smell'; give")


def test_limits_on_context_parallelism(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    one = ("--set", "parallel.planner=auto", "--set", "parallel.num_microbatches=1")
    shown = plan_json(capsys, run_file, *one, "--set", "parallel.limits={cp: [2]}")
    assert "language_model 1 stages x cp 2" in shown["choice"]["why"]
    assert shown["choice"]["named"] == {}
    alone = r"parallel.limits.cp: is \[2\], but planner cornstarch chooses no context parallelism; allow 1 too, or take"
    expect_mistake(capsys, ["plan", run_file, "--set", "parallel.limits={cp: [2]}"], alone)
    placed = ("--set", "parallel.placement=parallel", "--set", "parallel.limits={cp: [2]}")
    expect_mistake(
        capsys, ["plan", run_file, *one, *placed], "parallel.placement: planners that place encoders parallel choose no"
    )
    none = "parallel.limits.cp: language_model.cp is 8, but microbatches have about 240 tokens, too few for 8 blocks"
    expect_mistake(capsys, ["plan", run_file, *one, "--set", "parallel.limits={cp: [8]}"], none)
    few = ("--set", "cluster.num_devices=1", "--set", "parallel.limits={cp: [2]}")
    none = "parallel.limits.cp: no layout on 1 devices has context parallelism of 2; allow 1 too, or smaller sizes"
    expect_mistake(capsys, ["plan", run_file, *one, *few], none)
