"""A model with frozen encoder, frozen language model and trainable projector: stages cut with and without the knowledge
of what is frozen (Cornstarch 6.3, thesis 3.3.1).

Two real processes, the chain encoder -> language model cut in two. Then six ranks, each stage of one module, with the
computation emulated: does the simulator foresee the gain? Costs are profiled once, before anything is run.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from functools import partial
from pathlib import Path

import torch

from benchmarks.emulated import measure_emulated, predicted_s
from benchmarks.layouts import chain_plan, describe, modality_parallel_plan
from benchmarks.measuring import Spread, measure_in_turn, ratio, seconds
from benchmarks.profiling import measure_costs, problem_with
from benchmarks.reporting import REPORTS, Report
from benchmarks.workloads import SyntheticBatch, vlm_config
from motet.config import RunConfig
from motet.costs.profiling.profiler import ProfileOptions
from motet.plan import Plan
from motet.planner.evaluate import evaluate
from motet.planner.problem import PlanningProblem
from motet.runtime.assembly import build_engine
from motet.runtime.launch import launch

AWARE, UNAWARE = "frozen-aware", "frozen-unaware"
GAIN, TOLERANCE = 1.2, 0.05
NUM_RANKS = 6


def measure_real(
    config: RunConfig, plans: dict[str, Plan], batch: SyntheticBatch, num_blocks: int, steps_per_block: int
) -> dict:
    """On each rank: the blocks, and each plan's loss and gradient norm."""
    engines = {name: build_engine(config, plan, torch.device("cpu")) for name, plan in plans.items()}

    def forget_gradients() -> None:
        for engine in engines.values():
            engine.model.zero_gradients()

    blocks = measure_in_turn(
        {name: partial(engine.run, batch) for name, engine in engines.items()},
        num_blocks=num_blocks,
        steps_per_block=steps_per_block,
        between_steps=forget_gradients,
    )
    forget_gradients()
    results = {name: engine.run(batch) for name, engine in engines.items()}
    return {"blocks": blocks, "results": {name: (r.loss, r.gradient_norm) for name, r in results.items()}}


def show(report: Report, blocks: dict, plans: dict[str, Plan], predicted: dict[str, float]) -> tuple[Spread, float]:
    """Returns measured and predicted gain."""
    report.table(
        ["", "layers @ rank", "measured, ms", "predicted, ms"],
        [
            [name, describe(plan), seconds(blocks, name).text(1e3), f"{predicted[name] * 1e3:.1f}"]
            for name, plan in plans.items()
        ],
    )
    gain, foreseen = ratio(blocks, UNAWARE, AWARE), predicted[UNAWARE] / predicted[AWARE]
    report.add(f"Gain: measured {gain.text(1, 3)}, predicted {foreseen:.3f}.")
    return gain, foreseen


def cost_summary(problem: PlanningProblem) -> str:
    times = {name: problem.estimator.layer_times(name) for name in problem.modules}
    return "; ".join(
        f"{name}: forward {sum(t.forward_s for t in layers) * 1e3:.1f} ms, backward "
        f"{sum(t.backward_s for t in layers) * 1e3:.1f} ms"
        for name, layers in times.items()
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8, help="measured blocks of each alternative")
    parser.add_argument("--steps", type=int, default=2, help="steps of one block")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12, help="blocks of the encoder, and of the language model")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--llm-intermediate", type=int, default=576, help="makes the two forwards equally expensive")
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=9, help="of the profiler")
    parser.add_argument("--costs", type=Path, default=REPORTS / "costs-frozen-aware.json", help="file of the profile")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    report = Report("frozen-aware", "Frozen-aware against frozen-unaware partition")
    shape = {
        "num_vision_blocks": args.layers,
        "num_llm_blocks": args.layers,
        "width": args.width,
        "llm_intermediate": args.llm_intermediate,
        "image_size": args.image_size,
        "num_samples": args.microbatches,
        "num_microbatches": args.microbatches,
    }
    config = vlm_config(trains="projector", **shape)
    batch = SyntheticBatch(config, num_samples=args.microbatches, num_text_tokens=4)
    options = ProfileOptions(microbatch_sizes=(1,), num_microbatches=1, repetitions=args.repetitions, max_seconds=60.0)
    args.costs.parent.mkdir(parents=True, exist_ok=True)
    measure_costs(vlm_config(trains="all", **shape), batch, options).save(args.costs)

    problem = problem_with(config, batch, args.costs, num_devices=2, num_cores=None)
    report.add(
        f"SigLIP and Llama of {args.layers} blocks each, width {args.width}, both frozen; MLP projector, trainable. "
        f"{args.microbatches} microbatches of one sample. Profiled for one microbatch: {cost_summary(problem)}. "
        f"Forward and backward, no optimizer; {args.blocks} blocks of {args.steps} steps of each, in turns. "
        "Median (quartiles)."
    )
    report.add("## Two processes that compute")
    plans = {name: chain_plan(problem, num_stages=2, frozen_aware=name == AWARE) for name in (AWARE, UNAWARE)}
    predicted = {name: predicted_s(evaluate(problem, plan)) for name, plan in plans.items()}
    measured = launch(measure_real, config, plans, batch, args.blocks, args.steps, num_processes=2)
    gain, _ = show(report, measured["blocks"], plans, predicted)
    report.add(f"Loss and norm of the gradient: {measured['results']}.")
    report.goal(f"at least {GAIN}", gain.median >= GAIN, f"{gain.median:.3f}")

    report.add(f"## {NUM_RANKS} ranks, computation emulated")
    problem = problem_with(config, batch, args.costs, num_devices=NUM_RANKS, num_cores=None)
    plans = {name: modality_parallel_plan(problem, frozen_aware=name == AWARE) for name in (AWARE, UNAWARE)}
    evaluations = {name: evaluate(problem, plan) for name, plan in plans.items()}
    blocks = measure_emulated(evaluations, batch, num_blocks=args.blocks, steps_per_block=args.steps)
    gain, foreseen = show(report, blocks, plans, {name: predicted_s(e) for name, e in evaluations.items()})
    error = gain.median / foreseen - 1
    report.goal(f"within {TOLERANCE:.0%} of the prediction", abs(error) <= TOLERANCE, f"{error:+.1%}")
    return report


if __name__ == "__main__":
    main().write()
