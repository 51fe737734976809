"""`motet simulate --failures`: a trace or a rate, three policies, and where the time goes."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import write_tiny_run

from motet.cli.main import main
from motet.planner.failures.replay import KINDS, draw_changes

NODES = ["--set", "cluster.num_devices=8", "--set", "cluster.num_nodes=8"]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_tiny_run(tmp_path)


def forecast(capsys: pytest.CaptureFixture[str], run_file: Path, *options: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["simulate", str(run_file), *NODES, "--json", *map(str, options)]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    for policy in document["policies"].values():
        assert set(policy["seconds"]) == set(KINDS)
        assert sum(policy["seconds"].values()) == pytest.approx(document["duration_s"])
    return document


def test_a_trace(capsys: pytest.CaptureFixture[str], run_file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"0,add,n{i}" for i in range(8)] + ["40000,remove,n3", "60000,remove,n4", "60000,add,n8", "90000,add,n9"]
    trace.write_text("\n".join(lines))
    document = forecast(capsys, run_file, "--failures", trace, "--duration", "200s")
    policies = document["policies"]
    assert document["num_changes"] == 4
    assert document["least_nodes"] == 6
    assert policies["templates"]["samples_per_s"] > policies["restart"]["samples_per_s"] > 0
    assert policies["restart"]["num_restarts"] == 3
    assert policies["templates"]["num_restarts"] == 0
    assert sum(document["steps"].values()) >= 3
    assert main(["simulate", str(run_file), *NODES, "--failures", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "reconfigurations: " in out
    assert "redundant" in out


def test_states_that_few_keep(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """With ZeRO-1 one loss at a time takes none along, also where the run file says nothing of failures."""
    options = ["--failures", "60s", "--duration", "200s", "--set", "parallel.zero1=true"]
    document = forecast(capsys, run_file, *options)
    assert document["num_changes"] >= 2
    assert document["policies"]["templates"]["num_restarts"] == 0


def test_below_the_guarantee(capsys: pytest.CaptureFixture[str], run_file: Path, tmp_path: Path) -> None:
    """Three nodes make one pipeline: training goes on, unless the run file says that it is to stop."""
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join([f"0,add,n{i}" for i in range(8)] + [f"{40 + 10 * i}000,remove,n{i}" for i in range(5)]))
    options = ["--failures", trace, "--duration", "200s", "--set", "train.failures.tolerate=1"]
    usual = forecast(capsys, run_file, *options)["policies"]["templates"]["seconds"]
    stopping = forecast(capsys, run_file, *options, "--set", "train.failures.stop_below_guarantee=true")
    assert usual["waiting"] == 0
    assert stopping["policies"]["templates"]["seconds"]["waiting"] == 200 - 60
    assert stopping["policies"]["templates"]["idle_node_share"] > 0.3


def test_rivals_may_use_pipelines_of_all_nodes(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """Ours keeps two pipelines, so that none has all four nodes; a single one of Bamboo's may."""
    few = ["--set", "cluster.num_devices=6", "--set", "cluster.num_nodes=6"]
    policies = forecast(capsys, run_file, *few, "--failures", "10h", "--duration", "10m")["policies"]
    assert all(policy["seconds"]["waiting"] == 0 for policy in policies.values())
    assert policies["redundant"]["samples_per_s"] > 0


def test_checkpoints_are_as_frequent_as_losses_while_there_are_nodes(
    capsys: pytest.CaptureFixture[str], run_file: Path, tmp_path: Path
) -> None:
    """All nodes are lost in an hour: how long nothing happens after that changes nothing."""
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "\n".join([f"0,add,n{i}" for i in range(8)] + [f"{450 + 450 * i}000,remove,n{i}" for i in range(8)])
    )
    hours = [
        forecast(capsys, run_file, "--failures", trace, "--duration", duration, "--storage", "1e3")
        for duration in ("1h", "100h")
    ]
    every = {document["assumptions"]["checkpoint_every"] for document in hours}
    iterations = {document["policies"]["restart"]["iterations"] for document in hours}
    assert len(every) == 1
    assert len(iterations) == 1


def test_a_rate(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    options = ["--failures", "2m", "--back-after", "3m", "--duration", "1h"]
    document = forecast(capsys, run_file, *options, "--seed", 1)
    assert document["duration_s"] == 3600
    assert forecast(capsys, run_file, *options, "--seed", 1) == document
    assert forecast(capsys, run_file, *options, "--seed", 2) != document
    warned = forecast(capsys, run_file, *options, "--seed", 1, "--warning", "60s")
    redone = [each["policies"]["restart"]["seconds"]["redone"] for each in (document, warned)]
    assert redone[1] < redone[0]
    rare = forecast(capsys, run_file, "--failures", "10h")
    assert rare["duration_s"] == 360000


def test_what_is_assumed(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """Young's interval is the square root of twice a checkpoint's time and the time between losses."""
    options = ["--failures", "2m", "--back-after", "3m", "--duration", "1h"]
    tenth, slow, often = (
        forecast(capsys, run_file, *options, *more)
        for more in (["--storage", "1e4"], ["--storage", "1e2"], ["--set", "train.checkpoint_every=3"])
    )
    every = [document["assumptions"]["checkpoint_every"] for document in (tenth, slow, often)]
    assert every[1] == pytest.approx(10 * every[0], rel=0.02)
    assert every[2] == 3
    num_losses = sum(bool(change.lost) for change in draw_changes(8, 120.0, 3600.0, back_after_s=180.0))
    iteration_s = (
        3600.0
        / forecast(capsys, run_file, "--failures", "1000d", "--duration", "1h")["policies"]["restart"]["iterations"]
    )
    interval_s = (2 * slow["assumptions"]["checkpoint_s"] * 3600.0 / num_losses) ** 0.5
    assert every[1] * iteration_s == pytest.approx(interval_s, rel=0.02)
    starts = [
        forecast(capsys, run_file, *options, "--start", start)["policies"]["restart"]["seconds"]["recovery"]
        for start in ("1s", "20s")
    ]
    assert starts[1] > 2 * starts[0]
    assert main(["simulate", str(run_file), *NODES, *options, "--start", "20s"]) == 0
    assert "all processes start in 20 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--warning", "30s"], "--warning: is read with --failures only; give a trace or a rate"),
        (["--storage", "1e9"], "--storage: is read with --failures only"),
        (["--failures", "6h", "--storage", "nan"], "--storage: is nan; give bytes per second"),
        (["--failures", "6h", "--start", "soon"], "--start: 'soon' is not a time"),
        (["--failures", "none.csv"], "none.csv cannot be read"),
        (["--failures", ""], "--failures: '' is not a time between losses; give one above 0 such as 6h, or a trace"),
        (["--failures", "0m"], "--failures: '0m' is not a time between losses"),
        (["--failures=-1m"], "--failures: '-1m' is not a time between losses"),
        (["--failures", "6"], "6 cannot be read (No such file or directory); give a trace, or a rate like 6h"),
        (
            ["--failures", "6h", "--duration", "long"],
            "--duration: 'long' is not a time; give a number with",
        ),
        (["--failures", "6h", "--picture", "x.png"], "--picture: cannot be combined with --failures"),
        (["--failures", "6h", "--plan", "x.json"], "--plan: cannot be combined with --failures"),
        (["--failures", "6h", "--storage", "0"], "--storage: is 0.0; give bytes per second"),
        (["--failures", "6h", "--set", "cluster.num_nodes=1"], "cluster.num_nodes: is 1, but to survive 1 failures"),
    ],
)
def test_mistakes_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], run_file: Path, options: list[str], message: str
) -> None:
    assert main(["simulate", str(run_file), *NODES, *options]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert "\n" not in err


def test_a_trace_says_itself_when_nodes_come_back(
    capsys: pytest.CaptureFixture[str], run_file: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("5000,add,a\n")
    assert main(["simulate", str(run_file), *NODES, "--failures", str(trace), "--back-after", "1h"]) == 2
    assert "--back-after: is read with a rate only" in capsys.readouterr().err
    assert main(["simulate", str(run_file), *NODES, "--failures", str(trace)]) == 2
    assert (
        "--duration: must reach beyond 5 s, when the first nodes come; give a time such as 12h"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "is empty; give lines like 60000,add,node1"),
        ("0,add,a\n-5,remove,a", "line 2: '-5,remove,a' is not MILLISECONDS,add|remove,NODE"),
        ("0,add,", "line 1: '0,add,' is not MILLISECONDS,add|remove,NODE"),
        ("5,add,a\n9,remove,b", "line 2: remove b, but it is not there"),
        ("5,add,a\n0,add,a", "line 1: add a, but it is there already"),
        ("0,add,a\n0,add,b\n9,add,c", "never more than 3 nodes, but 6 are needed (2 pipelines of 3"),
    ],
)
def test_odd_traces(
    capsys: pytest.CaptureFixture[str], run_file: Path, tmp_path: Path, lines: str, message: str
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(lines)
    assert main(["simulate", str(run_file), *NODES, "--failures", str(trace), "--duration", "1h"]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert "\n" not in err
