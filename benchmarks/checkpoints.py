"""Measures what a checkpoint costs the training processes, written asynchronously and synchronously.

Two processes, SigLIP + projector + Llama cut into two stages, everything trainable, AdamW. In turn: steps without a
checkpoint; the same with one that is written beside them; the same with one that the first step waits for. Both cores
compute, so writing takes its share of them: it shows in the steps, and is what "beside" costs here. On machines with a
core to spare only the copy is left, which is given by itself.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.layouts import chain_plan
from benchmarks.measuring import Spread, measure_in_turn, seconds
from benchmarks.reporting import Report
from benchmarks.workloads import SyntheticBatch, vlm_config
from motet.cluster import cpu_cluster
from motet.config import RunConfig
from motet.plan import Plan
from motet.planner.from_run_file import planning_problem
from motet.runtime.assembly import build_engine, build_optimizer
from motet.runtime.checkpoint.checkpoint import CheckpointWriter, checkpoint_bytes
from motet.runtime.checkpoint.folder import TrainingState
from motet.runtime.launch import launch

LIMIT = 0.05
BETWEEN = 20
"""Steps from one checkpoint to the next: far more often than anyone would write one."""


def measure(config: RunConfig, plan: Plan, batch: SyntheticBatch, folder: Path, num_blocks: int) -> dict[str, object]:
    """Seconds of `BETWEEN` steps each way, of the copies, of the writing; and the bytes of a checkpoint."""
    engine = build_engine(config, plan, torch.device("cpu"))
    optimizer = build_optimizer(config, engine.model)
    writer = CheckpointWriter(folder, keep=2)
    copies: list[float] = []
    finished = 0

    def steps() -> None:
        nonlocal finished
        for _ in range(BETWEEN):
            engine.model.zero_gradients()
            engine.run(batch)
            optimizer.step(finished)
            finished += 1

    def save() -> None:
        writer.save(engine.model, optimizer, TrainingState(finished, {}, plan.to_json()))

    def beside() -> None:
        started = time.perf_counter()
        save()
        copies.append(time.perf_counter() - started)
        steps()

    def waiting() -> None:
        save()
        writer.finish()
        steps()

    alternatives = {"without": steps, "beside": beside, "waiting": waiting}
    blocks = measure_in_turn(
        alternatives, num_blocks=num_blocks, steps_per_block=1, warm_up=1, between_steps=lambda: writer.finish()
    )
    return {"blocks": blocks, "copies": copies[1:], "bytes": checkpoint_bytes(engine.model, optimizer)}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=9, help="of each alternative")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the encoder, and of the language model")
    parser.add_argument("--width", type=int, default=128)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    report = Report("checkpoints", "What a checkpoint costs the training")
    config = vlm_config(
        num_vision_blocks=args.layers,
        num_llm_blocks=args.layers,
        width=args.width,
        image_size=192,
        num_samples=16,
        num_microbatches=4,
        trains="all",
    )
    batch = SyntheticBatch(config, num_samples=16, num_text_tokens=16)
    problem = replace(planning_problem(config, batch.samples), cluster=cpu_cluster(2))
    plan = chain_plan(problem, num_stages=2)
    with tempfile.TemporaryDirectory() as folder:
        measured = launch(measure, config, plan, batch, Path(folder), args.blocks, num_processes=2)
    blocks = measured["blocks"]
    step_s = seconds(blocks, "without").median / BETWEEN
    copy = Spread.of(measured["copies"])
    report.add(
        f"SigLIP and Llama of {args.layers} blocks each, width {args.width}; a checkpoint has "
        f"{measured['bytes'] / 1e6:.1f} MB; one every {BETWEEN} steps; a step takes {step_s * 1e3:.1f} ms."
    )
    rows = []
    for name in ("beside", "waiting"):
        extra = Spread.of([(a[0] - b[0]) / step_s for a, b in zip(blocks[name], blocks["without"], strict=True)])
        rows.append(
            [name, seconds(blocks, name).text(1e3 / BETWEEN), extra.text(100, 0), f"{extra.median / BETWEEN:+.1%}"]
        )
    columns = ["checkpoint", "step, ms (quartiles)", "a checkpoint takes, % of a step", "of all steps"]
    report.table(columns, [["without", seconds(blocks, "without").text(1e3 / BETWEEN), "", ""], *rows])
    share = copy.median / step_s
    report.add(f"The copy alone, for which a training process waits: {copy.text(1e3, 2)} ms, {share:.1%} of a step.")
    report.goal(f"at most {LIMIT:.0%}", share <= LIMIT)
    return report


if __name__ == "__main__":
    main().write()
