"""Ctrl-C, and the death of one process, end a training run at once and with the cause."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import write_tiny_run


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of many steps that has begun."""
    command = [sys.executable, "-m", "motet.cli.main", "train", str(write_tiny_run(tmp_path))]
    process = subprocess.Popen(
        [*command, "--set", "train.steps=1000000"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            break
    yield process
    process.kill()
    process.wait()
    process.stderr.close()


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def end(process: subprocess.Popen[str], workers: list[int]) -> str:
    """What the run says while it ends. Limits are long, because others may be using the machine."""
    assert process.stderr is not None
    said = process.stderr.read()
    process.wait(timeout=300)
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return said


def test_ctrl_c(training: subprocess.Popen[str]) -> None:
    workers = workers_of(training)
    assert len(workers) >= 4
    training.send_signal(signal.SIGINT)
    assert end(training, workers).splitlines()[-1] == "motet: interrupted"
    assert training.returncode == 130


def test_the_death_of_one_process(training: subprocess.Popen[str]) -> None:
    workers = workers_of(training)
    os.kill(workers[1], signal.SIGKILL)
    said = end(training, workers)
    assert training.returncode == 1
    assert re.search(r"^motet: failed: rank \d was ended by SIGKILL", said, flags=re.MULTILINE), said
