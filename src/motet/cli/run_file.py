"""The arguments that name a run file, and how it is read."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet.config import RunConfig
    from motet.plan import Plan
from typing import TYPE_CHECKING

from motet.errors import UserError

if TYPE_CHECKING:
    from motet.assignment.sample import Sample
    from motet.config import RunConfig
    from motet.data.layouts import SampleSource
    from motet.data.loader import LoadedBatch
    from motet.planner.problem import PlanningProblem


PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def add_run_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", metavar="RUN.yaml", help="the run file (docs/run-file.md)")


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", metavar="plan.json", help="take this plan, as written by motet plan --out")


def add_seed(parser: argparse.ArgumentParser, of: str) -> None:
    parser.add_argument("--seed", type=_whole_number, default=0, help=of)


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"is {text!r}; give a whole number of at least 0")
    return int(text)


def load_config(arguments: argparse.Namespace) -> "RunConfig":
    from motet.config import load_run_config

    return load_run_config(arguments.run_file, arguments.overrides)


def read_plan(path: str, config: "RunConfig") -> "Plan":
    """Says on stderr what of the run file it overrides. Raises `UserError` naming the file."""
    from motet.errors import UserError
    from motet.plan import Plan

    try:
        text = Path(path).read_text()
    except OSError as error:
        raise UserError(f"--plan {path}: cannot be read ({error.strerror}); motet plan --out writes one") from None
    except UnicodeDecodeError:
        raise UserError(f"--plan {path}: is not a text file; motet plan --out writes one") from None
    try:
        plan = Plan.from_json(text)
    except ValueError as error:
        raise UserError(f"--plan {path}: {error}") from None
    _check_sharded_once(path, plan, config)
    keys = ["schedule"]
    if not config.model.towers and not plan.replica_microbatches:  # There numbers of microbatches are the planner's.
        keys.append("num_microbatches")
    for key in keys:
        own, given = getattr(plan, key), getattr(config.parallel, key)
        if key in config.parallel.model_fields_set and own != given:
            print(f"--plan {path}: its {key} is {own}; parallel.{key}, {given}, is not read", file=sys.stderr)
    return plan


def _check_sharded_once(path: str, plan: "Plan", config: "RunConfig") -> None:
    from motet.errors import UserError

    if not config.parallel.zero1 or config.train.failures is not None:
        return
    for name, module in plan.modules.items():
        if module.fully_sharded and any(stage.cp_size > 1 for replica in module.replicas for stage in replica.stages):
            raise UserError(
                f"--plan {path}: modules.{name}.fully_sharded shards the optimizer's state already; set parallel.zero1 "
                "to false"
            )


def picture_file(path: str, option: str) -> Path:
    """As `file_to_write`, of a picture."""
    from motet.errors import UserError

    if Path(path).suffix not in PICTURE_SUFFIXES:
        raise UserError(f"{option} {path}: is no picture that can be drawn; give {' or '.join(PICTURE_SUFFIXES)}")
    return file_to_write(path, option)


def file_to_write(path: str, option: str) -> Path:
    """Makes its folder; asked for before the work is done. Raises `UserError` naming the option."""
    from motet.errors import UserError

    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written ({error.strerror}); give another path") from None
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{option} {path}: cannot be written; give the path of a file")
    return Path(path)


def write_text(path: Path, text: str, option: str) -> None:
    """Raises `UserError` naming the option if the file cannot be written."""
    from motet.errors import UserError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written ({error.strerror}); give another path") from None


# The first global batch of a run, from which it is planned and profiled.


MANY_SAMPLES = 200_000


def read_batch(config: "RunConfig") -> "LoadedBatch":
    """With its tensors. Raises `UserError` naming the key or file that is wrong."""
    from motet.data.loader import Loader
    from motet.data.run_file import open_data
    from motet.data.service.tickets import InProcess

    train = open_data(config).train
    _check_size(config, len(train))
    return next(Loader(InProcess(train), config.train.global_batch_size, seed=config.train.seed, batches_ahead=0))


def read_samples(config: "RunConfig", most: int | None = None) -> "tuple[Sample, ...]":
    """The metadata of the same batch, without torch; or of the first epoch's samples up to `most`. Of data servers, if
    there are any."""
    from motet.data.run_file import open_samples

    if getattr(config.data, "servers", ()):
        return _samples_of_servers(config, most)
    train = open_samples(config)
    skips = getattr(config.data, "on_corrupt", "stop") == "skip"
    samples = [_sample(train, index, skips) for index in _first_indices(config, len(train), most)]
    return tuple(sample for sample in samples if sample is not None)


def read_problem(config: "RunConfig") -> "PlanningProblem":
    from motet.planner.from_run_file import planning_problem

    samples = read_samples(config)
    if len(samples) > MANY_SAMPLES:
        print(
            f"each plan that is tried is simulated with all {len(samples)} samples of a batch, which may take minutes",
            file=sys.stderr,
        )
    return planning_problem(config, samples)


def _first_indices(config: "RunConfig", num_samples: int, most: int | None) -> "list[int]":
    from motet.data.loader import epoch_order

    _check_size(config, num_samples)
    return epoch_order(num_samples, config.train.seed, epoch=0)[: most or config.train.global_batch_size].tolist()


def _sample(train: "SampleSource", index: int, skips: bool) -> "Sample | None":
    try:
        return train.sample(index)
    except UserError:
        if not skips:
            raise
        return None


def _samples_of_servers(config: "RunConfig", most: int | None) -> "tuple[Sample, ...]":
    """Asked for in another process: gRPC must not have begun in one that will fork the ranks."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, get_context("fork")) as process:
        return process.submit(_ask_servers, config, most).result()


def _ask_servers(config: "RunConfig", most: int | None) -> "tuple[Sample, ...]":
    from motet.assignment.sample import Sample
    from motet.data.service.opening import open_producers

    producer = open_producers(config).train
    prepared = producer.samples(_first_indices(config, len(producer), most))
    return tuple(sample for sample in prepared if isinstance(sample, Sample))


def _check_size(config: "RunConfig", num_samples: int) -> None:
    size = config.train.global_batch_size
    if size > num_samples:
        raise UserError(f"train.global_batch_size: is {size}, but there are {num_samples} training samples; give fewer")
