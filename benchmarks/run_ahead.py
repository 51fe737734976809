"""An encoder that runs ahead on one process, a language model on another: measured and predicted ratio of an iteration
without run-ahead to one with it.

The encoder is frozen, its projector trains. Both engines run the same two batches in turn, so that each iteration with
run-ahead has the encoder's output from the one before. Costs are profiled once, before anything is run.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.emulated import predicted_s
from benchmarks.frozen_aware import cost_summary
from benchmarks.measuring import measure_in_turn, ratio, seconds
from benchmarks.profiling import measure_costs, problem_with
from benchmarks.reporting import REPORTS, Report
from benchmarks.workloads import SyntheticBatch, vlm_config
from motet.config import RunConfig
from motet.costs.profiling.profiler import ProfileOptions
from motet.plan import LANGUAGE_MODEL, Plan
from motet.planner.evaluate import evaluate
from motet.planner.problem import Degrees
from motet.planner.registry import make_plan
from motet.runtime.assembly import build_engine
from motet.runtime.engine import Engine, IterationResult
from motet.runtime.launch import launch
from motet.runtime.next_batch import NextBatch

AHEAD, WITHOUT = "run-ahead", "without"
TOLERANCE = 0.15


class _Steps:
    """Iterations of one engine over two batches in turn."""

    def __init__(self, engine: Engine, batches: tuple[SyntheticBatch, SyntheticBatch]) -> None:
        self._engine, self._batches, self._number = engine, batches, 0

    def run(self) -> IterationResult:
        batch, following = self._batches[self._number % 2], self._batches[1 - self._number % 2]
        self._number += 1
        return self._engine.run(batch, following=NextBatch(following, None))


def measure(
    config: RunConfig, plans: dict[str, Plan], batches: tuple[SyntheticBatch, SyntheticBatch], blocks: int, steps: int
) -> dict:
    """On each rank: the blocks, and loss and gradient norm of the second batch under each plan."""
    engines = {name: build_engine(config, plan, torch.device("cpu")) for name, plan in plans.items()}
    stepping = {name: _Steps(engine, batches) for name, engine in engines.items()}

    def forget_gradients() -> None:
        for engine in engines.values():
            engine.model.zero_gradients()

    alternatives: dict[str, Callable[[], IterationResult]] = {name: each.run for name, each in stepping.items()}
    results = {}
    for name, run in alternatives.items():
        forget_gradients()
        run()
        forget_gradients()
        second = run()
        results[name] = second.loss, second.gradient_norm
    measured = measure_in_turn(alternatives, num_blocks=blocks, steps_per_block=steps, between_steps=forget_gradients)
    return {"blocks": measured, "results": results}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8, help="measured blocks of each alternative")
    parser.add_argument("--steps", type=int, default=4, help="steps of one block")
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6, help="blocks of the encoder, and of the language model")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=9, help="of the profiler")
    parser.add_argument("--costs", type=Path, default=REPORTS / "costs-run-ahead.json", help="file of the profile")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    report = Report("run-ahead", "A frozen encoder that runs ahead, and one that does not")
    shape = {
        "num_vision_blocks": args.layers,
        "num_llm_blocks": args.layers,
        "width": args.width,
        "image_size": args.image_size,
        "num_samples": args.microbatches,
        "num_microbatches": args.microbatches,
    }
    config = vlm_config(trains="projector", **shape)
    make_batch = partial(SyntheticBatch, config, num_samples=args.microbatches, num_text_tokens=4)
    batches = make_batch(), make_batch()
    options = ProfileOptions(microbatch_sizes=(1,), num_microbatches=1, repetitions=args.repetitions, max_seconds=60.0)
    args.costs.parent.mkdir(parents=True, exist_ok=True)
    measure_costs(vlm_config(trains="all", **shape), batches[0], options).save(args.costs)

    problem = problem_with(config, batches[0], args.costs, num_devices=2, num_cores=None)
    without = make_plan(problem, "explicit", degrees={"vision": Degrees(), LANGUAGE_MODEL: Degrees()})
    plans = {AHEAD: problem.with_run_ahead(without), WITHOUT: without}
    predicted = {name: predicted_s(evaluate(problem, plan)) for name, plan in plans.items()}
    measured = launch(measure, config, plans, batches, args.blocks, args.steps, num_processes=2)
    report.add(
        f"SigLIP and Llama of {args.layers} blocks each, width {args.width}, both frozen; MLP projector, trainable. "
        f"{args.microbatches} microbatches of one sample. Profiled for one microbatch: {cost_summary(problem)}. "
        f"Forward and backward, no optimizer; {args.blocks} blocks of {args.steps} steps of each, in turns. "
        "Median (quartiles)."
    )
    blocks = measured["blocks"]
    rows = [[name, seconds(blocks, name).text(1e3), f"{predicted[name] * 1e3:.1f}"] for name in plans]
    report.table(["", "measured, ms", "predicted, ms"], rows)
    gain, foreseen = ratio(blocks, WITHOUT, AHEAD), predicted[WITHOUT] / predicted[AHEAD]
    report.add(f"Ratio: measured {gain.text(1, 3)}, predicted {foreseen:.3f}.")
    report.add(f"Loss and norm of the gradient: {measured['results']}.")
    error = gain.median / foreseen - 1
    report.goal(f"within {TOLERANCE:.0%} of the prediction", abs(error) <= TOLERANCE, f"{error:+.1%}")
    return report


if __name__ == "__main__":
    main().write()
