"""Runs `python -m motet` many times: each in a process of its own, forked from one that has imported what it needs."""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from motet.environment import set_environment

POLL_S = 0.01
LIST_MODULES = """
import sys
from motet.cli.main import main
status = main(sys.argv[1:])
with open("modules", "w") as file:
    print(*sys.modules, sep="\\n", file=file)
sys.exit(status)
"""


@dataclass(frozen=True)
class CommandResult:
    status: int
    """The exit code; negative: the signal that ended it."""
    out: str
    err: str
    cpu_s: float


class ForkedCommands:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, folder: Path, arguments: Sequence[str], *, given: str, timeout_s: float) -> CommandResult:
        """In that folder. `given`: what it reads from stdin. After `timeout_s` it is killed."""
        ask, answers = self._process.stdin, self._process.stdout
        assert ask is not None
        assert answers is not None
        streams = [str(folder / f".{name}") for name in ("stdin", "stdout", "stderr")]
        Path(streams[0]).write_text(given)
        ask.write(json.dumps([str(folder), list(arguments), streams, timeout_s]) + "\n")
        ask.flush()
        status, cpu_s = json.loads(answers.readline())
        out, err = (Path(path).read_bytes().decode(errors="backslashreplace") for path in streams[1:])
        return CommandResult(status, out, err, cpu_s)


@contextmanager
def forked_commands(folder: Path, arguments: Sequence[str]) -> Iterator[ForkedCommands]:
    """`folder`, `arguments`: of a command that goes well; what it imports is imported first, and nothing else of it is
    left."""
    subprocess.run([sys.executable, "-c", LIST_MODULES, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    command = [sys.executable, __file__, str(folder / "modules")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield ForkedCommands(process)
        finally:
            process.kill()


def _serve(modules: Path) -> None:
    set_environment()
    for name in modules.read_text().splitlines():
        with contextlib.suppress(ImportError):  # Some are made while others are imported.
            importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        folder, arguments, streams, timeout_s = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_become_command(folder, arguments, streams))
        print(json.dumps(_wait(child, timeout_s)), flush=True)


def _become_command(folder: str, arguments: list[str], streams: list[str]) -> int:
    """As `python -m motet` in that folder. Returns the exit code."""
    os.chdir(folder)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.stdin = open(0)  # noqa: SIM115
    sys.path[0], sys.argv = folder, ["motet", *arguments]
    try:
        runpy.run_module("motet", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _wait(child: int, timeout_s: float) -> tuple[int, float]:
    """Exit code and processor seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(POLL_S)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
