"""How far is the predicted iteration time off? Costs are profiled once, into a file; then plans are predicted from it
and run.

Plans of two ranks compute, and take the optimizer's step. Plans of more ranks than that run on the same executor with
real communication and emulated computation (and no optimizer). The model is SigLIP and Whisper, each with a projector,
and Llama, everything trainable. The plans differ in stages, in tensor, data and context parallelism, in sharding, in
microbatches and in the schedule.
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
from benchmarks.layouts import describe, plan_of
from benchmarks.measuring import measure_in_turn, seconds
from benchmarks.profiling import measure_costs, problem_with
from benchmarks.reporting import REPORTS, Report
from benchmarks.workloads import SyntheticBatch, vlm_config
from motet.config import RunConfig
from motet.costs.profiling.profiler import ProfileOptions
from motet.plan import LANGUAGE_MODEL, ContextOptions, Plan
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.layout import Chunk, Layout, cut_chain, explicit_plan, layout_plan
from motet.planner.problem import Degrees, PlanningProblem
from motet.runtime.assembly import build_engine, build_optimizer
from motet.runtime.launch import launch

MEDIAN_LIMIT, WORST_LIMIT = 0.06, 0.15
NUM_SAMPLES = 16
BLOCK_TOKENS = 16
"""Tokens of the blocks that ranks share sequences by."""


@dataclass(frozen=True)
class Case:
    name: str
    num_ranks: int
    num_microbatches: int
    schedule: str
    make: Callable[[PlanningProblem], Plan]


def _separate(encoders: Degrees, language_model: Degrees) -> Callable[[PlanningProblem], Plan]:
    """Each module on ranks of its own."""
    return lambda problem: explicit_plan(problem, _degrees(problem, encoders, language_model))


def _encoders_together(encoders: Degrees, language_model: Degrees) -> Callable[[PlanningProblem], Plan]:
    """Both encoders on the same ranks, the language model on others."""
    return lambda problem: explicit_plan(problem, _degrees(problem, encoders, language_model), placement="colocated")


def _degrees(problem: PlanningProblem, encoders: Degrees, language_model: Degrees) -> dict[str, Degrees]:
    return {name: language_model if name == LANGUAGE_MODEL else encoders for name in problem.modules}


def _chain(*groups: int, tp: int = 1, dp: int = 1) -> Callable[[PlanningProblem], Plan]:
    """All layers in a row, cut into as many runs as there are `groups`; run i is on the ranks of `groups[i]`."""

    def make(problem: PlanningProblem) -> Plan:
        seconds = {name: problem.estimator.layer_seconds(name, tp, dp) for name in problem.modules}
        layout = Layout(
            planner="explicit",
            chunks=tuple(cut_chain(seconds, groups)),
            group_sizes=(tp,) * (max(groups) + 1),
            dp=dp,
        )
        return layout_plan(problem, layout)

    return make


def _shared_tokens(problem: PlanningProblem) -> Plan:
    """All modules on all ranks: tensor parallelism in the encoders, context parallelism in the language model."""
    module = problem.modules[LANGUAGE_MODEL]
    changed = replace(module, context=ContextOptions(block_size=BLOCK_TOKENS))
    problem = replace(problem, modules={**problem.modules, LANGUAGE_MODEL: changed})
    whole = {name: (0, module.workload.num_layers) for name, module in problem.modules.items()}
    chunks = tuple(Chunk(name, layers, 0) for name, layers in whole.items())
    size = problem.num_devices
    return layout_plan(
        problem, Layout(planner="explicit", chunks=chunks, group_sizes=(size,), shared=((LANGUAGE_MODEL, size),))
    )


def _fully_sharded(problem: PlanningProblem) -> Plan:
    """One replica of all modules on each rank; the replicas share the parameters."""
    whole = _chain(0, dp=2)(problem)
    sharded = {name: replace(module, fully_sharded=True, sharded_replicas=2) for name, module in whole.modules.items()}
    return replace(whole, modules=sharded)


def _reversed(problem: PlanningProblem) -> Plan:
    """The language model on the first rank, the encoders on the second."""
    whole = {name: (0, module.workload.num_layers) for name, module in problem.modules.items()}
    return plan_of(problem, {name: [[(whole[name], (int(name != LANGUAGE_MODEL),))]] for name in problem.modules})


COMPUTED = (
    Case("encoders, LLM", 2, 8, "1f1b", _encoders_together(Degrees(), Degrees())),
    Case("encoders, LLM", 2, 8, "eager_1f1b", _encoders_together(Degrees(), Degrees())),
    Case("LLM, encoders", 2, 8, "bubble_filling", _reversed),
    Case("chain, PP 2", 2, 16, "1f1b", _chain(0, 1)),
    Case("chain, PP 2", 2, 8, "gpipe", _chain(0, 1)),
    Case("chain, PP 2", 2, 8, "zero_bubble_h1", _chain(0, 1)),
    Case("chain, PP 2", 2, 8, "zero_bubble_h2", _chain(0, 1)),
    Case("chain in V, PP 2", 2, 8, "zero_bubble_v", _chain(0, 1, 1, 0)),
    Case("chain, PP 2 x 2", 2, 8, "interleaved_1f1b", _chain(0, 1, 0, 1)),
    Case("chain, PP 2 x 3", 2, 4, "interleaved_1f1b_adjusted", _chain(0, 1, 0, 1, 0, 1)),
    Case("chain, PP 2 x 2", 2, 8, "dip", _chain(0, 1, 0, 1)),
    Case("DP 2", 2, 4, "1f1b", _chain(0, dp=2)),
    Case("TP 2", 2, 4, "1f1b", _chain(0, tp=2)),
    Case("TP 2, CP 2", 2, 4, "1f1b", _shared_tokens),
    Case("DP 2, fully sharded", 2, 4, "1f1b", _fully_sharded),
)
EMULATED = (
    Case("PP 1 + 1 + 2", 4, 8, "1f1b", _separate(Degrees(), Degrees(pp=2))),
    Case("chain, PP 4 x 2", 4, 8, "critical_path", _chain(*range(4), *range(4))),
    Case("chain, PP 4 x 2", 4, 8, "iterated_critical_path", _chain(*range(4), *range(4))),
    Case("chain, PP 4", 4, 8, "1f1b", _chain(0, 1, 2, 3)),
    Case("chain, PP 4", 4, 8, "zero_bubble_h1", _chain(0, 1, 2, 3)),
    Case("chain, PP 4", 4, 8, "zero_bubble_h2", _chain(0, 1, 2, 3)),
    Case("chain in V, PP 3", 3, 8, "zero_bubble_v", _chain(0, 1, 2, 2, 1, 0)),
    Case("chain, PP 4 x 2", 4, 8, "interleaved_1f1b", _chain(*range(4), *range(4))),
    Case("chain, PP 3 x 2", 3, 8, "interleaved_1f1b_adjusted", _chain(*range(3), *range(3))),
    Case("PP 1 + 1 + 1, DP 2", 6, 4, "1f1b", _separate(Degrees(dp=2), Degrees(dp=2))),
    Case("chain, PP 2, DP 2", 4, 4, "bubble_filling", _chain(0, 1, dp=2)),
    Case("PP 1 + 1 + 1, TP 2", 6, 8, "gpipe", _separate(Degrees(tp=2), Degrees(tp=2))),
    Case("chain, PP 2, TP 2", 4, 8, "1f1b", _chain(0, 1, tp=2)),
    Case("encoders, PP 3", 4, 8, "bubble_filling", _encoders_together(Degrees(), Degrees(pp=3))),
    Case("PP 1 + 1 + 4", 6, 16, "eager_1f1b", _separate(Degrees(), Degrees(pp=4))),
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
    parser.add_argument("--layers", type=int, default=6, help="blocks of each encoder, and of the language model")
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
        num_audio_blocks=args.layers,
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
    )
    args.costs.parent.mkdir(parents=True, exist_ok=True)
    measure_costs(config, batch, options, (Degrees(), Degrees(tp=2))).save(args.costs)

    computed = {
        f"{i}": evaluation_of(case, config, batch, args.costs, is_emulated=False)
        for i, case in enumerate(COMPUTED[: args.cases])
    }
    emulated = {
        f"{i}": evaluation_of(case, config, batch, args.costs, is_emulated=True)
        for i, case in enumerate(EMULATED[: args.cases])
    }
    plans = {i: evaluation.plan for i, evaluation in computed.items()}
    # The engines order actions by the costs that the predictions are made from.
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"costs": str(args.costs)})})
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
        f"SigLIP, Whisper and Llama of {args.layers} blocks each, width {args.width}, all trainable; {NUM_SAMPLES} "
        f"samples per iteration. Measured: median (quartiles) of {args.blocks * args.steps} steps. Those that compute "
        "take turns."
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
