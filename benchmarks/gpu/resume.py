"""Trains the tiny example, then its second half again from the checkpoint in the middle, and compares the losses."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from motet.api import train

STEPS = 6
LARGEST_DIFFERENCE = 1e-4
"""Of two losses: kernels of a GPU add in no fixed order."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    every: Sequence[str] = (*args.overrides, f"train.steps={STEPS}", f"train.checkpoint_every={STEPS // 2}")
    whole = train(args.run_file, [*every, f"train.output={args.output / 'whole'}"])
    checkpoint = args.output / "whole" / "checkpoints" / f"step_{STEPS // 2:08d}"
    second = train(
        args.run_file, [*every, f"train.output={args.output / 'second'}", f"train.resume={json.dumps(str(checkpoint))}"]
    )
    pairs = list(zip(whole["losses"][-STEPS // 2 :], second["losses"][-STEPS // 2 :], strict=True))
    found = {
        "losses": whole["losses"],
        "resumed_losses": second["losses"],
        "largest_difference": max(abs(one - other) for one, other in pairs),
        "iteration_s": whole["measured"]["iteration_time_s"],
    }
    print(json.dumps(found))
    if found["largest_difference"] > LARGEST_DIFFERENCE:
        raise SystemExit("the resumed run went another way")


if __name__ == "__main__":
    main()
