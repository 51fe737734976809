"""`motet plan`: lays the model out, and predicts an iteration."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.cli.run_file import add_run_file, file_to_write, load_config, write_text
from motet.errors import UserError

if TYPE_CHECKING:
    from motet.api import Prediction
    from motet.config import RunConfig

MAX_BUDGET_S = 1e6

HELP = "lay the model out on the cluster, and predict the time and memory of an iteration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument("--out", metavar="plan.json", help="write the plan to a file")
    parser.add_argument(
        "--budget-s",
        metavar="SECONDS",
        type=float,
        help="with parallel.planner auto: end the search after this time with the best plan so far, as Ctrl-C does",
    )
    parser.add_argument(
        "--report",
        metavar="plan.html",
        action="append",
        default=[],
        help="write a report to one file, as a page (.html) or as JSON (.json), with the compared plans, the use of "
        "time and memory, and sensitivities; may be repeated",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = load_config(arguments)
    out = file_to_write(arguments.out, "--out") if arguments.out else None
    pages = [_report_file(path) for path in arguments.report]
    from motet.api import make_plan
    from motet.report.plan_report import choice_text, report_text

    if arguments.budget_s is not None and not 0 < arguments.budget_s <= MAX_BUDGET_S:
        raise UserError(f"--budget-s: is {arguments.budget_s:g}; give seconds above 0, at most {MAX_BUDGET_S:.0f}")
    if config.train.phases and config.train.only_phase is None:
        return {"phases": _plan_phases(config, arguments, given="--out" if out else "--report" if pages else None)}
    prediction = make_plan(config, budget_s=arguments.budget_s, progress=_Progress())
    if prediction.choice and prediction.choice.ended_early:
        print(f"motet: {prediction.choice.ended_early}; this is the best plan so far", file=sys.stderr)
    plan, num_devices = prediction.plan, config.cluster.num_devices
    print(report_text(prediction.report))
    if plan.num_ranks < num_devices:
        print(f"the plan leaves {num_devices - plan.num_ranks} of {num_devices} devices unused")
    if prediction.choice:
        print(choice_text(prediction.report["choice"]))
    if out:
        write_text(out, plan.to_json() + "\n", "--out")
        print(f"plan written to {arguments.out}", file=sys.stderr)
    if pages:
        _write_reports(config, prediction, pages)
    return dict(prediction.report)


class _Progress:
    """Prints what a search finds on stderr, with the seconds since its begin."""

    def __init__(self) -> None:
        self._begin_s = time.perf_counter()

    def __call__(self, line: str) -> None:
        print(f"motet: {time.perf_counter() - self._begin_s:6.1f} s: {line}", file=sys.stderr, flush=True)


def _plan_phases(config: "RunConfig", arguments: argparse.Namespace, given: str | None) -> dict[str, Any]:
    """The plan of each phase of a training."""
    from motet.api import make_plan
    from motet.config import phases_of

    if given:
        raise UserError(f"{given}: a file holds one plan; add --set train.only_phase=NAME for that of one phase")
    reports = {}
    for name, phase in phases_of(config).items():
        prediction = make_plan(phase, budget_s=arguments.budget_s, progress=_Progress())
        print(f"phase {name}\n{prediction}\n")
        reports[name] = dict(prediction.report)
    return reports


def _report_file(path: str) -> Path:
    if Path(path).suffix not in (".html", ".json"):
        raise UserError(f"--report {path}: is neither a page nor JSON; give a path that ends with .html or .json")
    return file_to_write(path, "--report")


def _write_reports(config: "RunConfig", prediction: "Prediction", paths: Sequence[Path]) -> None:
    from motet.report.expert_report import expert_report
    from motet.report.plan_page import plan_page

    values = expert_report(
        config, prediction.evaluation, prediction.choice, planning_time_s=prediction.report["planning_time_s"]
    )
    for path in paths:
        write_text(
            path, plan_page(values) if path.suffix == ".html" else json.dumps(values, indent=1) + "\n", "--report"
        )
        print(f"report written to {path}", file=sys.stderr)
