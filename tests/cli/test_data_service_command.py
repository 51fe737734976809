"""`motet serve-data`, `motet train --data`: the same losses, each rank gets what it needs, one line about mistakes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_servers import TOKEN, ServerProcess, serving
from mistakes import expect_mistake
from tiny_run import write_tiny_run

from motet.cli.main import main
from motet.config import load_run_config
from motet.data.service.tickets import TOKEN_VARIABLE

LAYOUT = [
    "--set=parallel={planner: explicit, num_microbatches: 2, explicit: {vision: {}, audio: {}, language_model: {}}}",
    "--set=cluster.num_devices=3",
    "--set=train.eval_every=3",
    "--set=train.eval_samples=8",
]


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return write_tiny_run(tmp_path)


def trained(capsys: pytest.CaptureFixture[str], run_file: Path, *options: str) -> dict[str, Any]:
    assert main(["train", str(run_file), *LAYOUT, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_losses_are_those_of_local_data_and_ranks_get_what_they_need(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    local = trained(capsys, run_file)
    with serving(load_run_config(run_file), 2) as servers:
        remote = trained(capsys, run_file, "--data", ",".join(server.address for server in servers))
    assert remote["losses"] == local["losses"]
    assert remote["evaluations"] == local["evaluations"]
    for result in (local, remote):
        received = [
            {name for name, n in rank.items() if n and name != "metadata"} for rank in result["data"]["received_bytes"]
        ]
        assert received == [{"vision"}, {"audio"}, {"language_model"}]
        assert 0 <= result["data"]["wait_fraction"] < 1
    assert all("metadata" in rank for rank in remote["data"]["received_bytes"])


@pytest.mark.campaign
def test_replicas_share_the_pixels_out(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """Two ranks with a copy of the encoder each get the half that is theirs."""
    layout = "parallel={planner: explicit, placement: parallel, num_microbatches: 2, explicit: {vision: {dp: %d}, %s}}"
    others = "audio: {}, language_model: {}"
    received = []
    for num_replicas in (1, 2):
        options = ["--set", layout % (num_replicas, others), "--set", f"cluster.num_devices={2 + num_replicas}"]
        assert main(["train", str(run_file), *options, "--json"]) == 0
        received.append(json.loads(capsys.readouterr().out)["data"]["received_bytes"])
    alone, shared = ([rank["vision"] for rank in ranks if "vision" in rank] for ranks in received)
    assert len(alone) == 1
    assert len(shared) == 2
    assert 0 < min(shared) <= max(shared) < sum(alone)
    assert not [rank for rank in received[1] if len(rank) > 1]


@pytest.mark.campaign
def test_a_training_job_that_is_killed_goes_on_with_the_same_losses(run_file: Path, tmp_path: Path) -> None:
    """kill -9 of the launching process at random moments, four times, and of a server each time."""
    rng = np.random.default_rng(11)
    steps = 12
    options = [*LAYOUT[:2], f"--set=train.steps={steps}", "--set=train.checkpoint_every=2"]
    assert main(["train", str(run_file), *options, f"--set=train.output={tmp_path / 'undisturbed'}"]) == 0
    config = load_run_config(run_file)
    with serving(config, 2) as servers:
        addresses = ",".join(server.address for server in servers)
        command = [sys.executable, "-m", "motet.cli.main", "train", str(run_file), *options, "--data", addresses]
        metrics = run_file.parent / "output" / "metrics.jsonl"
        for kill in range(4):
            process = subprocess.Popen([*command, "--set=train.resume=latest"], stderr=subprocess.DEVNULL)
            wait_for_step(process, metrics, 2 * kill + 1)
            time.sleep(float(rng.uniform(0, 0.3)))
            process.kill()
            process.wait()
            servers[kill % 2].kill()
            servers[kill % 2] = ServerProcess(config, port=servers[kill % 2].port)
        assert subprocess.run([*command, "--set=train.resume=latest"], stderr=subprocess.DEVNULL).returncode == 0
    assert losses(metrics) == losses(tmp_path / "undisturbed" / "metrics.jsonl")
    assert len(losses(metrics)) == steps


def wait_for_step(process: subprocess.Popen[bytes], metrics: Path, step: int) -> None:
    deadline = time.monotonic() + 180
    while process.poll() is None and (not metrics.exists() or max(losses(metrics), default=0) < step):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def losses(metrics: Path) -> dict[int, float]:
    """By step, of whole lines."""
    lines = [json.loads(line) for line in metrics.read_text().split("\n")[:-1]]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture
def command(run_file: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "motet.cli.main", "serve-data", str(run_file), "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()


def test_the_command_serves_until_it_is_told_to_end(command: subprocess.Popen[str]) -> None:
    assert command.stderr is not None
    for line in command.stderr:
        if line.startswith("serving 64 train and 16 held-out samples on grpc://127.0.0.1:"):
            break
    os.kill(command.pid, signal.SIGTERM)
    out, err = command.communicate(timeout=300)
    report = json.loads(out)
    assert command.returncode == 0
    assert report["tickets"] == report["refused"] == 0
    assert "sent 0 bytes for 0 requests, refused 0 calls" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "here"], "data.servers: 'here' is not a data server's address; give grpc://host:port or"),
        (["--data", "http://host:80"], "data.servers: 'http://host:80' is not a data server's address"),
        (["--data", "grpc://host"], "data.servers: 'grpc://host' is not a data server's address"),
        (["--data", "grpc://host:99999"], "data.servers: 'grpc://host:99999' is not a data server's address"),
        (["--data", "grpc://127.0.0.1:9", "--set", "data.server_timeout_s=0.3"], "none of grpc://127.0.0.1:9 answers"),
        (["--data", "grpc://a:1", "--set", "data.token_file=/nowhere"], "data.token_file: /nowhere: cannot be read"),
        (["--data", "grpc+tls://a:1", "--set", "data.tls_roots=/nowhere"], "data.tls_roots: /nowhere cannot be read"),
    ],
)
def test_mistakes_of_training(
    capsys: pytest.CaptureFixture[str], run_file: Path, options: list[str], message: str
) -> None:
    expect_mistake(capsys, ["train", run_file, *options], message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "--port: 70000 is not a port; give 0 to 65535"),
        (["--port", "http"], "--port: http is not a port"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid --port 8815: cannot be used"),
        (["--host", ".."], "--host .. --port 8815: cannot be used .no host can have this name"),
        (["--tls-cert", "x"], "--tls-cert and --tls-key: one is given without the other"),
        (["--tls-cert", "/nowhere", "--tls-key", "x"], "--tls-cert /nowhere: there is no such file; give a PEM file"),
        (["--tls-cert", __file__, "--tls-key", __file__], "do not match or are not PEM .*; give both in PEM"),
        (["--set", "data.token_file=/nowhere"], "data.token_file: /nowhere: cannot be read"),
        (["--set", "data.kind=webdatset"], "data.kind"),
        (["--set", "data={kind: described}"], "data.kind: is described, which has sizes but no data"),
        (["--set", "data.on_corrupt=ignore"], 'data.on_corrupt: is "ignore"; give one of stop, skip'),
        (["--set", "data.workers=-1"], "data.workers: is -1"),
    ],
)
def test_mistakes_of_serving(
    capsys: pytest.CaptureFixture[str], run_file: Path, options: list[str], message: str
) -> None:
    expect_mistake(capsys, ["serve-data", run_file, *options], message)


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    with serving(load_run_config(run_file)) as (server,):
        expect_mistake(
            capsys,
            ["serve-data", run_file, "--port", server.port],
            f"--host 127.0.0.1 --port {server.port}: cannot be used .Address already in use.; give another one",
        )


@pytest.mark.parametrize("token", ["", "short", "spaces are no token \t at all", "tökens-are-of-plain-letters"])
def test_without_a_token_nothing_is_served(
    capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    expect_mistake(capsys, ["serve-data", run_file, "--port", 0], "MOTET_DATA_TOKEN.*`openssl rand -hex 32` prints")
    token_file = tmp_path / "token"
    token_file.write_text(token)
    options = ["--port", 0, "--set", f"data.token_file={token_file}"]
    expect_mistake(
        capsys, ["serve-data", run_file, *options], "data.token_file: .*token: holds no token; give at least"
    )


def test_without_pyarrow(capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("motet.data.service.")]:
        if module.endswith((".server", ".client")):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    told = "data servers need pyarrow, which is not installed; pip install 'motet.data-service.'"
    expect_mistake(capsys, ["serve-data", run_file], told)
    expect_mistake(capsys, ["train", run_file, "--data", "grpc://127.0.0.1:9"], told)
