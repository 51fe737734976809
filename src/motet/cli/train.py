"""`motet train`: trains on processes that it starts itself, or as one of those that torchrun started."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from motet.addresses import host_and_port
from motet.cli.run_file import add_plan, add_run_file, load_config
from motet.errors import UserError

if TYPE_CHECKING:
    from motet.config import RunConfig
    from motet.resilience.store.etcd import StoreAddress

HELP = "train and export the model, on processes that motet or torchrun starts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    add_plan(parser)
    parser.add_argument(
        "--data",
        metavar="ADDRESS,...",
        help="data servers (motet serve-data), such as grpc://host:8815; replaces data.servers",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="delete the checkpoints of an earlier run in train.output; sets train.overwrite",
    )
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="join a training that continues when nodes fail (train.failures) as a further node; HOST:PORT or "
        "etcd://HOST:PORT,.../NAME, as the training has printed it",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="with train.failures, on several machines: start no node here, but wait at this address of this machine "
        "until cluster.num_nodes nodes have joined by --join; or etcd://HOST:PORT,.../NAME, to wait for them in etcd",
    )
    parser.add_argument(
        "--store",
        metavar="etcd://HOST:PORT,.../NAME",
        help="with train.failures, on one machine: agree on memberships in etcd, under this name, instead of in a "
        "process of this machine",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.data is not None:
        arguments.overrides.append(f"data.servers={json.dumps(arguments.data.split(','))}")
    if arguments.overwrite:
        arguments.overrides.append("train.overwrite=true")
    config = load_config(arguments)
    if arguments.join is not None and arguments.listen is not None:
        raise UserError("--listen: cannot be combined with --join: one process listens, and each node joins it")
    if arguments.join is not None:
        join(config, arguments.join)
        return {}
    listen = None if arguments.listen is None else _address(config, "listen", arguments.listen)
    store = None if arguments.store is None else _address(config, "store", arguments.store)
    if isinstance(store, tuple) or (store is not None and listen is not None):
        raise UserError("--store: takes etcd://HOST:PORT,.../NAME only; where nodes join, give the store to --listen")
    from motet.api import train
    from motet.report.plan_report import report_text

    result = train(config, plan=arguments.plan, listen=listen, store=store)
    if result:
        for name, own in result.get("phases", {"": result}).items():
            if name:
                print(f"phase {name}")
            print(report_text(own["predicted"]))
            measured = own["measured"]
            print(
                f"measured: iteration {1e3 * measured['iteration_time_s']:.2f} ms, "
                f"{measured['throughput_samples_per_s']:.1f} samples/s, bubble {measured['bubble_fraction']:.1%}"
            )
        print(f"metrics, checkpoints, timeline and trace are in {config.train.output}")
    return result


def _address(config: "RunConfig", option: str, text: str) -> "StoreAddress":
    from motet.resilience.store.etcd import EtcdAddress

    if config.train.failures is None:
        instead = "give the run file of the training" if option == "join" else "or start the processes by torchrun"
        raise UserError(f"--{option}: train.failures is null; set it, {instead}")
    address = EtcdAddress.parse(text) or (None if "/" in text else host_and_port(text))
    if address is None:
        raise UserError(f"--{option}: is {text!r}; give HOST:PORT, or etcd://HOST:PORT,HOST:PORT,.../NAME")
    return address


def join(config: "RunConfig", address: str) -> None:
    """Runs one node of a training that was started elsewhere with the same run file, until it ends or is told to leave.

    Raises `UserError` if the address is invalid, nothing answers there, or the run file differs."""
    from motet.api import read_problem
    from motet.resilience.succession import templates_of

    store_address = _address(config, "join", address)
    from motet.resilience.launch_nodes import join_training

    node_size = config.cluster.num_devices // config.cluster.num_nodes
    join_training(config, lambda: templates_of(read_problem(config)), store_address, node_size)
