"""What `motet simulate` can disturb, and what it draws beside the timeline."""

import json
from pathlib import Path

import pytest
from tiny_run import write_tiny_run

from motet.cli.main import main

LAYOUT = "parallel={planner: explicit, num_microbatches: 2, explicit: {vision: {}, audio: {}, language_model: {pp: 2}}}"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_tiny_run(tmp_path)


def iteration_s(capsys: pytest.CaptureFixture[str], run_file: Path, *options: object) -> float:
    capsys.readouterr()
    arguments = ["simulate", str(run_file), "--set", LAYOUT, "--json", *map(str, options)]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum(document["time_shares_s"].values()) == pytest.approx(document["iteration_time_s"], rel=0.2)
    return document["iteration_time_s"]


def test_slow_and_uneven_ranks_take_longer(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    alone = iteration_s(capsys, run_file)
    assert iteration_s(capsys, run_file, "--straggler", "3=4") > 1.5 * alone
    uneven = iteration_s(capsys, run_file, "--jitter", 0.5, "--seed", 1)
    assert uneven > alone
    assert iteration_s(capsys, run_file, "--jitter", 0.5, "--seed", 1) == uneven
    assert iteration_s(capsys, run_file, "--jitter", 0.5, "--seed", 2) != uneven
    assert iteration_s(capsys, run_file, "--share-cards") == pytest.approx(alone)  # All on one node.


def test_a_plan_for_more_devices_than_there_are(
    capsys: pytest.CaptureFixture[str], run_file: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", str(run_file), "--set", LAYOUT, "--out", str(plan)]) == 0
    assert main(["simulate", str(run_file), "--plan", str(plan), "--set", "cluster.num_devices=3"]) == 2
    assert "--plan: has 4 ranks, but cluster.num_devices is 3; give as many devices" in capsys.readouterr().err


def test_accelerators_share_no_cores(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """Whoever plans for GPUs on a laptop is not told how long its cores would take."""
    gpus = ["--set", "cluster.accelerator=h100"]
    assert iteration_s(capsys, run_file, *gpus) == iteration_s(capsys, run_file, *gpus, "--set", "cluster.device=cuda")
    assert iteration_s(capsys, run_file, *gpus, "--set", "cluster.num_cores=1") > iteration_s(capsys, run_file, *gpus)


def test_pictures_go_into_folders_of_their_own(run_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "timeline.svg"
    assert main(["simulate", str(run_file), "--set", LAYOUT, "--picture", str(picture)]) == 0
    assert picture.exists()


def test_memory_is_drawn_and_traced(capsys: pytest.CaptureFixture[str], run_file: Path, tmp_path: Path) -> None:
    picture, trace = tmp_path / "memory.png", tmp_path / "trace.json"
    iteration_s(capsys, run_file, "--memory-picture", picture, "--trace", trace)
    assert picture.stat().st_size > 1000
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "C"} == {0, 1, 2, 3}


def test_of_many_ranks_those_that_differ_are_traced_and_drawn(run_file: Path, tmp_path: Path) -> None:
    """20 replicas of three stages; the two ranks of each last stage do the same, others if their samples do."""
    explicit = "vision: {dp: 20}, audio: {dp: 20}, language_model: {dp: 20, tp: 2}"
    settings = [
        f"parallel={{planner: explicit, num_microbatches: 1, explicit: {{{explicit}}}}}",
        "cluster={num_devices: 80}",
        "train.global_batch_size=20",
    ]
    trace = tmp_path / "trace.json"
    arguments = ["simulate", str(run_file), "--trace", str(trace), "--picture", str(tmp_path / "timeline.svg")]
    assert main([*arguments, *(word for setting in settings for word in ("--set", setting))]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    alike = [int(name.split()[-2]) for name in names if name.endswith("alike")]
    assert len(names) <= 60
    assert len(names) + sum(alike) == 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--straggler", "fast"], "'fast' is not RANK=FACTOR"),
        (["--straggler", "9=2"], "needs a rank of 0..3"),
        (["--straggler", "1=0"], "a factor above 0"),
        (["--straggler", "1=inf"], "a factor above 0"),
        (["--jitter", "-1"], "--jitter: is -1.0; give a share of 0 to 100"),
        (["--jitter", "nan"], "--jitter: is nan; give a share of 0 to 100"),
        (["--jitter", "1e300"], "--jitter: is 1e+300; give a share of 0 to 100"),
        (["--straggler", "1=1e300"], "a factor above 0, at most 1000000"),
        (["--picture", "timeline.xyz"], "--picture timeline.xyz: is not a supported picture format; give .png or .svg"),
        (["--memory-picture", "memory.json"], "--memory-picture memory.json: is not a supported picture"),
        (["--trace", "/dev/null/trace.json"], "--trace /dev/null/trace.json: cannot be written ("),
        (["--trace", "/"], "--trace /: cannot be written; give the path of a file"),
    ],
)
def test_mistakes_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], run_file: Path, options: list[str], message: str
) -> None:
    assert main(["simulate", str(run_file), "--set", LAYOUT, *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_plan_that_says_otherwise_than_the_run_file(
    capsys: pytest.CaptureFixture[str], run_file: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", str(run_file), "--set", LAYOUT, "--out", str(plan)]) == 0
    capsys.readouterr()
    given = ["simulate", str(run_file), "--set", LAYOUT, "--plan", str(plan)]
    assert main(given) == 0
    assert "is not read" not in capsys.readouterr().err
    assert main([*given, "--set", "parallel.num_microbatches=4", "--set", "parallel.schedule=gpipe"]) == 0
    error = capsys.readouterr().err
    assert "its num_microbatches is 2; parallel.num_microbatches, 4, is not read" in error
    assert "its schedule is 1f1b; parallel.schedule, gpipe, is not read" in error


def test_a_straggler_twice(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    twice = ["--straggler", "0=2", "--straggler", "1=2", "--straggler", "0=3"]
    assert main(["simulate", str(run_file), "--set", LAYOUT, *twice]) == 2
    assert "--straggler: rank 0 is given twice; give one factor for each rank" in capsys.readouterr().err


def test_large_batches_are_announced(
    capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iteration_s(capsys, run_file)
    monkeypatch.setattr("motet.api.MANY_SAMPLES", 1)
    assert main(["simulate", str(run_file), "--set", LAYOUT]) == 0
    assert "samples of a batch, which may take minutes" in capsys.readouterr().err
