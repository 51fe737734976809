"""How well does the example with three towers retrieve, and how long does it take? Trains it, as its reader would.

Four processes compute, so on two cores nothing else should run meanwhile.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.reporting import Report

EXAMPLE = Path(__file__).parents[1] / "examples/three_towers.py"
LEAST_SHARE, MOST_S = 0.9, 300.0
"""Share of hits to reach in every direction, and time limit, including training."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16, help="of 64 held-out samples")
    rounds = parser.parse_args().rounds
    report = Report("three-towers", "Retrieval of 1 of 64 held-out samples by three towers")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EXAMPLE), "--output", folder, "--rounds", str(rounds)]
        started = time.perf_counter()
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        seconds = time.perf_counter() - started
    shares: dict[str, float] = json.loads(told.splitlines()[-1])
    report.table(("direction", f"found, of {64 * rounds}"), [(way, f"{share:.1%}") for way, share in shares.items()])
    worst = min(shares.values())
    report.add(f"Training on 4 processes and retrieval took {seconds:.0f} s.")
    goal = f"at least {LEAST_SHARE:.0%} in every direction, within {MOST_S:.0f} s"
    report.goal(goal, worst >= LEAST_SHARE and seconds <= MOST_S)
    report.write()


if __name__ == "__main__":
    main()
