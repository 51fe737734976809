"""Does the simulator foresee what it brings to give a generator stages of its own?

The model is SigLIP + projector + Llama + SD3, everything trainable; each sample has an image to see, a text, and an
image to draw. Two layouts take turns: *apart*, where the generator has ranks of its own beside those of encoder and
language model, and *together*, where every rank has a part of all modules and half of the samples. Costs are profiled
once, before anything else. Either layout's time may be predicted wrongly; what counts is their ratio.

1. Two processes that compute, with the optimizer's step: encoder and language model on one and the generator on the
   other, against two replicas of everything. Goal: the predicted ratio within 15%.
2. Eight processes that sleep as long as the profiled costs say, with real communication, without optimizer: four stages
   of encoder and language model and four of the generator, against two replicas of four ranks with a stage of each.
   Goal: within 5%.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.emulated import measure_emulated, predicted_s
from benchmarks.layouts import describe
from benchmarks.measuring import Blocks, ratio, seconds
from benchmarks.prediction import measure_real
from benchmarks.profiling import measure_costs, problem_with
from benchmarks.reporting import REPORTS, Report
from benchmarks.workloads import SyntheticBatch, vlm_config
from motet.assignment.sample import Sample, Segment
from motet.config import RunConfig
from motet.costs.profiling.profiler import ProfileOptions
from motet.families.configured_graph import read_graph
from motet.plan import LANGUAGE_MODEL, Plan, Replica, Stage, queries_of
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.layout import cut_module
from motet.planner.problem import Degrees, PlanningProblem
from motet.runtime.launch import launch

VISION, IMAGE = "vision", "image"
APART, TOGETHER = "apart", "together"
TOLERANCE, EMULATED_TOLERANCE = 0.15, 0.05
NUM_QUERIES, NUM_TEXT_TOKENS = 8, 24
SAMPLES_PER_MICROBATCH = 2
NUM_SAMPLES, NUM_EMULATED_SAMPLES = 16, 32
NUM_STAGES = 4
"""Stages of encoder and language model, and of the generator, where eight processes sleep."""
LATENT_CHANNELS, LATENT_SIDE = 4, 24


def configuration(layers: int, width: int) -> RunConfig:
    """The generator has blocks of the same width, which read places and conditions with weights of their own."""
    drawn = {
        "config": "SD3Transformer2DModel",
        "values": {
            "sample_size": LATENT_SIDE,
            "patch_size": 2,
            "in_channels": LATENT_CHANNELS,
            "out_channels": LATENT_CHANNELS,
            "num_layers": layers,
            "attention_head_dim": 32,
            "num_attention_heads": width // 32,
            "joint_attention_dim": width,
            "caption_projection_dim": width,
            "pooled_projection_dim": width,
            "pos_embed_max_size": LATENT_SIDE // 2,
        },
        "queries": NUM_QUERIES,
    }
    whole = vlm_config(
        num_vision_blocks=layers,
        num_llm_blocks=layers,
        width=width,
        num_samples=NUM_SAMPLES,
        num_microbatches=1,
        trains="all",
        image_size=112,
    ).model_dump(exclude_unset=True)
    whole["model"]["generators"] = {IMAGE: drawn}
    # A name of data that generators take; the batch is this file's own.
    whole["data"]["drawings"] = 0.5
    return RunConfig.model_validate(whole)


class DrawingBatch(SyntheticBatch):
    """An image to see, words, and an image to draw in each sample; drawn beforehand."""

    def __init__(self, config: RunConfig, *, num_samples: int) -> None:
        super().__init__(config, num_samples=num_samples, num_text_tokens=NUM_TEXT_TOKENS)
        queries, grid = queries_of(IMAGE), (LATENT_SIDE // 2, LATENT_SIDE // 2)
        places = Segment(NUM_QUERIES, source=queries, item=0, target=IMAGE)
        added = {queries: (Segment(NUM_QUERIES, item=0),), IMAGE: (Segment(grid[0] * grid[1], item=0, grid=grid),)}
        self.samples = tuple(
            Sample(
                sample.id,
                {**sample.layouts, **added, LANGUAGE_MODEL: (*sample.layouts[LANGUAGE_MODEL], places)},
                {**sample.num_loss_tokens, IMAGE: 1},
            )
            for sample in self.samples
        )
        generator = torch.Generator().manual_seed(1)
        self._drawn = [self._drawn_features(i, generator) for i in range(num_samples)]

    def _drawn_features(self, sample: int, generator: torch.Generator) -> dict[str, dict[str, Tensor]]:
        own = super().features(LANGUAGE_MODEL, sample)
        ids, labels = (
            torch.cat([own[key], torch.full((NUM_QUERIES,), filler)])
            for key, filler in (("input_ids", 0), ("labels", -100))
        )
        latents = torch.randn(LATENT_CHANNELS * LATENT_SIDE**2, generator=generator)
        of_text = {"input_ids": ids, "labels": labels}
        return {queries_of(IMAGE): {}, LANGUAGE_MODEL: of_text, IMAGE: {"latents": latents}}

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        own = self._drawn[sample]
        return own[module] if module in own else super().features(module, sample)


def on_two(problem: PlanningProblem) -> dict[str, Plan]:
    """Encoder and language model on one rank, the generator on the other; or all on both."""
    whole = {name: (0, module.workload.num_layers) for name, module in problem.modules.items()}
    apart = {name: [[(whole[name], int(name == IMAGE))]] for name in whole}
    together = {name: [[(whole[name], rank)] for rank in range(2)] for name in whole}
    return {APART: _plan(problem, apart, 2), TOGETHER: _plan(problem, together, 1)}


def on_eight(problem: PlanningProblem) -> dict[str, Plan]:
    """Four ranks of encoder and language model and four of the generator; or two replicas of four ranks, each with a
    stage of the generator beside its own of encoder or language model."""
    degrees = {VISION: 1, LANGUAGE_MODEL: NUM_STAGES - 1, IMAGE: NUM_STAGES}
    cuts = {name: cut_module(problem, name, Degrees(pp=number)) for name, number in degrees.items()}
    first = {VISION: 0, LANGUAGE_MODEL: 1, IMAGE: 0}

    def placed(name: str, begin: int) -> list[tuple[tuple[int, int], int]]:
        return [(layers, begin + first[name] + place) for place, layers in enumerate(cuts[name])]

    apart = {name: [placed(name, NUM_STAGES * (name == IMAGE))] for name in cuts}
    together = {name: [placed(name, NUM_STAGES * half) for half in range(2)] for name in cuts}
    return {APART: _plan(problem, apart, 2), TOGETHER: _plan(problem, together, 1)}


def _plan(
    problem: PlanningProblem, placed: Mapping[str, Sequence[Sequence[tuple[tuple[int, int], int]]]], factor: int
) -> Plan:
    """`placed`: of every module's replicas, each stage's layers and rank. `factor`: of the microbatches of a half of
    the samples."""
    modules = {
        name: problem.modules[name].planned(
            [Replica(stages=tuple(Stage(layers=layers, ranks=(rank,)) for layers, rank in stages)) for stages in own]
        )
        for name, own in placed.items()
    }
    num_microbatches = factor * (len(problem.samples) // (2 * SAMPLES_PER_MICROBATCH))
    return replace(problem.plan(modules, planner="explicit"), num_microbatches=num_microbatches)


def evaluated(
    config: RunConfig, batch: DrawingBatch, costs: Path, *, num_ranks: int, is_emulated: bool
) -> dict[str, Evaluation]:
    num_cores = None if is_emulated else float(os.cpu_count() or 1)
    problem = problem_with(config, batch, costs, num_devices=num_ranks, num_cores=num_cores)
    plans = (on_eight if is_emulated else on_two)(problem)
    return {
        name: evaluate(replace(problem, num_microbatches=plan.num_microbatches), plan, folded=False)
        for name, plan in plans.items()
    }


def show(
    report: Report, evaluations: Mapping[str, Evaluation], blocks: Blocks, predicted: Mapping[str, float]
) -> float:
    """Returns the error of the predicted ratio."""
    rows = [
        [
            name,
            f"{1e3 * predicted[name]:.1f}",
            seconds(blocks, name).text(1e3),
            f"{predicted[name] / seconds(blocks, name).median - 1:+.1%}",
            evaluation.plan.num_microbatches,
            describe(evaluation.plan),
        ]
        for name, evaluation in evaluations.items()
    ]
    columns = ["", "predicted, ms", "measured, ms", "error", "microbatches of a replica", "layers @ rank"]
    report.table(columns, rows)
    measured, foreseen = ratio(blocks, APART, TOGETHER), predicted[APART] / predicted[TOGETHER]
    error = foreseen / measured.median - 1
    report.add(
        f"Time apart over time together: predicted {foreseen:.3f}, measured {measured.text(1, 3)}; the prediction is "
        f"{error:+.1%} off."
    )
    return error


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6, help="measured blocks of each layout")
    parser.add_argument("--steps", type=int, default=2, help="steps of one block")
    parser.add_argument("--layers", type=int, default=6, help="blocks of each module")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--repetitions", type=int, default=5, help="of the profiler")
    parser.add_argument("--only-emulated", action="store_true", help="with the profile that is there")
    parser.add_argument("--costs", type=Path, default=REPORTS / "costs-generator-ratio.json", help="of the profile")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    report = Report("generator-ratio", "A generator on stages of its own")
    config = configuration(args.layers, args.width)
    batch = DrawingBatch(config, num_samples=NUM_SAMPLES)
    if not args.only_emulated:
        options = ProfileOptions(
            microbatch_sizes=(1, SAMPLES_PER_MICROBATCH, 2 * SAMPLES_PER_MICROBATCH),
            num_microbatches=3,
            repetitions=args.repetitions,
            max_seconds=3.0,
        )
        args.costs.parent.mkdir(parents=True, exist_ok=True)
        measure_costs(config, batch, options).save(args.costs)
    shapes = read_graph(config).workloads
    sizes = ", ".join(f"{shapes[name].num_parameters / 1e6:.1f}" for name in (VISION, LANGUAGE_MODEL, IMAGE))
    report.add(
        f"SigLIP, Llama and SD3 of {args.layers} blocks each, width {args.width}, all trained ({sizes} M parameters); "
        f"{SAMPLES_PER_MICROBATCH} samples in a microbatch. Median (quartiles) of {args.blocks * args.steps} steps, in "
        "turns."
    )
    if not args.only_emulated:
        report.add(f"## Two processes that compute, {NUM_SAMPLES} samples")
        evaluations = evaluated(config, batch, args.costs, num_ranks=2, is_emulated=False)
        plans = {name: evaluation.plan for name, evaluation in evaluations.items()}
        blocks = launch(measure_real, config, plans, batch, args.blocks, args.steps, num_processes=2)
        predicted = {name: evaluation.iteration_time_s for name, evaluation in evaluations.items()}
        error = show(report, evaluations, blocks, predicted)
        report.goal(f"within {TOLERANCE:.0%}", abs(error) <= TOLERANCE, f"{error:+.1%}")

    report.add(f"## {2 * NUM_STAGES} processes that sleep, {NUM_EMULATED_SAMPLES} samples")
    batch = DrawingBatch(config, num_samples=NUM_EMULATED_SAMPLES)
    evaluations = evaluated(config, batch, args.costs, num_ranks=2 * NUM_STAGES, is_emulated=True)
    blocks = measure_emulated(evaluations, batch, num_blocks=args.blocks, steps_per_block=args.steps)
    error = show(report, evaluations, blocks, {name: predicted_s(each) for name, each in evaluations.items()})
    report.goal(f"within {EMULATED_TOLERANCE:.0%}", abs(error) <= EMULATED_TOLERANCE, f"{error:+.1%}")
    return report


if __name__ == "__main__":
    main().write()
