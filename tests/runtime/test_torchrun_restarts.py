"""torchrun's elastic agent on two launchers: a killed process restarts all, and they go on from the last checkpoint."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ports import port_of_its_own
from tiny_run import write_tiny_run
from waiting import wait_until

STEPS = 6
SETTINGS = {
    "train.steps": STEPS,
    "train.checkpoint_every": 1,
    "train.resume": "latest",
    "cluster.num_devices": 4,
    "cluster.num_nodes": 2,
}


def launcher(folder: Path, port: int, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x", "--local-addr=127.0.0.1"]
    command += ["-m", "motet.cli.main", "train", str(folder / "run.yaml")]
    command += [f"--set={key}={value}" for key, value in SETTINGS.items()]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


def workers_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_two_launchers_restart_together(tmp_path: Path) -> None:
    write_tiny_run(tmp_path)
    port, logs = port_of_its_own(), [tmp_path / "first.log", tmp_path / "second.log"]
    launchers = [launcher(tmp_path, port, log) for log in logs]
    checkpoints = tmp_path / "output" / "checkpoints"
    try:
        wait_until_or_end(launchers, lambda: (checkpoints / "step_00000002").is_dir(), logs)
        victims = workers_of(launchers[1].pid)
        assert len(victims) == 2
        os.kill(victims[0], signal.SIGKILL)
        assert [each.wait(timeout=1200) for each in launchers] == [0, 0], "\n".join(
            log.read_text()[-3000:] for log in logs
        )
    finally:
        for each in launchers:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
    text = "".join(log.read_text() for log in logs)
    assert "going on from" in text, text[-3000:]
    steps = [json.loads(line).get("step") for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    assert {*range(1, STEPS + 1)} <= {*steps}
    assert (checkpoints / f"step_{STEPS:08d}").is_dir()


def wait_until_or_end(launchers: list["subprocess.Popen[bytes]"], has_come: object, logs: list[Path]) -> None:
    for _ in range(20):
        try:
            wait_until(has_come)  # type: ignore[arg-type]
        except AssertionError:
            assert all(each.poll() is None for each in launchers), "\n".join(log.read_text()[-3000:] for log in logs)
        else:
            return
    raise AssertionError("\n".join(log.read_text()[-3000:] for log in logs))
