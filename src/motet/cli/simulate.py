"""`motet simulate`: what an iteration of a plan would take, with its timeline."""

import argparse
from pathlib import Path
from typing import Any

from motet.cli.run_file import add_plan, add_run_file, load_config, read_plan

HELP = "predict what an iteration of a plan takes, and draw its timeline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    add_plan(parser)
    parser.add_argument("--picture", metavar="timeline.png", help="draw the timeline (png, svg, pdf)")
    parser.add_argument("--trace", metavar="trace.json", help="write the timeline for Perfetto or chrome://tracing")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = load_config(arguments)
    from motet.cli.typical_batch import read_problem
    from motet.planner.evaluate import evaluate
    from motet.planner.from_run_file import plan_for
    from motet.planner.report import report_evaluation, report_text

    problem = read_problem(config)
    plan = read_plan(arguments.plan) if arguments.plan else plan_for(config, problem)
    evaluation = evaluate(problem, plan)
    result = report_evaluation(evaluation, dtype=config.train.dtype)
    print(report_text(result))
    if arguments.picture:
        from motet.plots.timeline import save_timelines

        save_timelines({"predicted": evaluation.result.timeline}, Path(arguments.picture))
    if arguments.trace:
        from motet.plots.trace import save_trace

        save_trace({"predicted": evaluation.result.timeline}, Path(arguments.trace))
    return result
