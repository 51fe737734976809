"""What a stage as wide as a 7B model's with a ViT-L takes on one device, measured in one process, one variant after the
other: tokens/s, MFU and memory beside `plan`'s, one step in detail, and the prediction from a profile of the device.

One process, because imports and the start of the device take most of a short measurement. Prints all that is measured
so far after each variant; a variant that fails has its error in the place of figures.
"""

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import write_weights
from benchmarks.gpu.one_step import one_step
from benchmarks.gpu.predicted import predicted_and_measured
from benchmarks.gpu.stage_speed import speed

VARIANTS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "padded": speed,
    "packed": partial(speed, packing=True),
    "one step, packed": one_step,
    "packed, blocks recomputed": partial(speed, packing=True, recompute="blocks"),
    "predicted": predicted_and_measured,
    "packed, compiled": partial(speed, packing=True, compiles=True),
}
"""Each is called with what `run_config` takes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS))
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights"
        write_weights(weights, args.device, tiny=args.tiny)
        # What it can is found out by processes of its own, which those of torchrun do not start.
        check = [sys.executable, "-m", "motet", "family", "check", str(weights / "language_model")]
        subprocess.run(check, stdout=sys.stderr, check=True)
        for number, (name, measured) in enumerate(VARIANTS.items()):
            if args.only and name not in args.only:
                continue
            join_alone()
            gc.collect()  # What was measured before holds its memory in cycles.
            if args.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                found[name] = measured(
                    output=Path(folder) / str(number), device=args.device, tiny=args.tiny, weights=weights
                )
            except Exception as error:
                traceback.print_exc()
                found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(json.dumps(found), flush=True)
    failed = [name for name, figures in found.items() if "error" in figures]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def join_alone() -> None:
    """Makes this process the only one of a group, as torchrun would have started it: none is started beside it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


if __name__ == "__main__":
    main()
