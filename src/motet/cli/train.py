"""`motet train`: trains on processes that it starts itself, or as one of those that torchrun started."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from motet.addresses import host_and_port
from motet.cli.run_file import add_plan, add_run_file, load_config, read_plan, read_problem
from motet.errors import UserError
from motet.plan import LANGUAGE_MODEL
from motet.timeline import Timeline

if TYPE_CHECKING:
    from motet.config import RunConfig
    from motet.plan import Plan
    from motet.planner.problem import PlanningProblem

LONGEST_START_S = 300.0
"""How long a rank waits for others before the first step, and while a checkpoint is written."""

HELP = "train; alone it starts its own processes, under torchrun it joins them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    add_plan(parser)
    parser.add_argument(
        "--data",
        metavar="ADDRESS,...",
        help="data servers (motet serve-data), such as grpc://host:8815: in the place of data.servers",
    )
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="be one more node of a training that goes on when nodes fail (train.failures)",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="with train.failures, on several machines: start no node here, but wait at this address of this machine "
        "until cluster.num_nodes nodes have come by --join",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.data is not None:
        arguments.overrides.append(f"data.servers={json.dumps(arguments.data.split(','))}")
    config = load_config(arguments)
    from motet.planner.from_run_file import plan_for
    from motet.report.plan_report import report_text

    if arguments.join is not None and arguments.listen is not None:
        raise UserError("--listen: does not go with --join: one process listens, and each node joins it")
    if arguments.join is not None:
        join(config, arguments.join)
        return {}
    problem = read_problem(config)
    plan = read_plan(arguments.plan, config) if arguments.plan else plan_for(config, problem)
    result = train(
        config, problem, plan, listen=None if arguments.listen is None else _listen(config, arguments.listen)
    )
    if result:
        predicted, measured = result["predicted"], result["measured"]
        print(report_text(predicted))
        print(
            f"measured: iteration {1e3 * measured['iteration_time_s']:.2f} ms, "
            f"{measured['throughput_samples_per_s']:.1f} samples/s, idle {measured['bubble_fraction']:.1%}"
        )
        print(f"metrics, checkpoints, timeline and trace are in {config.train.output}")
    return result


def train(
    config: "RunConfig", problem: "PlanningProblem", plan: "Plan", *, listen: tuple[str, int] | None = None
) -> dict[str, Any]:
    """Trains and writes the predicted and the measured timeline. Under torchrun only rank 0 gets a result.

    Raises `UserError` before any process is started if the plan is not one of the model or does not fit."""
    from motet.planner.evaluate import evaluate
    from motet.report.plan_report import report_evaluation, report_measured

    evaluation = evaluate(problem, plan)
    if not evaluation.fits:
        raise UserError(f"cluster.memory_bytes: the plan does not fit: {evaluation.overflows[0]}")
    _make_output(config)
    if config.train.failures is not None:
        result = train_on_nodes(config, problem, plan, listen)
    else:
        result = launch_on_plan("train", config, plan, evaluation.result.peak_memory_bytes)
    if not result:
        return {}
    timeline = Timeline.from_json(result["measured"].pop("timeline"))
    save_timelines(config, {"predicted": evaluation.result.timeline, "measured": timeline})
    predicted = report_evaluation(evaluation, dtype=config.train.dtype)
    measured = report_measured(result["measured"], timeline, predicted)
    return {**result, "measured": measured, "predicted": predicted, "export": export(config, result["checkpoint"])}


def _make_output(config: "RunConfig") -> None:

    try:
        Path(config.train.output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"train.output: {config.train.output} cannot be made ({error.strerror}); give another folder"
        ) from None


def export(config: "RunConfig", checkpoint: str | None) -> str | None:
    """Writes the last checkpoint as a folder that plain transformers loads, and returns the folder; None if the run
    writes no checkpoints. Raises `UserError` if the checkpoint is damaged."""
    if checkpoint is None:
        return None
    from motet.data.run_file import open_preparation
    from motet.models.hub.export import describe_config, export_parts, export_towers
    from motet.models.hub.weights import CheckpointTensors

    preparation = open_preparation(config)
    tools, tensors, folder = preparation.tools, CheckpointTensors(checkpoint), Path(config.train.output) / "export"
    if LANGUAGE_MODEL in tools:
        description = describe_config(config.model, preparation.conversation.placeholder_ids)
        export_parts(tensors, description, folder, tokenizer=tools.pop(LANGUAGE_MODEL), processors=tools)
    else:
        export_towers(tensors, config.model, folder, processors=tools)
    return str(folder)


def launch_on_plan(what: Literal["train", "verify"], config: "RunConfig", plan: "Plan", *more: Any) -> dict[str, Any]:
    """Returns the result of the worker on rank 0; under torchrun it is empty on all other ranks. Devices without a rank
    in the plan stay idle. `more`: further arguments of the worker."""
    from motet.runtime.launch import check_world_size, launch, started_by_torchrun

    check_world_size(plan.num_ranks, config.cluster.num_devices, config.cluster.num_nodes)
    if plan.num_ranks < config.cluster.num_devices and not started_by_torchrun():
        print(f"the plan runs on {plan.num_ranks} of {config.cluster.num_devices} devices", file=sys.stderr)
    # Imported before the processes are forked, so that none has to.
    from motet.runtime.training.worker import train_worker
    from motet.runtime.verification.worker import verify_worker

    result = launch(
        train_worker if what == "train" else verify_worker,
        config,
        plan,
        *more,
        num_processes=plan.num_ranks,
        device=config.cluster.device,
        timeout_s=max(LONGEST_START_S, config.train.step_timeout_s),
    )
    return result or {}


def train_on_nodes(
    config: "RunConfig", problem: "PlanningProblem", plan: "Plan", listen: tuple[str, int] | None
) -> dict[str, Any]:
    """Trains with nodes that may fail: groups of local processes, or nodes of other machines that join at `listen`."""
    from motet.resilience.succession import check_survivable, templates_of

    cluster = config.cluster
    check_survivable(config, plan)
    from motet.runtime.launch import started_by_torchrun

    if started_by_torchrun():
        raise UserError(
            "train.failures: motet starts the processes of such a run itself, and torchrun would end them all with the "
            "first; run it without torchrun, on several machines by --listen and --join (docs/resilience.md)"
        )
    if plan.num_ranks != cluster.num_devices:
        raise UserError(
            f"cluster.num_devices: is {cluster.num_devices}, but the plan has {plan.num_ranks} ranks; give "
            f"cluster.num_devices={plan.num_ranks}, or a layout that fills {cluster.num_devices}"
        )
    from motet.resilience.launch_nodes import train_on_nodes

    node_size = cluster.num_devices // cluster.num_nodes
    templates = templates_of(problem)
    return train_on_nodes(config, plan, templates, num_nodes=cluster.num_nodes, node_size=node_size, listen=listen)


def _listen(config: "RunConfig", address: str) -> tuple[str, int]:

    if config.train.failures is None:
        raise UserError("--listen: train.failures is null; set it, or start the processes by torchrun")
    listen = host_and_port(address)
    if listen is None:
        raise UserError(f"--listen: is {address!r}; give HOST:PORT, an address of this machine and a free port")
    return listen


def join(config: "RunConfig", address: str) -> None:
    """Runs one node of a training that was started elsewhere with the same run file, until it ends or is told to leave.

    Raises `UserError` if the address is invalid, nothing answers there, or the run file differs."""
    from motet.resilience.succession import templates_of

    store_address = host_and_port(address)
    if store_address is None:
        raise UserError(f"--join: is {address!r}; give HOST:PORT, as the training that is to be joined has printed it")
    if config.train.failures is None:
        raise UserError("--join: train.failures is null; give the run file of the training that is to be joined")
    from motet.resilience.launch_nodes import join_training

    node_size = config.cluster.num_devices // config.cluster.num_nodes
    join_training(config, lambda: templates_of(read_problem(config)), store_address, node_size)


def save_timelines(config: "RunConfig", timelines: Mapping[str, Timeline]) -> None:
    from motet.report.chrome_trace import save_trace
    from motet.report.pictures import save_timelines

    output = Path(config.train.output)
    save_timelines(timelines, output / "timeline.png")
    save_trace(timelines, output / "trace.json")
    for title, timeline in timelines.items():
        (output / f"{title}.json").write_text(timeline.to_json())
