"""Runs everything that a machine with GPUs can tell, in one command: `make gpu`.

Steps go on after failures; each has its own time limit, and all together have 9 minutes for one GPU and 9 more for
several. Steps that measure run alone, the others side by side as far as there are cores. The folder that GPU_REPORT
names (else gpu-report) gets `steps.jsonl`, one line for each step as soon as it has ended, `summary.md`, and the output
of every step.
GPU_REHEARSAL=1 runs the same commands on CPUs in small sizes; its figures mean nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks.gpu.steps import ROOT, Step, python_command, steps
from motet.cluster import available_cores

LIST_S = 540
"""Seconds for a list of steps."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of steps")
    parser.add_argument("--seconds", type=float, default=LIST_S, help="for a list of steps; what is left is cut off")
    args = parser.parse_args(arguments)
    rehearsal = os.environ.get("GPU_REHEARSAL", "") not in ("", "0")
    num_gpus = 2 if rehearsal else torch.cuda.device_count()
    if not num_gpus:
        print("make gpu: torch finds no GPU on this machine; GPU_REHEARSAL=1 rehearses on CPUs", file=sys.stderr)
        return 2
    folder = Path(os.environ.get("GPU_REPORT") or "gpu-report").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    planned = steps(num_gpus, rehearsal=rehearsal, output=folder / "runs")
    chosen = [step for step in planned if not args.only or step.name in args.only]
    results: list[dict[str, Any]] = []
    ends_at = float("inf") if rehearsal else time.monotonic() + args.seconds * (2 if num_gpus > 1 else 1)
    with (folder / "steps.jsonl").open("w") as lines, ThreadPoolExecutor(max(1, available_cores() // 2)) as pool:

        def do(number: int, step: Step) -> None:
            print(f"{step.name} ...", file=sys.stderr, flush=True)
            step = replace(step, limit_s=min(step.limit_s, max(1.0, ends_at - time.monotonic())))
            result = run(step, folder / f"{number:02d}-{step.name.replace(' ', '-').replace(',', '')}.log")
            with one_at_a_time:
                results.append(result)
                lines.write(json.dumps(result) + "\n")
                lines.flush()
                os.fsync(lines.fileno())

        one_at_a_time, running = Lock(), []
        for number, step in enumerate(chosen):
            if step.alone:
                wait(running)
            running.append(pool.submit(do, number, step))
            if step.alone:
                wait(running)
        for each in running:
            each.result()
    order = [step.name for step in chosen]
    results.sort(key=lambda result: order.index(result["step"]))
    text = summary(results, rehearsal=rehearsal)
    (folder / "summary.md").write_text(text)
    print(text)
    return int(not all(result["ok"] for result in results))


def run(step: Step, log: Path) -> dict[str, Any]:
    """Runs a step in a process group of its own, which ends at the time limit. `log`: takes its output."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | dict(step.environment)
    started = time.monotonic()
    timed_out = False
    with log.open("w") as output:
        process = subprocess.Popen(
            python_command(step), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=output, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=step.limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(process.pid, signal.SIGABRT)  # Processes say where their threads stand.
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=3)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
        output.write(out)
    return {
        "step": step.name,
        "ok": process.returncode == 0,
        "code": process.returncode,
        "timed_out": timed_out,
        "seconds": round(time.monotonic() - started, 2),
        "result": _last_object(out),
        "tail": "" if process.returncode == 0 else log.read_text()[-1500:],
    }


def _last_object(out: str) -> dict[str, Any] | None:
    for line in reversed(out.strip().splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            found.get("measured", {}).pop("timeline", None)
            found.get("predicted", {}).pop("timeline", None)
            return found
    return None


def summary(results: Sequence[dict[str, Any]], *, rehearsal: bool) -> str:
    lines = ["# make gpu", ""]
    if rehearsal:
        lines += ["A rehearsal on CPUs: the figures mean nothing.", ""]
    lines += ["| step | result | seconds | figures |", "|---|---|---|---|"]
    for result in results:
        verdict = "ok" if result["ok"] else "time limit" if result["timed_out"] else f"failed ({result['code']})"
        found = result["result"] or {}
        lines.append(f"| {result['step']} | {verdict} | {result['seconds']} | {_figures(found)} |")
        for name, part in found.items():
            if result["step"] in ("measure", "stage variants") and isinstance(part, dict):
                lines.append(f"| {name} | {'failed' if 'error' in part else ''} | | {_figures(part)} |")
    num_ok = sum(result["ok"] for result in results)
    return "\n".join([*lines, "", f"{num_ok} of {len(results)} steps succeeded."]) + "\n"


def _figures(found: dict[str, Any]) -> str:
    shown = [f"{key} {_short(value)}" for key, value in found.items() if isinstance(value, (int, float, str))]
    return ", ".join(shown[:12])


def _short(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
