"""`motet simulate`: predicts the time of an iteration of a plan and draws its timeline."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.cli.run_file import add_plan, add_run_file, add_seed, file_to_write, load_config, picture_file
from motet.errors import UserError

if TYPE_CHECKING:
    from motet.config import TrainConfig
    from motet.planner.evaluate import Evaluation
    from motet.planner.problem import PlanningProblem

MOST_LANES = 64
"""Most ranks that are all drawn and traced; of more, one of each group of identical ranks is."""

HELP = "predict the time and memory of an iteration of a plan, and draw its timeline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    add_plan(parser)
    parser.add_argument(
        "--picture",
        metavar="timeline.png",
        help="draw the timeline (png, svg, pdf); with many ranks, one rank of each group with the same timeline",
    )
    parser.add_argument("--memory-picture", metavar="memory.png", help="draw each rank's memory over time")
    parser.add_argument(
        "--trace", metavar="trace.json", help="write timeline and memory for Perfetto or chrome://tracing"
    )
    parser.add_argument(
        "--straggler",
        metavar="RANK=FACTOR",
        action="append",
        default=[],
        help="multiply the duration of this rank's computations by FACTOR; may be repeated",
    )
    parser.add_argument(
        "--jitter",
        metavar="SHARE",
        type=float,
        default=0.0,
        help="lengthen computations by a random share, SHARE on average",
    )
    add_seed(parser, "seed of the jitter, and of failures at a rate")
    parser.add_argument(
        "--share-cards", action="store_true", help="let messages that leave a node share its network cards"
    )
    parser.add_argument(
        "--failures",
        metavar="TRACE.csv|RATE",
        help="replay a trace of nodes that join and leave (lines MILLISECONDS,add|remove,NODE), or random losses of "
        "nodes at a mean interval (6h, 10m), under three policies: templates, restarts and redundant computation",
    )
    parser.add_argument(
        "--duration", metavar="12h", help="duration of the replay (default: that of the trace, or ten intervals)"
    )
    parser.add_argument("--back-after", metavar="1h", help="with a rate: time after which a lost node joins again")
    parser.add_argument("--warning", metavar="30s", help="time between the warning of a node and its loss")
    parser.add_argument(
        "--storage",
        metavar="BYTES_PER_S",
        type=float,
        help="bandwidth of the checkpoints' storage, for all nodes together (default: 2e9)",
    )
    parser.add_argument(
        "--start", metavar="30s", help="time that a restart of all processes takes, without loading the checkpoint"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = load_config(arguments)
    from motet.api import read_problem, simulate
    from motet.report.plan_report import report_text

    for name in ("duration", "back_after", "warning", "storage", "start"):
        if getattr(arguments, name) is not None and arguments.failures is None:
            raise UserError(f"--{name.replace('_', '-')}: is read with --failures only; give a trace or a rate")
    if arguments.failures is not None:
        return _with_failures(read_problem(config), config.train, arguments)
    files = _files(arguments)
    prediction = simulate(
        config,
        plan=arguments.plan,
        straggler_factors=_straggler_factors(arguments.straggler),
        jitter=arguments.jitter,
        seed=arguments.seed,
        shares_cards=arguments.share_cards,
    )
    print(report_text(prediction.report))
    _draw(prediction.evaluation, **files)
    return dict(prediction.report)


def _files(arguments: argparse.Namespace) -> dict[str, Path | None]:
    """The files to draw or write."""
    picture, memory = (
        picture_file(path, option) if path else None
        for path, option in ((arguments.picture, "--picture"), (arguments.memory_picture, "--memory-picture"))
    )
    trace = file_to_write(arguments.trace, "--trace") if arguments.trace else None
    return {"picture": picture, "memory": memory, "trace": trace}


def _draw(evaluation: "Evaluation", *, picture: Path | None, memory: Path | None, trace: Path | None) -> None:
    result, title = evaluation.result, "predicted"
    if picture or trace:
        is_large = result.num_ranks > MOST_LANES
        groups = result.alike_ranks if is_large else [(rank,) for rank in range(result.num_ranks)]
        timelines = {title: result.timeline_of({ranks[0] for ranks in groups})}
    if picture:
        from motet.report.pictures import save_timelines

        save_timelines(timelines, picture, {title: groups})
    if trace:
        from motet.report.timelines import save_trace

        save_trace(timelines, trace, {title: result.memory}, {title: groups})
    if memory:
        from motet.costs.memory import usable_bytes
        from motet.report.pictures import save_memory

        limit = usable_bytes(evaluation.problem.cluster)
        save_memory({title: result.memory}, memory, limit_bytes=limit)


def _with_failures(problem: "PlanningProblem", train: "TrainConfig", arguments: argparse.Namespace) -> dict[str, Any]:
    from motet.planner.failures.forecast import STORAGE_BYTES_PER_S, forecast, forecast_text
    from motet.planner.failures.replay import Times, draw_changes, duration_s, read_trace

    for name in ("plan", "picture", "memory_picture", "trace", "straggler", "jitter", "share_cards"):
        if getattr(arguments, name):
            option = name.replace("_", "-")
            raise UserError(
                f"--{option}: cannot be combined with --failures, which makes its own plans and draws no timeline"
            )
    storage_bytes_per_s = STORAGE_BYTES_PER_S if arguments.storage is None else arguments.storage
    if not storage_bytes_per_s > 0:
        raise UserError(f"--storage: is {storage_bytes_per_s}; give bytes per second, such as 2e9")
    mean_s = duration_s(arguments.failures)
    end_s, back_s = _seconds(arguments, "duration"), _seconds(arguments, "back_after")
    if mean_s is not None:
        end_s = end_s or 10 * mean_s
        changes = draw_changes(problem.cluster.num_nodes, mean_s, end_s, seed=arguments.seed, back_after_s=back_s)
    else:
        if back_s is not None:
            raise UserError("--back-after: is read with a rate only; a trace states when nodes come back")
        if re.fullmatch(r"|[-+]?[\d.]+[smhd]", arguments.failures):
            raise UserError(
                f"--failures: {arguments.failures!r} is not a time between losses; give one above 0 such as 6h, or a "
                "trace"
            )
        changes = read_trace(Path(arguments.failures))
        end_s = end_s or changes[-1].time_s
    if end_s <= changes[0].time_s:
        raise UserError(
            f"--duration: must reach beyond {changes[0].time_s:g} s, when the first nodes come; give a time such as 12h"
        )
    result = forecast(
        problem,
        changes,
        end_s,
        checkpoint_every=train.checkpoint_every,
        stops_below_guarantee=train.failures is not None and train.failures.stop_below_guarantee,
        warning_s=_seconds(arguments, "warning") or 0.0,
        storage_bytes_per_s=storage_bytes_per_s,
        start_s=_seconds(arguments, "start") or Times.start_s,
    )
    print(forecast_text(result))
    return result


def _seconds(arguments: argparse.Namespace, name: str) -> float | None:
    from motet.planner.failures.replay import duration_s

    text = getattr(arguments, name)
    seconds = None if text is None else duration_s(text)
    if text is not None and seconds is None:
        option = name.replace("_", "-")
        raise UserError(f"--{option}: {text!r} is not a time; give a number with s, m, h or d, such as 90s or 6h")
    return seconds


def _straggler_factors(texts: list[str]) -> dict[int, float]:
    """Factors by rank, from `RANK=FACTOR`."""
    factors: dict[int, float] = {}
    for text in texts:
        rank, _, factor = text.partition("=")
        try:
            number, times = int(rank), float(factor)
        except ValueError:
            raise UserError(f"--straggler: {text!r} is not RANK=FACTOR, such as 3=1.5") from None
        if number in factors:
            raise UserError(f"--straggler: rank {number} is given twice; give one factor for each rank")
        factors[number] = times
    return factors
