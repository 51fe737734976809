"""How long do `motet --help`, `motet plan` and `motet simulate` take, the start of the process included?

Each command runs in a process of its own, again and again in turns. Told are the clock's seconds and the processor's:
on a busy machine only the second is the command's own. Models of the hub stand in a cache of its client, without
weights, and nothing is asked of the network.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.hub_models import write_run
from benchmarks.reporting import Report
from motet.user_cache import CACHE

EXAMPLES = Path(__file__).parents[1] / "examples"
PLAN_64 = (EXAMPLES / "plan_64_gpus.yaml").as_posix()
FIRST_S, AGAIN_S = 8.0, 2.0
"""Most seconds of planning for the first time, and from shape cards."""

COMMANDS: Mapping[str, tuple[tuple[str, ...], float | None]] = {
    "help": (("plan", "--help"), 0.3),
    "a tiny model on 4 processes": (("plan", (EXAMPLES / "tiny.yaml").as_posix()), None),
    "SigLIP and a language model of 70B on 64 GPUs, planned for the first time": (("plan", PLAN_64), FIRST_S),
    "the same, planned from the shape cards": (("plan", PLAN_64), AGAIN_S),
    "the same, simulated": (("simulate", PLAN_64), AGAIN_S),
    "SigLIP and Llama 3.1 70B of the hub on 64 GPUs, planned for the first time": (("plan", "parts.json"), FIRST_S),
    "these parts, planned from the shape cards": (("plan", "parts.json"), AGAIN_S),
    "Qwen3-VL-8B of the hub as a whole, planned for the first time": (("plan", "whole.json"), FIRST_S),
    "this whole model, planned from the shape cards": (("plan", "whole.json"), AGAIN_S),
}
"""Arguments of `motet`, and the seconds that it may take."""


def run(arguments: Sequence[str], folder: Path, cache: Path) -> tuple[float, float]:
    """(seconds of the clock, seconds of the processor) of one call in a folder that `write_run` made."""
    command = [sys.executable, "-m", "motet.cli.main", *arguments]
    environment = {**os.environ, CACHE: str(cache), "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=folder)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(argv: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--commands", nargs="*", default=list(COMMANDS), choices=list(COMMANDS))
    options = parser.parse_args(argv)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in options.commands}
    with TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        if any(COMMANDS[name][0][1].endswith(".json") for name in seconds):
            write_run(folder)
        filled = folder / "filled"
        for name in seconds:
            run(COMMANDS[name][0], folder, filled)  # Leaves shape cards.
        for _ in range(options.repetitions):
            for name, measured in seconds.items():
                with TemporaryDirectory() as empty:
                    is_first = "first time" in name
                    measured.append(run(COMMANDS[name][0], folder, Path(empty) if is_first else filled))
    report = Report("command-line", "How long the command line takes")
    report.add(
        "Medians, the start of Python and the reading of configurations and data included. torch is imported where "
        "shapes are read for the first time, and nowhere else."
    )
    rows, missed = [], []
    for name, measured in seconds.items():
        arguments, limit = COMMANDS[name]
        clock, processor = (median(values) for values in zip(*measured, strict=True))
        shown = " ".join(Path(a).name if "/" in a else a for a in arguments)
        if limit is not None and clock > limit:
            missed.append(f"{name}: {clock:.2f} s")
        rows.append(
            (name, f"`motet {shown}`", f"{processor:.2f} s", f"{clock:.2f} s", "" if limit is None else f"{limit} s")
        )
    report.table(("what", "command", "processor", "clock", "at most"), rows)
    report.goal("no command takes longer by the clock", not missed, "; ".join(missed) or "all within their limits")
    return report


if __name__ == "__main__":
    main().write()
