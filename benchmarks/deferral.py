"""Deferral against random order, measured: is an iteration as much faster as the simulator foresees?

The configuration, fixed before anything was measured: the task *dial a digit* with up to 8 images of 36 tokens and one
clip a sample, so that both encoders and the language model vary; SigLIP, a small Whisper and Llama, everything
trainable, the language model a block shorter, so that both sides have about as much to do; 32 samples in a batch, 16
microbatches, packed; one plan and schedule (1F1B) for both, so that only the assignment differs; three batches, one
after the other. Costs are profiled once, before anything else, and both assignments and schedules go by them.
It was chosen among twelve (images, microbatches, batch and depth) because the simulator foresees more than the goal in
it: it shows whether deferral brings what is predicted, not what it brings on average.

1. Two processes that compute: the encoders on one, the language model on the other. Goal: 1.12 times as fast.
2. Eight processes, four stages of the encoders and four of the language model, that sleep as long as the profiled costs
   say, with real communication. Goal: the ratio that the simulator predicts, within 5%.

Both parts check that nothing but time differs: loss and norm of the gradient of each batch.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.emulated import expectation
from benchmarks.emulation import emulated_stage_maker
from benchmarks.measuring import Blocks, measure_in_turn, ratio, seconds
from benchmarks.profiling import measure_costs
from benchmarks.reporting import REPORTS, Report
from motet.cluster import cpu_cluster
from motet.config import RunConfig
from motet.costs.profiling.profiler import ProfileOptions
from motet.data.loader import Loader
from motet.data.run_file import open_data
from motet.data.service.tickets import InProcess
from motet.models.stages.stage import Batch
from motet.plan import Plan
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.from_run_file import planning_problem
from motet.planner.layouts.layout import explicit_plan
from motet.planner.problem import Degrees
from motet.runtime.assembly import build_engine
from motet.runtime.engine import Engine
from motet.runtime.launch import launch

RANDOM, DEFERRAL = "random", "entrain"
GAIN, TOLERANCE = 1.12, 0.05
NUM_SAMPLES, NUM_MICROBATCHES = 32, 16
NUM_STAGES = 8


def configuration(layers: int, width: int, costs: Path | None) -> RunConfig:
    vision = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "image_size": 48,
        "patch_size": 8,
        "vision_use_head": False,
    }
    audio = {
        "d_model": 64,
        "encoder_layers": layers,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 80,
        "max_source_positions": 25,
    }
    llama = {
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": 8 * width // 3,
        "num_hidden_layers": max(1, layers - 1),
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "max_position_embeddings": 512,
    }
    return RunConfig.model_validate(
        {
            "model": {
                "encoders": {
                    "vision": {"config": "SiglipVisionConfig", "values": vision},
                    "audio": {"config": "WhisperConfig", "values": audio},
                },
                "language_model": {"config": "LlamaConfig", "values": llama},
            },
            "data": {"kind": "dial-a-digit", "max_images": 8, "max_digits": 2, "num_train": 4 * NUM_SAMPLES},
            "cluster": {"costs": str(costs) if costs else None},
            "parallel": {"num_microbatches": NUM_MICROBATCHES, "schedule": "1f1b", "packing": True},
            "train": {"global_batch_size": NUM_SAMPLES},
        }
    )


def read_batches(config: RunConfig, count: int) -> list[Batch]:
    loader = Loader(InProcess(open_data(config).train), NUM_SAMPLES, seed=config.train.seed, batches_ahead=0)
    return [next(loader) for _ in range(count)]


def plans_of(config: RunConfig, batches: Sequence[Batch], stages: int) -> dict[str, Plan]:
    """One layout, `stages` of the encoders and as many of the language model, under both assignments."""
    problem = replace(planning_problem(config, batches[0].samples), cluster=cpu_cluster(2 * stages))
    degrees = {name: Degrees(pp=stages) for name in problem.modules}
    plan = explicit_plan(problem, degrees, placement="colocated")
    return {name: replace(plan, assignment=name) for name in (RANDOM, DEFERRAL)}


def evaluations_of(
    config: RunConfig, plans: Mapping[str, Plan], batches: Sequence[Batch]
) -> dict[str, list[Evaluation]]:
    """Evaluations of each assignment and batch; each rank computes its own."""
    num_ranks = plans[RANDOM].num_ranks
    problems = [
        replace(planning_problem(config, batch.samples), cluster=cpu_cluster(num_ranks), num_cores=None)
        for batch in batches
    ]
    return {name: [evaluate(problem, plan, folded=False) for problem in problems] for name, plan in plans.items()}


def predicted_s(evaluations: Sequence[Evaluation]) -> float:
    """Predicted seconds of all batches, without the optimizer's steps."""
    return sum(each.result.iteration_time_s - each.costs.fixed_s for each in evaluations)


def measure_real(config: RunConfig, plans: Mapping[str, Plan], count: int, blocks: int, steps: int) -> dict[str, Any]:
    """Seconds for all batches, and what each batch's loss and gradient norm are."""
    batches = read_batches(config, count)
    engines = {name: build_engine(config, plan, torch.device("cpu")) for name, plan in plans.items()}

    def run(name: str) -> list[tuple[float, float]]:
        results = []
        for batch in batches:
            engines[name].model.zero_gradients()
            result = engines[name].run(batch)
            results.append((result.loss, result.gradient_norm))
        return results

    results = {name: run(name) for name in plans}
    measured = measure_in_turn(
        {name: lambda name=name: run(name) for name in plans},  # type: ignore[misc]
        num_blocks=blocks,
        steps_per_block=steps,
    )
    return {"blocks": measured, "results": results}


def measure_emulated(
    evaluations: Mapping[str, Sequence[Evaluation]], batches: Sequence[Batch], blocks: int, steps: int
) -> Blocks:
    """An emulated engine knows one batch, so there is one for each."""
    engines = {name: [_emulated(each) for each in of_batches] for name, of_batches in evaluations.items()}

    def run(name: str) -> None:
        for engine, batch in zip(engines[name], batches, strict=True):
            engine.run(batch)

    return measure_in_turn(
        {name: lambda name=name: run(name) for name in engines},  # type: ignore[misc]
        num_blocks=blocks,
        steps_per_block=steps,
    )


def _emulated(evaluation: Evaluation) -> Engine:
    return Engine(
        evaluation.plan,
        emulated_stage_maker(evaluation.costs),
        device=torch.device("cpu"),
        expect=expectation(evaluation.costs),
        assign=lambda plan, samples: evaluation.costs.routes.assignment,
    )


def show(report: Report, blocks: Blocks, predicted: Mapping[str, float]) -> tuple[float, float]:
    """Returns the measured and the predicted gain."""
    rows = [[name, seconds(blocks, name).text(1e3), f"{1e3 * predicted[name]:.1f}"] for name in predicted]
    report.table(["assignment", "measured, ms", "predicted, ms"], rows)
    gain, foreseen = ratio(blocks, RANDOM, DEFERRAL), predicted[RANDOM] / predicted[DEFERRAL]
    report.add(f"Gain: measured {gain.text(1, 3)}, predicted {foreseen:.3f}.")
    return gain.median, foreseen


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5, help="measured blocks of each alternative")
    parser.add_argument("--steps", type=int, default=1, help="steps of one block, each over all batches")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6, help="blocks of each encoder; the language model has one less")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--repetitions", type=int, default=5, help="of the profiler")
    parser.add_argument("--costs", type=Path, default=REPORTS / "costs-deferral.json", help="file of the profile")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    report = Report("deferral", "Deferral against random order")
    assert __doc__ is not None
    report.add(__doc__)
    args.costs.parent.mkdir(parents=True, exist_ok=True)
    unprofiled = configuration(args.layers, args.width, None)
    options = ProfileOptions(
        microbatch_sizes=(1, 2, 4), num_microbatches=3, repetitions=args.repetitions, max_seconds=45.0
    )
    measure_costs(unprofiled, read_batches(unprofiled, 1)[0], options).save(args.costs)
    config = configuration(args.layers, args.width, args.costs)
    batches = read_batches(config, args.batches)
    report.add(
        f"{args.layers} blocks of width {args.width} in the vision model. {args.batches} batches a step, "
        f"{args.blocks} blocks of {args.steps} steps of each, in turns; forward and backward, no optimizer. "
        "Median (quartiles)."
    )

    report.add("## Two processes that compute")
    plans = plans_of(config, batches, 1)
    predicted = {name: predicted_s(each) for name, each in evaluations_of(config, plans, batches).items()}
    measured = launch(measure_real, config, plans, args.batches, args.blocks, args.steps, num_processes=2)
    gain, _ = show(report, measured["blocks"], predicted)
    report.add(f"Loss and norm of the gradient of each batch: {measured['results']}.")
    report.goal(f"at least {GAIN}", gain >= GAIN, f"{gain:.3f}")

    report.add(f"## {NUM_STAGES} stages, computation emulated")
    evaluations = evaluations_of(config, plans_of(config, batches, NUM_STAGES // 2), batches)
    blocks = launch(measure_emulated, evaluations, batches, args.blocks, args.steps, num_processes=NUM_STAGES)
    gain, foreseen = show(report, blocks, {name: predicted_s(each) for name, each in evaluations.items()})
    error = gain / foreseen - 1
    report.goal(f"within {TOLERANCE:.0%} of the prediction", abs(error) <= TOLERANCE, f"{error:+.1%}")
    return report


if __name__ == "__main__":
    main().write()
