"""`motet train`: trains on processes that it starts itself, or as one of those that torchrun started."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from motet.addresses import host_and_port
from motet.cli.run_file import add_plan, add_run_file, load_config
from motet.errors import UserError

if TYPE_CHECKING:
    from motet.config import RunConfig

HELP = "train; alone it starts its own processes, under torchrun it joins them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    add_plan(parser)
    parser.add_argument(
        "--data",
        metavar="ADDRESS,...",
        help="data servers (motet serve-data), such as grpc://host:8815; replaces data.servers",
    )
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="join a training that continues when nodes fail (train.failures) as a further node",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="with train.failures, on several machines: start no node here, but wait at this address of this machine "
        "until cluster.num_nodes nodes have joined by --join",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.data is not None:
        arguments.overrides.append(f"data.servers={json.dumps(arguments.data.split(','))}")
    config = load_config(arguments)
    if arguments.join is not None and arguments.listen is not None:
        raise UserError("--listen: does not go with --join: one process listens, and each node joins it")
    if arguments.join is not None:
        join(config, arguments.join)
        return {}
    listen = None if arguments.listen is None else _listen(config, arguments.listen)
    from motet.api import train
    from motet.report.plan_report import report_text

    result = train(config, plan=arguments.plan, listen=listen)
    if result:
        predicted, measured = result["predicted"], result["measured"]
        print(report_text(predicted))
        print(
            f"measured: iteration {1e3 * measured['iteration_time_s']:.2f} ms, "
            f"{measured['throughput_samples_per_s']:.1f} samples/s, bubble {measured['bubble_fraction']:.1%}"
        )
        print(f"metrics, checkpoints, timeline and trace are in {config.train.output}")
    return result


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
    from motet.api import read_problem
    from motet.resilience.succession import templates_of

    store_address = host_and_port(address)
    if store_address is None:
        raise UserError(f"--join: is {address!r}; give HOST:PORT, as the training that is to be joined has printed it")
    if config.train.failures is None:
        raise UserError("--join: train.failures is null; give the run file of the training that is to be joined")
    from motet.resilience.launch_nodes import join_training

    node_size = config.cluster.num_devices // config.cluster.num_nodes
    join_training(config, lambda: templates_of(read_problem(config)), store_address, node_size)
