"""Kills a rank of a running training by signal 9: how long it takes until the training has ended, and what it says."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.steps import TINY

STEP_TIMEOUT_S = 20
LONGEST_START_S = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    parallel = (
        "{planner: explicit, placement: replicated, num_microbatches: 2, "
        "explicit: {vision: {}, audio: {}, language_model: {pp: 2}}}"
    )
    settings = (
        f"cluster.device={args.device}", "cluster.num_devices=2", f"parallel={parallel}", f"train.output={args.output}",
        "train.steps=1000000", "train.checkpoint_every=0", f"train.step_timeout_s={STEP_TIMEOUT_S}",
        "train.overwrite=true",
    )  # fmt: skip
    command = [sys.executable, "-m", "motet", "train", str(TINY)]
    command += [part for setting in settings for part in ("--set", setting)]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _wait_for_a_step(args.output, training)
        victim = _ranks(training.pid)[-1]
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        _, said = training.communicate(timeout=3 * STEP_TIMEOUT_S)
        ended_s = time.monotonic() - killed
    finally:
        training.kill()
    named = "was ended by SIGKILL" in said
    print(json.dumps({"ended_s": ended_s, "code": training.returncode, "names_the_rank": named, "said": said[-600:]}))
    sys.exit(0 if training.returncode == 1 and named else 1)


def _wait_for_a_step(output: Path, training: "subprocess.Popen[str]") -> None:
    started = time.monotonic()
    while not any(path.stat().st_size for path in output.glob("metrics*")):
        if training.poll() is not None or time.monotonic() - started > LONGEST_START_S:
            raise SystemExit("the training has not begun")
        time.sleep(0.05)


def _ranks(pid: int) -> list[int]:
    """The worker processes of a training, by their numbers."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(int(child) for child in children)


if __name__ == "__main__":
    main()
