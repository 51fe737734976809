"""Arguments that commands share: the run file, plans, seeds and files to write."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from motet.errors import UserError

if TYPE_CHECKING:
    from motet.config import RunConfig

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def add_run_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", metavar="RUN.yaml", help="the run file (docs/run-file.md)")


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", metavar="plan.json", help="use this plan, a file written by motet plan --out")


def add_seed(parser: argparse.ArgumentParser, of: str) -> None:
    parser.add_argument("--seed", type=_whole_number, default=0, help=of)


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"is {text!r}; give a whole number of at least 0")
    return int(text)


def load_config(arguments: argparse.Namespace) -> "RunConfig":
    from motet.config import load_run_config

    return load_run_config(arguments.run_file, arguments.overrides)


def picture_file(path: str, option: str) -> Path:
    """Same as `file_to_write`, for a picture."""
    if Path(path).suffix not in PICTURE_SUFFIXES:
        raise UserError(f"{option} {path}: is not a supported picture format; give {' or '.join(PICTURE_SUFFIXES)}")
    return file_to_write(path, option)


def file_to_write(path: str, option: str) -> Path:
    """Checks, before any work is done, that a file can be written, and makes its folder. Raises `UserError`."""
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written ({error.strerror}); give another path") from None
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{option} {path}: cannot be written; give the path of a file")
    return Path(path)


def write_text(path: Path, text: str, option: str) -> None:
    """Writes a file. Raises `UserError` naming the option if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written ({error.strerror}); give another path") from None
