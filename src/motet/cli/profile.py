"""`motet profile`: measures what every layer costs on this machine."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.cli.run_file import add_run_file, file_to_write, load_config, write_text

if TYPE_CHECKING:
    from motet.config import RunConfig

HELP = "measure each layer's forward, input gradient and weight gradient on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument("--out", metavar="costs.json", help="file for the costs (default: costs.json in train.output)")

    parser.add_argument("--speeds", metavar="speeds.json", help="measure kernels instead, to calibrate computed costs")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = load_config(arguments)
    if arguments.speeds:
        return _calibrate(config, file_to_write(arguments.speeds, "--speeds"))
    path = file_to_write(arguments.out or f"{config.train.output}/costs.json", "--out")
    from motet.api import profile

    table = profile(config)
    write_text(path, table.to_json() + "\n", "--out")
    print(f"costs written to {path}; use them with --set cluster.costs={path}")
    fits = {key: note for key, note in table.notes.items() if isinstance(note, dict)}
    for key, fit in fits.items():
        print(f"{key}: median error of the fit {fit['median_error']:.1%}, worst {fit['worst_error']:.1%}")
    return {"path": str(path), "hardware": table.hardware, "date": table.date, "notes": dict(table.notes)}


def _calibrate(config: "RunConfig", path: Path) -> dict[str, Any]:
    """On one device, in this process."""
    from dataclasses import asdict

    import torch

    from motet.costs.profiling.links import measure_speeds
    from motet.planner.from_run_file import describe_cluster

    torch.set_num_threads(1)
    described = describe_cluster(config).device
    speeds, measured = measure_speeds(torch.device(config.cluster.device), described, config.train.dtype)
    write_text(path, speeds.to_json() + "\n", "--speeds")
    print(f"{len(measured)} kernels measured; speeds written to {path}; use them with --set cluster.speeds={path}")
    for kind in ("gemm", "convolution", "attention", "memory"):
        speed = getattr(speeds, kind)
        peak = f"{speed.limit:.1%} of {described.name}'s peak"
        print(f"{kind}: {peak} when large, {speed.overhead_s * 1e6:.1f} us of overhead for each kernel")
    return {"path": str(path), **asdict(speeds)}
