"""`motet plan`: lays the model out, and predicts an iteration."""

import argparse
import sys
from typing import Any

from motet.cli.run_file import add_run_file, file_to_write, load_config, write_text
from motet.errors import UserError

HELP = "lay the model out on the cluster, and predict the time and memory of an iteration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument("--out", metavar="plan.json", help="write the plan to a file")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = load_config(arguments)
    out = file_to_write(arguments.out, "--out") if arguments.out else None
    from motet.api import make_phase_plans, make_plan
    from motet.report.plan_report import choice_text, report_text

    if config.train.phases and config.train.only_phase is None:
        if out:
            raise UserError("--out: a file holds one plan; add --set train.only_phase=NAME for that of a phase")
        phases = make_phase_plans(config)
        for name, prediction in phases.items():
            print(f"phase {name}\n{prediction}\n")
        return {"phases": {name: dict(prediction.report) for name, prediction in phases.items()}}
    prediction = make_plan(config)
    plan, num_devices = prediction.plan, config.cluster.num_devices
    print(report_text(prediction.report))
    if plan.num_ranks < num_devices:
        print(f"the plan leaves {num_devices - plan.num_ranks} of {num_devices} devices unused")
    if prediction.choice:
        print(choice_text(prediction.report["choice"]))
    if out:
        write_text(out, plan.to_json() + "\n", "--out")
        print(f"plan written to {arguments.out}", file=sys.stderr)
    return dict(prediction.report)
