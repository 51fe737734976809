"""The papers' listings run under torchrun and learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("listing", "num_processes"), [("listing_cornstarch_1", 6), ("listing_cornstarch_2", 2), ("listing_thesis_b1", 3)]
)
def test_listing_learns(listing: str, num_processes: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    finished = subprocess.run(
        [*command, str(EXAMPLES / f"{listing}.py")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^loss (\S+)$", finished.stdout, flags=re.MULTILINE)]
    assert len(losses) == 12
    assert sum(losses[-3:]) / 3 < 0.6 * losses[0], losses
