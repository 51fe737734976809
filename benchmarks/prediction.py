"""How far is the predicted iteration time off? Costs are profiled once, into a file; then plans are predicted from it
and run.

Plans of two ranks compute, and take the optimizer's step. Plans of more ranks than that run on the same executor with
real communication and emulated computation (and no optimizer). The model is SigLIP + projector + Llama, everything
trainable; the plans differ in stages, tensor and data parallelism, microbatches and schedule.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.emulated import measure_emulated, predicted_s
from benchmarks.layouts import chain_plan, describe, plan_of
from benchmarks.measuring import measure_in_turn, seconds
from benchmarks.profiling import measure_costs, problem_with
from benchmarks.reporting import REPORTS, Report
from benchmarks.workloads import SyntheticBatch, vlm_config
from motet.config import RunConfig
from motet.costs.profiling.profiler import ProfileOptions
from motet.plan import Plan
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.layout import explicit_plan
from motet.planner.problem import Degrees, PlanningProblem
from motet.runtime.assembly import build_engine, build_optimizer
from motet.runtime.launch import launch

MEDIAN_LIMIT, WORST_LIMIT = 0.07, 0.15
NUM_SAMPLES = 16


@dataclass(frozen=True)
class Case:
    name: str
    num_ranks: int
    num_microbatches: int
    schedule: str
    make: Callable[[PlanningProblem], Plan]


def _separate(vision: Degrees, language_model: Degrees) -> Callable[[PlanningProblem], Plan]:
    return lambda problem: explicit_plan(problem, {"vision": vision, "language_model": language_model})


def _chain(num_stages: int, *, tp: int = 1, dp: int = 1) -> Callable[[PlanningProblem], Plan]:
    return lambda problem: chain_plan(problem, num_stages=num_stages, tp=tp, dp=dp)


def _modules_reversed(problem: PlanningProblem) -> Plan:
    """The language model on the first rank, the encoder on the second."""
    rank_of = {"vision": 1, "language_model": 0}
    whole = {name: (0, module.workload.num_layers) for name, module in problem.modules.items()}
    return plan_of(problem, {name: [[(whole[name], (rank,))]] for name, rank in rank_of.items()})


COMPUTED = (
    Case("encoder, LLM", 2, 8, "1f1b", _separate(Degrees(), Degrees())),
    Case("LLM, encoder", 2, 4, "gpipe", _modules_reversed),
    Case("chain, PP 2", 2, 16, "1f1b", _chain(2)),
    Case("chain, PP 2", 2, 8, "gpipe", _chain(2)),
    Case("DP 2", 2, 4, "1f1b", _chain(1, dp=2)),
    Case("TP 2", 2, 4, "1f1b", _chain(1, tp=2)),
)
EMULATED = (
    Case("PP 2 + 2", 4, 8, "1f1b", _separate(Degrees(pp=2), Degrees(pp=2))),
    Case("PP 1 + 3", 4, 16, "gpipe", _separate(Degrees(pp=1), Degrees(pp=3))),
    Case("chain, PP 4", 4, 8, "1f1b", _chain(4)),
    Case("PP 1 + 1, DP 2", 4, 4, "1f1b", _separate(Degrees(dp=2), Degrees(dp=2))),
    Case("TP 2, PP 1 + 1", 4, 8, "gpipe", _separate(Degrees(tp=2), Degrees(tp=2))),
    Case("PP 2 + 4", 6, 16, "1f1b", _separate(Degrees(pp=2), Degrees(pp=4))),
    Case("TP 2, PP 1 + 2", 6, 4, "1f1b", _separate(Degrees(tp=2), Degrees(tp=2, pp=2))),
    Case("PP 1 + 2, DP 2", 6, 8, "1f1b", _separate(Degrees(dp=2), Degrees(pp=2, dp=2))),
    Case("TP 2, PP 1 + 1, DP 2", 8, 4, "1f1b", _separate(Degrees(tp=2, dp=2), Degrees(tp=2, dp=2))),
)


def evaluation_of(
    case: Case, config: RunConfig, batch: SyntheticBatch, costs: Path, *, is_emulated: bool
) -> Evaluation:
    num_cores = None if is_emulated else float(os.cpu_count() or 1)
    problem = problem_with(config, batch, costs, num_devices=case.num_ranks, num_cores=num_cores)
    problem = replace(problem, num_microbatches=case.num_microbatches, schedule=case.schedule)
    # An emulated stage needs the seconds of every microbatch, also of pipelines for which another one is simulated.
    return evaluate(problem, case.make(problem), folded=not is_emulated)


def measure_real(
    config: RunConfig, plans: dict[str, Plan], batch: SyntheticBatch, num_blocks: int, steps_per_block: int
) -> dict[str, list[list[float]]]:
    """Seconds of whole training steps under each plan, in turns."""
    steps = {}
    for name, plan in plans.items():
        engine = build_engine(config, plan, torch.device("cpu"))
        optimizer = build_optimizer(config, engine.model)

        def step(engine=engine, optimizer=optimizer) -> None:  # type: ignore[no-untyped-def]
            engine.model.zero_gradients()
            engine.run(batch)
            optimizer.step(0)

        steps[name] = step
    return measure_in_turn(steps, num_blocks=num_blocks, steps_per_block=steps_per_block)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5, help="measured blocks of each plan")
    parser.add_argument("--steps", type=int, default=2, help="steps of one block")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the encoder, and of the language model")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--image-size", type=int, default=192)
    parser.add_argument("--repetitions", type=int, default=9, help="of the profiler")
    parser.add_argument("--cases", type=int, default=None, help="how many of each kind; not given: all")
    parser.add_argument("--costs", type=Path, default=REPORTS / "costs-prediction.json", help="file of the profile")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    report = Report("prediction", "Predicted against measured iteration time")
    config = vlm_config(
        num_vision_blocks=args.layers,
        num_llm_blocks=args.layers,
        width=args.width,
        image_size=args.image_size,
        num_samples=NUM_SAMPLES,
        num_microbatches=1,
        trains="all",
    )
    batch = SyntheticBatch(config, num_samples=NUM_SAMPLES, num_text_tokens=16)
    options = ProfileOptions(
        microbatch_sizes=(1, 2, 4),
        num_microbatches=3,
        repetitions=args.repetitions,
        max_seconds=60.0,
        tp_sizes=(1, 2),
    )
    args.costs.parent.mkdir(parents=True, exist_ok=True)
    measure_costs(config, batch, options).save(args.costs)

    computed = {
        f"{i}": evaluation_of(case, config, batch, args.costs, is_emulated=False)
        for i, case in enumerate(COMPUTED[: args.cases])
    }
    emulated = {
        f"{i}": evaluation_of(case, config, batch, args.costs, is_emulated=True)
        for i, case in enumerate(EMULATED[: args.cases])
    }
    plans = {i: evaluation.plan for i, evaluation in computed.items()}
    blocks = launch(measure_real, config, plans, batch, args.blocks, args.steps, num_processes=2)
    rows: list[list[object]] = []
    errors: list[float] = []
    for i, evaluation in computed.items():
        predicted = evaluation.iteration_time_s
        rows.append(_row(COMPUTED[int(i)], evaluation, "computed", predicted, blocks[i], errors))
    for i, evaluation in emulated.items():
        measured = measure_emulated({i: evaluation}, batch, num_blocks=args.blocks, steps_per_block=args.steps)
        rows.append(_row(EMULATED[int(i)], evaluation, "emulated", predicted_s(evaluation), measured[i], errors))

    report.add(
        f"SigLIP and Llama of {args.layers} blocks each, width {args.width}, all trainable; {NUM_SAMPLES} samples per "
        f"iteration. Measured: median (quartiles) of {args.blocks * args.steps} steps. Those that compute take turns."
    )
    columns = [
        "plan",
        "ranks",
        "microbatches",
        "schedule",
        "",
        "predicted, ms",
        "measured, ms",
        "error",
        "layers @ rank",
    ]
    report.table(columns, rows)
    median, worst = statistics.median(errors), max(errors)
    report.add(f"Error of the prediction: median {median:.1%}, worst {worst:.1%}.")
    goal = f"median at most {MEDIAN_LIMIT:.0%}, none over {WORST_LIMIT:.0%}"
    report.goal(goal, median <= MEDIAN_LIMIT and worst <= WORST_LIMIT)
    return report


def _row(
    case: Case, evaluation: Evaluation, kind: str, predicted: float, blocks: list[list[float]], errors: list[float]
) -> list[object]:
    measured = seconds({"": blocks}, "")
    error = predicted / measured.median - 1
    errors.append(abs(error))
    return [
        case.name,
        case.num_ranks,
        case.num_microbatches,
        case.schedule,
        kind,
        f"{predicted * 1e3:.1f}",
        measured.text(1e3),
        f"{error:+.1%}",
        describe(evaluation.plan),
    ]


if __name__ == "__main__":
    main().write()
