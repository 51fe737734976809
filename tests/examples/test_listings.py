"""The papers' listings, and a loop with encoders of one's own, learn: one under torchrun, the others in processes that
need not import everything first."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from checkout import ROOT
from distributed import run_distributed
from sampling import in_campaigns

EXAMPLES = ROOT / "examples"


def assert_learnt(said: str) -> None:
    losses = [float(loss) for loss in re.findall(r"^loss (\S+)$", said, flags=re.MULTILINE)]
    assert len(losses) == 12
    assert sum(losses[-3:]) / 3 < 0.6 * losses[0], losses


@pytest.mark.campaign
def test_a_listing_learns_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = subprocess.run(
        [*command, str(EXAMPLES / "listing_cornstarch_2.py")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert_learnt(finished.stdout)


@pytest.mark.parametrize(
    ("listing", "num_processes"), [("listing_thesis_b1", 3), *in_campaigns([("listing_cornstarch_1", 6)])]
)
def test_listing_learns(
    listing: str, num_processes: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)

    def work(rank: int) -> None:
        # There is a group already.
        with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
            runpy.run_path(str(EXAMPLES / f"{listing}.py"), run_name="__main__")

    run_distributed(work, num_processes, timeout=240)
    assert_learnt(capfd.readouterr().out)


def test_encoders_of_ones_own_learn(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["train_own_encoders.py", str(tmp_path)])

    def work(rank: int) -> None:
        with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
            runpy.run_path(str(EXAMPLES / "train_own_encoders.py"), run_name="__main__")

    run_distributed(work, 4, timeout=240)
    said = capfd.readouterr().out
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+) ->", said, flags=re.MULTILINE)]
    assert losses[-1] < 0.5 * losses[0]
    assert "right answers 1.00" in said
    assert (tmp_path / "exported" / "motet.json").is_file()
