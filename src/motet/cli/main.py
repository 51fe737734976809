"""The command line: `motet plan|simulate|profile|data-stats|train|serve-data|verify|family|families|demo`.

Exit codes: 0: done; 2: the user's input is wrong (one line says what and how to correct it); 1: failed;
130: interrupted.
Commands import what they need when they run, so that help is fast and planning does not import torch.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Any, NoReturn, Protocol

from motet import __version__
from motet.cli import data_stats, demo, families, family, plan, profile, serve_data, simulate, train, verify
from motet.environment import collect_rarely, is_first_process, set_environment
from motet.errors import UserError, one_line


class Command(Protocol):
    """The interface of the modules of commands."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """Prints the report for people, and returns the object for `--json`."""


COMMANDS: Mapping[str, Command] = {
    "plan": plan,
    "simulate": simulate,
    "profile": profile,
    "data-stats": data_stats,
    "train": train,
    "serve-data": serve_data,
    "verify": verify,
    "family": family,
    "families": families,
    "demo": demo,
}
PLANNING = ("plan", "simulate", "data-stats")
"""Commands that start no ranks."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="motet", description="Training of multimodal models on many devices.")
    parser.add_argument("--version", action="version", version=f"motet {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.HELP, description=command.HELP)
        subparser.add_argument(
            "--set",
            action="append",
            default=[],
            dest="overrides",
            metavar="a.b.c=value",
            help="replace a value of the run file; may be repeated",
        )
        subparser.add_argument(
            "--json", action="store_true", help="print one JSON object on stdout, and everything else on stderr"
        )
        command.add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    set_environment()
    try:
        arguments = build_parser().parse_args(argv)
        if arguments.command in PLANNING:
            collect_rarely()
        with redirect_stdout(sys.stderr) if arguments.json else nullcontext():
            result = COMMANDS[arguments.command].run(arguments)
        if arguments.json and is_first_process():
            print(json.dumps(result))
        sys.stdout.flush()  # Here, so that a closed pipe is handled below.
        return 1 if result.get("passed") is False else 0
    except UserError as error:
        print(f"motet: error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("motet: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the output (`| head`) has closed the pipe; Python must not write the rest on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        where = f" on rank {os.environ['RANK']}" if "RANK" in os.environ else ""
        print(f"motet: failed{where}: {_describe(error)}", file=sys.stderr)
        return 1


def _describe(error: Exception) -> str:
    """The cause in one line, and its traceback. Failures of worker processes include theirs."""
    if type(error).__name__ == "WorkerFailedError":
        return str(error)
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)).rstrip()}"


if __name__ == "__main__":
    sys.exit(main())
