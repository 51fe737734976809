"""Trains a stage as wide as a 7B model's with a ViT-L: tokens/s, MFU and memory, measured and as `plan` predicts."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import run_config
from motet.api import read_problem, train


def speed(**options: Any) -> dict[str, Any]:
    """`options`: of `run_config`. Raises `RuntimeError` if the loss does not fall."""
    config = run_config(**options)
    problem = read_problem(config)
    num_tokens = sum(segment.num_tokens for sample in problem.samples for segment in sample.layouts["language_model"])
    result = train(config)
    measured, predicted, losses = result["measured"], result["predicted"], result["losses"]
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"the loss does not fall: {losses}")
    seconds = measured["iteration_time_s"]
    return {
        "iteration_s": seconds,
        "predicted_s": predicted["iteration_time_s"],
        "tokens_per_s": num_tokens / seconds,
        "mfu": measured["mfu"],
        "bubble_fraction": measured["bubble_fraction"],
        "wait_for_data": result["data"]["wait_fraction"],
        "memory_bytes": max(measured["peak_memory_bytes"]),
        "predicted_memory_bytes": max(predicted["peak_memory_bytes"]),
        "communicators": predicted["communicators"],
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--dp", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(speed(output=Path(folder) / "output", device=args.device, tiny=args.tiny, dp=args.dp)))


if __name__ == "__main__":
    main()
