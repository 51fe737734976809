"""`motet plan`: lay the model out, and say what an iteration would take."""

import argparse
import sys
import time
from typing import Any

from motet.cli.run_file import add_run_file, file_to_write, load_config, write_text

HELP = "lay the model out on the cluster, and predict what an iteration takes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument("--out", metavar="plan.json", help="write the plan, to be read or edited")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = load_config(arguments)
    out = file_to_write(arguments.out, "--out") if arguments.out else None
    from motet.cli.run_file import read_problem
    from motet.planner.evaluate import evaluate
    from motet.planner.from_run_file import plan_for
    from motet.planner.registry import choose
    from motet.report.plan_report import choice_text, report_choice, report_evaluation, report_text

    problem = read_problem(config)
    started = time.perf_counter()
    choice = choose(problem, placement=config.parallel.placement) if config.parallel.planner == "auto" else None
    plan = choice.evaluation.plan if choice else plan_for(config, problem)
    planning_time_s = time.perf_counter() - started
    evaluation = choice.evaluation if choice else evaluate(problem, plan)
    result = report_evaluation(evaluation, planning_time_s=planning_time_s, dtype=config.train.dtype)
    print(report_text(result))
    if plan.num_ranks < problem.num_devices:
        print(f"the plan leaves {problem.num_devices - plan.num_ranks} of {problem.num_devices} devices idle")
    if choice:
        result["choice"] = report_choice(choice)
        print(choice_text(result["choice"]))
    if out:
        write_text(out, plan.to_json() + "\n", "--out")
        print(f"plan written to {arguments.out}", file=sys.stderr)
    return result
