"""What does each mechanism of parallelism bring, and do costs and simulator foresee it? Pairs of layouts, with a
mechanism and without, on two processes that compute.

Costs are profiled before anything is run: of each model one table. Then all alternatives take turns, each a whole
training step with its optimizer. A ratio is the seconds with the mechanism over those without. Of LoRA, seconds of
forwards and backwards are compared too: the sums of both ranks' actions in measured and simulated timelines. Long
samples have motet's own attention under every layout, as context parallelism has.

Not here: messages in shares of rows need two tensor-parallel groups, so four processes (`message_bytes.py` counts
their bytes).
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.measuring import measure_in_turn, ratio, seconds
from benchmarks.profiling import measure_costs, problem_with
from benchmarks.reporting import Report
from benchmarks.workloads import SyntheticBatch, language_model_config, llama_config, with_lora, with_own_attention
from motet.config import RunConfig
from motet.costs.profiling.profiler import ProfileOptions
from motet.plan import ContextOptions, Plan
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.layout import explicit_plan
from motet.planner.problem import Degrees
from motet.runtime.assembly import build_engine, build_optimizer
from motet.runtime.launch import launch
from motet.timeline import Timeline

LLM = "language_model"
TOLERANCE = 0.15
CONTEXT_BLOCK = 64


@dataclass(frozen=True)
class Alternative:
    model: str
    """A key of `models`."""
    degrees: Degrees
    recompute: bool = False


def _context(method: str, policy: str = "lpt") -> Degrees:
    context = ContextOptions(block_size=CONTEXT_BLOCK, method=method, policy=policy)  # type: ignore[arg-type]
    return Degrees(cp=2, context=context)


SHARED = Degrees(dp=2, fully_sharded=True, sharded_replicas=2)
ALTERNATIVES: Mapping[str, Alternative] = {
    "dp 2": Alternative("dense", Degrees(dp=2)),
    "dp 2, fully sharded": Alternative("dense", SHARED),
    "dp 2, whole parameters (ZeRO-2)": Alternative("dense", replace(SHARED, whole_parameters=True)),
    "dp 2, recomputed": Alternative("dense", Degrees(dp=2), recompute=True),
    "dp 2, LoRA": Alternative("dense, LoRA", Degrees(dp=2)),
    "pp 2": Alternative("dense", Degrees(pp=2)),
    "pp 2, LoRA": Alternative("dense, LoRA", Degrees(pp=2)),
    "long, dp 2": Alternative("long", Degrees(dp=2)),
    "long, cp 2, all-gather": Alternative("long", _context("all_gather")),
    "long, cp 2, ring": Alternative("long", _context("ring")),
    "long, cp 2, ring, zigzag": Alternative("long", _context("ring", "zigzag")),
    "long, cp 2, ulysses": Alternative("long", _context("ulysses")),
    "experts, dp 2": Alternative("experts", Degrees(dp=2)),
    "experts, dp 2, ep 2": Alternative("experts", Degrees(dp=2, ep=2)),
    "experts, tp 2": Alternative("experts", Degrees(tp=2)),
    "experts, tp 2, ep 2": Alternative("experts", Degrees(tp=2, ep=2)),
}
PAIRS = (
    ("parameters sharded", "dp 2, fully sharded", "dp 2"),
    ("gradients and states sharded", "dp 2, whole parameters (ZeRO-2)", "dp 2"),
    ("parameters gathered by block, not once", "dp 2, fully sharded", "dp 2, whole parameters (ZeRO-2)"),
    ("blocks recomputed", "dp 2, recomputed", "dp 2"),
    ("LoRA, two replicas", "dp 2, LoRA", "dp 2"),
    ("LoRA, two stages", "pp 2, LoRA", "pp 2"),
    ("tokens shared, keys gathered", "long, cp 2, all-gather", "long, dp 2"),
    ("tokens shared, ring", "long, cp 2, ring", "long, dp 2"),
    ("tokens shared, heads traded", "long, cp 2, ulysses", "long, dp 2"),
    ("ring, not all-gather", "long, cp 2, ring", "long, cp 2, all-gather"),
    ("zigzag, not balanced by pairs", "long, cp 2, ring, zigzag", "long, cp 2, ring"),
    ("heads traded, not all-gather", "long, cp 2, ulysses", "long, cp 2, all-gather"),
    ("experts over replicas", "experts, dp 2, ep 2", "experts, dp 2"),
    ("experts whole in a group, not cut", "experts, tp 2, ep 2", "experts, tp 2"),
)
"""What the mechanism is, the alternative with it, the one without."""
TIMED = ("dp 2", "dp 2, LoRA", "pp 2", "pp 2, LoRA")
"""Alternatives of which forwards and backwards are compared."""
LORA_BACKWARDS = ("dp 2, LoRA", "pp 2, LoRA")


@dataclass(frozen=True)
class Model:
    config: RunConfig
    batch: SyntheticBatch
    profiled: SyntheticBatch
    """Samples of several lengths, so that the fit tells tokens from pairs."""
    num_microbatches: int
    """Of all replicas together."""
    profiled_sizes: tuple[int, ...]
    """Samples of a profiled microbatch."""


def models(num_blocks: int, width: int) -> dict[str, Model]:
    dense = llama_config(num_blocks=num_blocks, width=width, num_samples=16, num_microbatches=4)
    long = llama_config(num_blocks=max(2, num_blocks // 2), width=width // 2, num_samples=4, num_microbatches=4)
    experts = language_model_config(
        "MixtralConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": width},
        num_blocks=max(2, num_blocks // 2),
        width=width // 2,
        num_samples=16,
        num_microbatches=4,
    )
    return {
        "dense": _model(dense, 16, 64, num_microbatches=4),
        "dense, LoRA": _model(with_lora(dense, rank=8), 16, 64, num_microbatches=4),
        # Of a single sample, dense attention over the row is that of the sample.
        "long": _model(with_own_attention(long), 4, 1024, num_microbatches=4, profiled_sizes=(1,)),
        "experts": _model(experts, 16, 128, num_microbatches=4),
    }


def _model(
    config: RunConfig,
    num_samples: int,
    length: int,
    *,
    num_microbatches: int,
    profiled_sizes: tuple[int, ...] = (2, 4),
) -> Model:
    return Model(
        config,
        SyntheticBatch(config, num_samples=num_samples, num_text_tokens=length),
        SyntheticBatch(config, num_samples=num_samples, num_text_tokens=(length // 2, length)),
        num_microbatches,
        profiled_sizes,
    )


def evaluation_of(alternative: Alternative, model: Model, costs: Path) -> Evaluation:
    problem = problem_with(
        model.config, model.batch, costs, num_devices=2, num_cores=float(min(2, os.cpu_count() or 1))
    )
    degrees = alternative.degrees
    problem = replace(
        problem,
        num_microbatches=model.num_microbatches // degrees.dp,
        recompute=(LLM,) if alternative.recompute else (),
    )
    return evaluate(problem, explicit_plan(problem, {LLM: degrees}), folded=False)


def measure(
    runs: Mapping[str, tuple[RunConfig, Plan, SyntheticBatch]], num_blocks: int, steps_per_block: int
) -> tuple[dict[str, list[list[float]]], dict[str, list[tuple[float, float]]], dict[str, tuple[float, float]]]:
    """Seconds of training steps in turns; of `TIMED`, seconds of all forwards and backwards of further steps; of each,
    the loss and gradient norm of the first step. Collective."""
    engines, steps, first = {}, {}, {}
    for name, (config, plan, batch) in runs.items():
        engine = engines[name] = build_engine(config, plan, torch.device("cpu"))
        optimizer = build_optimizer(config, engine.model)
        result = engine.run(batch)
        first[name] = result.loss, result.gradient_norm

        def step(engine=engine, optimizer=optimizer, batch=batch) -> None:  # type: ignore[no-untyped-def]
            engine.model.zero_gradients()
            engine.run(batch)
            optimizer.step(0)

        steps[name] = step
    blocks = measure_in_turn(steps, num_blocks=num_blocks, steps_per_block=steps_per_block)
    passes: dict[str, list[tuple[float, float]]] = {name: [] for name in TIMED if name in runs}
    for _ in range(num_blocks):
        for name, of_name in passes.items():
            steps[name]()
            of_name.append(pass_seconds(engines[name].timeline()))
    return blocks, passes, first


def pass_seconds(timeline: Timeline) -> tuple[float, float]:
    """Seconds of all forwards, and of all backwards, of all ranks."""
    sums = {"F": 0.0, "B": 0.0}
    for span in timeline.spans:
        if span.kind in sums:
            sums[span.kind] += span.end - span.start
    return sums["F"], sums["B"]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=7, help="measured blocks of each alternative")
    parser.add_argument("--steps", type=int, default=2, help="steps of one block")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the dense model; the others have half of them")
    parser.add_argument("--width", type=int, default=256, help="of the dense model; the others have half of it")
    parser.add_argument("--repetitions", type=int, default=7, help="of the profiler")
    parser.add_argument("--only", default="", help="alternatives whose names begin so")
    args = parser.parse_args(arguments)
    if not any(name.startswith(args.only) for name in ALTERNATIVES):
        parser.error(f"--only: {args.only!r} begins no alternative; there are {', '.join(ALTERNATIVES)}")
    return args


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    report = Report(
        "with-and-without", "Mechanisms of parallelism: steps with them and without, predicted and measured"
    )
    chosen = {name: each for name, each in ALTERNATIVES.items() if name.startswith(args.only)}
    known = models(args.layers, args.width)
    evaluations: dict[str, Evaluation] = {}
    fits = []
    with tempfile.TemporaryDirectory() as folder:
        for model in dict.fromkeys(each.model for each in chosen.values()):
            costs = Path(folder) / "costs.json"
            options = ProfileOptions(
                microbatch_sizes=known[model].profiled_sizes,
                num_microbatches=4,
                repetitions=args.repetitions,
                max_seconds=15.0,
            )
            degrees = [each.degrees for each in chosen.values() if each.model == model]
            table = measure_costs(known[model].config, known[model].profiled, options, (Degrees(), *degrees))
            table.save(costs)
            fits.append(f"{model}: {table.message}, {table.all_reduce}, {table.notes}")
            evaluations |= {
                name: evaluation_of(each, known[model], costs) for name, each in chosen.items() if each.model == model
            }
    runs = {
        name: (known[chosen[name].model].config, evaluation.plan, known[chosen[name].model].batch)
        for name, evaluation in evaluations.items()
    }
    blocks, passes, first = launch(measure, runs, args.blocks, args.steps, num_processes=2)

    report.add(
        f"Dense: Llama of {args.layers} blocks of width {args.width}, 16 samples of 64 tokens. Long: half the blocks "
        f"and half the width, 4 samples of 1024. Experts: Mixtral as small as long, 8 experts, 16 samples of 128. "
        f"Everything is trainable but under LoRA (rank 8). {args.blocks} blocks of {args.steps} steps, in turns. "
        "Measured: median (quartiles)."
    )
    report.add("## Steps")
    report.table(
        ("alternative", "predicted, ms", "measured, ms", "predicted / measured", "loss", "gradient norm"),
        [
            (
                name,
                f"{evaluation.iteration_time_s * 1e3:.1f}",
                seconds(blocks, name).text(1e3),
                f"{evaluation.iteration_time_s / seconds(blocks, name).median:.3f}",
                *(f"{value:.6f}" for value in first[name]),
            )
            for name, evaluation in evaluations.items()
        ],
    )
    report.add("## Ratios of steps with a mechanism to steps without")
    rows, num_wrong = [], 0
    for mechanism, given, other in PAIRS:
        if not {given, other} <= evaluations.keys():
            continue
        measured = ratio(blocks, given, other)
        foreseen = evaluations[given].iteration_time_s / evaluations[other].iteration_time_s
        error = foreseen / measured.median - 1
        has_sign = measured.low > 1 or measured.high < 1
        # A prediction of no change agrees with no sign.
        agrees = not has_sign or (abs(foreseen - 1) > 1e-6 and (foreseen > 1) == (measured.median > 1))
        num_wrong += abs(error) > TOLERANCE or not agrees
        sign = ("same" if agrees else "other") if has_sign else "none: quartiles around 1"
        rows.append((mechanism, given, other, f"{foreseen:.3f}", measured.text(1, 3), f"{error:+.1%}", sign))
    report.table(("mechanism", "with", "without", "predicted", "measured", "error", "sign"), rows)
    goal = f"every ratio within {TOLERANCE:.0%} of the measured one and of its sign"
    report.goal(goal, bool(rows) and not num_wrong, f"{num_wrong} of {len(rows)} miss it")
    if passes:
        report.add("## Forwards and backwards of both ranks")
        report.add("Predicted and measured milliseconds (median), and their ratio.")
        rows, worst = [], 0.0
        for name, measured_passes in passes.items():
            row: list[object] = [name]
            predicted_passes = pass_seconds(evaluations[name].result.timeline)
            for kind, predicted in enumerate(predicted_passes):
                measured_s = statistics.median(each[kind] for each in measured_passes)
                row += [f"{predicted * 1e3:.1f}", f"{measured_s * 1e3:.1f}", f"{predicted / measured_s:.3f}"]
                if kind and name in LORA_BACKWARDS:
                    worst = max(worst, abs(predicted / measured_s - 1))
            rows.append(tuple(row))
        report.table(("alternative", "forward", "measured", "ratio", "backward", "measured", "ratio"), rows)
        report.goal(f"backwards under LoRA within {TOLERANCE:.0%}", worst <= TOLERANCE, f"{worst:.1%}")
    report.add("## Profiles")
    report.add("\n".join(f"* {fit}" for fit in fits))
    return report


if __name__ == "__main__":
    main().write()
