"""Two processes, a Llama stack: how long ranks are idle, and what a step takes, under 1F1B and zero-bubble schedules.

Same weights, same microbatches. 1F1B, ZB-H1 and ZB-H2 run on two stages; ZB-V on four, in V shape. Idle is what the
measured spans of a step leave of both ranks' time, from the first span's begin to the last one's end. Busy is the rest,
which is larger where backwards are in halves: what they keep in between has left the processor's caches. Schedules take
turns. The simulator's forecast, with the run's own computed costs, stands beside.

In a second table computation sleeps for those costs (`benchmarks.emulation`): program and messages are the same, but
nothing else that the machine does matters.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.emulated import expectation
from benchmarks.emulation import emulated_stage_maker
from benchmarks.layouts import language_model_plan
from benchmarks.measuring import measure_in_turn, ratio, seconds
from benchmarks.reporting import Report
from benchmarks.workloads import SyntheticBatch, llama_config
from motet.config import RunConfig
from motet.plan import Plan
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.from_run_file import planning_problem
from motet.runtime.assembly import build_engine
from motet.runtime.engine import Engine
from motet.runtime.launch import launch
from motet.timeline import Timeline

NAME = "language_model"
CHAIN, V_SHAPE = (0, 1), (0, 1, 1, 0)
SCHEDULES = {"1f1b": CHAIN, "zero_bubble_h1": CHAIN, "zero_bubble_h2": CHAIN, "zero_bubble_v": V_SHAPE}
"""The rank of each stage."""

WARM_UP = 2


def plan_of(schedule: str, num_blocks: int, num_microbatches: int) -> Plan:
    """Makes a plan with equally many blocks on each stage, the embedding on the first and the head on the last."""
    ranks = SCHEDULES[schedule]
    num_layers = num_blocks + 2
    bounds = [0, *(1 + num_blocks * s // len(ranks) for s in range(1, len(ranks))), num_layers]
    return language_model_plan(bounds, ranks, num_microbatches=num_microbatches, schedule=schedule)


def busy_s(timeline: Timeline) -> float:
    """The mean over ranks."""
    return sum(timeline.busy_s) / timeline.num_ranks


def idle_s(timeline: Timeline) -> float:
    """The mean over ranks."""
    return timeline.iteration_time_s - busy_s(timeline)


def real_engines(config: RunConfig, evaluations: Mapping[str, Evaluation]) -> dict[str, Engine]:
    return {name: build_engine(config, e.plan, torch.device("cpu")) for name, e in evaluations.items()}


def sleeping_engines(config: RunConfig, evaluations: Mapping[str, Evaluation]) -> dict[str, Engine]:
    return {
        name: Engine(
            e.plan,
            emulated_stage_maker(e.costs),
            device=torch.device("cpu"),
            expect=expectation(e.costs),
        )
        for name, e in evaluations.items()
    }


MakeEngines = Callable[[RunConfig, Mapping[str, Evaluation]], dict[str, Engine]]


def compare(
    make: MakeEngines,
    config: RunConfig,
    evaluations: Mapping[str, Evaluation],
    batch: SyntheticBatch,
    num_blocks: int,
    steps_per_block: int,
) -> dict[str, Any]:
    """On each of the two ranks."""
    engines = make(config, evaluations)
    timelines: dict[str, list[Timeline]] = {name: [] for name in engines}
    ran: list[str] = []

    def run(name: str) -> None:
        engines[name].run(batch)
        ran.append(name)

    def take_timeline() -> None:
        """Takes the timeline of the step that has just run; not timed."""
        if ran:
            timelines[ran[-1]].append(engines[ran[-1]].timeline())
        for engine in engines.values():
            engine.model.zero_gradients()

    steps = measure_in_turn(
        {name: partial(run, name) for name in engines},
        num_blocks=num_blocks,
        steps_per_block=steps_per_block,
        warm_up=WARM_UP,
        between_steps=take_timeline,
    )
    take_timeline()
    results = {name: engine.run(batch) for name, engine in engines.items()}
    return {
        "steps": steps,
        **{
            what: {name: in_blocks([of(t) for t in ts[WARM_UP:]], steps_per_block) for name, ts in timelines.items()}
            for what, of in (("idle", idle_s), ("busy", busy_s))
        },
        "loss and norm": {name: (result.loss, result.gradient_norm) for name, result in results.items()},
    }


def add_table(report: Report, result: Mapping[str, Any], forecasts: Mapping[str, Timeline]) -> None:
    idle, busy, steps = result["idle"], result["busy"], result["steps"]
    forecast_idle = {name: idle_s(timeline) / idle_s(forecasts["1f1b"]) for name, timeline in forecasts.items()}
    base_s = forecasts["1f1b"].iteration_time_s
    report.table(
        ["", "idle, ms", "idle ratio", "forecast", "busy ratio", "step, ms", "step ratio", "forecast"],
        [
            [
                name,
                seconds(idle, name).text(1e3),
                ratio(idle, name, "1f1b").text(1, 3),
                f"{forecast_idle[name]:.3f}",
                ratio(busy, name, "1f1b").text(1, 3),
                seconds(steps, name).text(1e3),
                ratio(steps, name, "1f1b").text(1, 3),
                f"{forecasts[name].iteration_time_s / base_s:.3f}",
            ]
            for name in SCHEDULES
        ],
    )


def in_blocks(values: Sequence[float], size: int) -> list[list[float]]:
    return [list(values[i : i + size]) for i in range(0, len(values), size)]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10, help="measured blocks of each schedule")
    parser.add_argument("--steps", type=int, default=3, help="steps of one block")
    parser.add_argument("--layers", type=int, default=12, help="decoder layers, divisible by 4")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--samples", type=int, default=2, help="of one microbatch")
    parser.add_argument("--tokens", type=int, default=128, help="of one sample")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    num_samples = args.samples * args.microbatches
    config = llama_config(
        num_blocks=args.layers, width=args.width, num_samples=num_samples, num_microbatches=args.microbatches
    )
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"num_devices": 2})})
    plans = {name: plan_of(name, args.layers, args.microbatches) for name in SCHEDULES}
    batch = SyntheticBatch(config, num_samples=num_samples, num_text_tokens=args.tokens)
    problem = planning_problem(config, batch.samples)
    evaluations = {name: evaluate(problem, plan) for name, plan in plans.items()}
    results = {
        make: launch(compare, make, config, evaluations, batch, args.blocks, args.steps, num_processes=2)
        for make in (real_engines, sleeping_engines)
    }

    report = Report("zero-bubble", "Idle time of 1F1B and of zero-bubble schedules, two processes")
    report.add(
        f"Llama, {args.layers} decoder layers of width {args.width}, {args.microbatches} microbatches of "
        f"{args.samples} x {args.tokens} tokens, forward and backward, no optimizer; {args.blocks} blocks of "
        f"{args.steps} steps of each, in turns. Idle and busy: mean over both ranks. Median (quartiles); ratios are to "
        "1F1B, of the blocks of one round."
    )
    forecasts = {name: evaluation.result.timeline for name, evaluation in evaluations.items()}
    add_table(report, results[real_engines], forecasts)
    report.add("The same, with computation that sleeps for its forecast time:")
    add_table(report, results[sleeping_engines], forecasts)
    result, idle = results[real_engines], results[real_engines]["idle"]
    report.add(f"Loss and norm of the gradient: {result['loss and norm']}.")
    for name in list(SCHEDULES)[1:]:
        measured = ratio(idle, name, "1f1b").median
        report.goal(f"{name} is idle for less time than 1F1B", measured < 1, f"{measured:.3f} of its")
    return report


if __name__ == "__main__":
    main().write()
