"""The arguments that name a run file, and how it is read."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet.config import RunConfig
    from motet.plan import Plan

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
