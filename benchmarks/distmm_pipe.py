"""DistMM-Pipe beside GPipe with a batch-sync: a CLIP-like model whose towers are pipelines (DistMM Figure 6).

Both run the same samples in microbatches of the same number, and both contrast half of the iteration's samples with one
another. DistMM-Pipe runs the backwards of one contrastive batch beside the forwards of the next; GPipe runs all
forwards, then all backwards. Schedules take turns in one run.

* Two processes: both towers on the same two ranks, two stages each, in turns there; computation is real.
* Four processes: each tower a pipeline of two; computation sleeps for its computed time (`benchmarks.emulation`),
  while program, messages, batch-syncs and reductions are real.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.emulated import expectation
from benchmarks.emulation import emulated_stage_maker
from benchmarks.measuring import measure_in_turn, ratio, seconds
from benchmarks.reporting import Report
from motet.assignment.sample import Sample, Segment
from motet.config import RunConfig
from motet.plan import CONTRASTIVE
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.from_run_file import plan_for, planning_problem
from motet.runtime.assembly import build_engine
from motet.runtime.engine import Engine
from motet.runtime.launch import launch

SCHEDULES = ("gpipe", "distmm_pipe")
TEXT_TOKENS, END = 32, 5


class ClipBatch:
    """Images and texts at random."""

    def __init__(self, num_samples: int, image_size: int) -> None:
        tokens = (image_size // 8) ** 2
        layouts = {
            "image": (Segment(tokens, num_outputs=1),),
            "text": (Segment(TEXT_TOKENS, num_outputs=1, grid=(TEXT_TOKENS, TEXT_TOKENS - 1)),),
        }
        self.samples = tuple(Sample(f"s{i}", layouts, {CONTRASTIVE: 1}) for i in range(num_samples))
        self._image_size = image_size

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(sample)
        if module == "image":
            return {"pixel_values": torch.randn(1, 3, self._image_size, self._image_size, generator=generator)}
        return {"input_ids": torch.randint(6, 64, (1, TEXT_TOKENS), generator=generator)}


def run_file(schedule: str, arguments: argparse.Namespace, *, num_devices: int) -> RunConfig:
    """K microbatches of each contrastive batch, two contrastive batches."""
    size = {"hidden_size": arguments.width, "intermediate_size": 4 * arguments.width, "num_attention_heads": 4}
    text = {**size, "num_hidden_layers": 8, "vocab_size": 64, "max_position_embeddings": TEXT_TOKENS}
    vision = {**size, "num_hidden_layers": 6, "image_size": 32, "patch_size": 8}
    values: dict[str, Any] = {
        "model": {
            "towers": {
                "image": {"config": "SiglipVisionConfig", "values": vision},
                "text": {"config": "CLIPTextConfig", "values": {**text, "eos_token_id": END}},
            },
            "contrastive": {"width": 64},
        },
        "data": {"kind": "same-digits"},
        "cluster": {"num_devices": num_devices, "num_cores": num_devices},
        "parallel": {
            "planner": "explicit",
            "explicit": {"image": {"pp": 2}, "text": {"pp": 2}},
            "placement": "colocated" if num_devices == 2 else "parallel",
            "num_microbatches": arguments.num_microbatches,
            "schedule": schedule,
        },
        "train": {
            "global_batch_size": 2 * arguments.num_microbatches * arguments.microbatch_size,
            "contrastive_batch_size": arguments.num_microbatches * arguments.microbatch_size,
        },
    }
    return RunConfig.model_validate(values)


def evaluations(arguments: argparse.Namespace, batch: ClipBatch, *, num_devices: int) -> dict[str, Evaluation]:
    result = {}
    for schedule in SCHEDULES:
        problem = planning_problem(run_file(schedule, arguments, num_devices=num_devices), batch.samples)
        result[schedule] = evaluate(problem, plan_for(run_file(schedule, arguments, num_devices=num_devices), problem))
    return result


def measure(
    found: Mapping[str, Evaluation], batch: ClipBatch, arguments: argparse.Namespace, sleeps: bool
) -> dict[str, list[list[float]]]:
    engines = {}
    for name, evaluation in found.items():
        if sleeps:
            engines[name] = Engine(
                evaluation.plan,
                emulated_stage_maker(evaluation.costs),
                device=torch.device("cpu"),
                expect=expectation(evaluation.costs),
            )
        else:
            config = run_file(name, arguments, num_devices=evaluation.plan.num_ranks)
            engines[name] = build_engine(config, evaluation.plan, torch.device("cpu"))

    def forget() -> None:
        if not sleeps:
            for engine in engines.values():
                engine.model.zero_gradients()

    return measure_in_turn(
        {name: partial(engine.run, batch) for name, engine in engines.items()},
        num_blocks=arguments.blocks,
        steps_per_block=arguments.steps_per_block,
        between_steps=forget,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--num-microbatches", type=int, default=4, help="of a contrastive batch (K)")
    parser.add_argument("--microbatch-size", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps-per-block", type=int, default=3)
    arguments = parser.parse_args()
    batch = ClipBatch(2 * arguments.num_microbatches * arguments.microbatch_size, 32)
    report = Report("distmm-pipe", "DistMM-Pipe beside GPipe with a batch-sync")
    rows = []
    for num_devices, sleeps in ((2, False), (4, True)):
        found = evaluations(arguments, batch, num_devices=num_devices)
        blocks = launch(measure, found, batch, arguments, sleeps, num_processes=num_devices)
        assert blocks is not None
        for name in SCHEDULES:
            predicted = found[name].result.iteration_time_s - found[name].costs.fixed_s
            rows.append(
                [
                    f"{num_devices}{', emulated' if sleeps else ''}",
                    name,
                    f"{seconds(blocks, name).text(1e3)} ms",
                    f"{predicted * 1e3:.1f} ms",
                    ratio(blocks, name, "gpipe").text(digits=3),
                ]
            )
    report.add(
        f"Two contrastive batches of {arguments.num_microbatches} microbatches of {arguments.microbatch_size} samples. "
        "The step is without the optimizer's. Predicted: simulated, with computed costs."
    )
    report.table(["processes", "schedule", "step", "predicted", "of GPipe's"], rows)
    report.write()


if __name__ == "__main__":
    main()
