"""Destinations of metrics: JSON lines always, TensorBoard and Weights & Biases on request; rank 0 writes."""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from motet.errors import UserError
from motet.runtime.checkpoint.folder import write_atomically

Values = Mapping[str, float | Sequence[int]]
"""Metrics by name; those that each rank has of its own, by rank."""


def progress_text(values: Mapping[str, Any]) -> str:
    """What a line of progress says of a step: `values` are its metrics."""
    text = f"loss {values['loss']:.4f}  {values['samples_per_s']:.1f} samples/s  {values['tokens_per_s']:.0f} tokens/s"
    if "mfu" in values:
        text += f"  MFU {values['mfu']:.1%}"
    return f"{text}  {max(values['peak_memory_bytes']) / 2**30:.2f} GiB"


def _numbers(values: Values) -> dict[str, float]:
    """For destinations that take numbers alone: the largest of all ranks' own."""
    return {name: value if isinstance(value, int | float) else max(value) for name, value in values.items()}


LOG_INTERVAL_S = 10.0


class Progress:
    """One line of progress on stderr: live on a terminal, now and then in a log file."""

    def __init__(self, num_steps: int, finished_steps: int, *, visible: bool) -> None:
        self._visible, self._num_steps = visible, num_steps
        self._live: RichProgress | None = None
        self._logged_s = -LOG_INTERVAL_S
        if visible and sys.stderr.isatty():
            self._live = RichProgress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._live.add_task("", total=num_steps, completed=finished_steps)
            self._live.start()

    def advance(self, finished_steps: int, values: Values) -> None:
        if not self._visible:
            return
        text = progress_text(values)
        if self._live is not None:
            self._live.update(self._task, completed=finished_steps, description=text)
        elif time.monotonic() - self._logged_s >= LOG_INTERVAL_S or finished_steps == self._num_steps:
            self._logged_s = time.monotonic()
            print(f"step {finished_steps}/{self._num_steps}  {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text)
        elif self._visible:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


class OutputError(OSError):
    """A file of the output folder cannot be written; the text says which and why."""


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror})") from error


def append_line(path: Path, line: str) -> None:
    with _writing(path), path.open("a") as file:
        file.write(line + "\n")


class Sink(Protocol):
    def write(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One object per line; a number that is not finite is null. A resumed run goes on after the lines of the steps
    that it keeps."""

    def __init__(self, path: Path, *, keep_until_step: int) -> None:
        keep_lines(path, until_step=keep_until_step)
        self._path = path
        with _writing(path):
            self._file = path.open("a", buffering=1)

    def write(self, step: int, values: Values) -> None:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        with _writing(self._path):
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
        if not os.fstat(self._file.fileno()).st_nlink:
            raise OutputError(f"{self._path} was deleted by another process")

    def close(self) -> None:
        self._file.close()


def keep_lines(path: Path, *, until_step: int) -> None:
    """Drops the lines of later steps from a file of JSON lines, if there is one."""
    if path.is_file():
        with _writing(path):
            lines = [line for line in path.read_text().splitlines() if _step_of(line) <= until_step]
            write_atomically(path, "".join(f"{line}\n" for line in lines))


def _step_of(line: str) -> float:
    """Infinite for a line that a crash cut short."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


class TensorBoard:
    def __init__(self, folder: Path, *, keep_until_step: int) -> None:
        module: Any = _import("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder), purge_step=keep_until_step + 1)

    def write(self, step: int, values: Values) -> None:
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Offline: `wandb sync` sends it where it belongs."""

    def __init__(self, folder: Path) -> None:
        self._run: Any = _import("wandb", "wandb").init(dir=str(folder), project="motet", mode="offline")

    def write(self, step: int, values: Values) -> None:
        self._run.log(_numbers(values), step=step)

    def close(self) -> None:
        self._run.finish()


def open_sinks(names: Iterable[str], folder: Path, *, keep_until_step: int) -> list[Sink]:
    """`names`: of `jsonl`, `tensorboard`, `wandb`. Raises `UserError` if the package is not installed."""
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", keep_until_step=keep_until_step)]
    if "tensorboard" in names:
        sinks.append(TensorBoard(folder / "tensorboard", keep_until_step=keep_until_step))
    if "wandb" in names:
        sinks.append(WeightsAndBiases(folder))
    return sinks


def _import(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise UserError(
            f"train.metrics: {package} is not installed; pip install 'motet[{package}]' or leave it out"
        ) from None
