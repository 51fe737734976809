"""Compares schedules for encoders on the language model's ranks, and measures how long making a schedule takes.

The first is predicted, not measured: planner `optimus` lays out two configurations of the Optimus paper, with computed
costs, and the same plan is simulated under several schedules. The second is timed, in seconds of one processor.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.reporting import Report
from motet.assignment.batch_assignment import contiguous_assignment
from motet.assignment.sample import Sample, Segment
from motet.plan import ModulePlan, Plan, Replica, Stage
from motet.planner.evaluate import evaluate
from motet.planner.optimus.planner import optimus
from motet.schedule.generators import GENERATORS
from motet.schedule.routes import derive_routes
from papers.optimus.problems import problems

COLOCATED = ("1f1b", "dip", "bubble_filling", "zero_bubble_h1")
PLACED = {
    "gpipe": "chain",
    "1f1b": "chain",
    "interleaved_1f1b": "rounds",
    "zero_bubble_h1": "chain",
    "zero_bubble_v": "v",
}


def pipeline(placement: str, num_groups: int, num_microbatches: int) -> Plan:
    """A language model of four stages a group in rounds, two in V shape, one in a chain."""
    there = list(range(num_groups))
    ranks = {"chain": there, "rounds": there * 4, "v": [*there, *reversed(there)]}[placement]
    llm = ModulePlan(
        kind="language_model",
        num_layers=len(ranks),
        replicas=(Replica(stages=tuple(Stage(layers=(i, i + 1), ranks=(r,)) for i, r in enumerate(ranks))),),
        trainable=((0, len(ranks)),),
        loss_weight=1.0,
    )
    return Plan(modules={"llm": llm}, edges=(), num_microbatches=num_microbatches)


def microseconds_an_action(schedule: str, num_groups: int, num_cells: int) -> tuple[int, float]:
    """The number of actions, and what each takes."""
    num_stages = len(pipeline(PLACED[schedule], num_groups, 1).modules["llm"].replicas[0].stages)
    plan = pipeline(PLACED[schedule], num_groups, max(1, num_cells // num_stages))
    samples = [Sample(str(i), {"llm": (Segment(1),)}, {"llm": 1}) for i in range(plan.num_microbatches)]
    routes = derive_routes(plan, contiguous_assignment(plan, samples), samples)
    gc.collect()
    started = time.process_time()
    written = GENERATORS[schedule](routes)
    seconds = time.process_time() - started
    num_actions = sum(map(len, written.ranks))
    return num_actions, seconds / num_actions * 1e6


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--cells", type=int, default=500_000, help="microbatches times stages, of closed forms")
    parser.add_argument("--problems", type=int, default=2)
    options = parser.parse_args(arguments)
    report = Report("schedules", "Schedules: encoders in bubbles, and how fast schedules are written down")
    rows = []
    for name, problem in problems()[: options.problems]:
        plan = optimus(problem)
        found = [evaluate(problem, replace(plan, schedule=schedule)) for schedule in COLOCATED]
        rows.append((name, *(f"{e.iteration_time_s:.3f}" for e in found), f"{found[0].lower_bound_s:.3f}"))
    report.add(
        "Seconds of an iteration, predicted; `1f1b` is list scheduling on these plans. The bound: whole backwards."
    )
    report.table(("model", *COLOCATED, "lower bound"), rows)
    rows = []
    for schedule in PLACED:
        num_cells = options.cells // (20 if schedule.startswith("zero_bubble") else 1)
        num_actions, microseconds = microseconds_an_action(schedule, options.groups, num_cells)
        rows.append((schedule, f"{num_actions:,}", f"{microseconds:.2f}"))
    report.add(f"Processor time of a schedule of {options.groups} groups, without costs.")
    report.table(("schedule", "actions", "us an action"), rows)
    return report


if __name__ == "__main__":
    main().write()
