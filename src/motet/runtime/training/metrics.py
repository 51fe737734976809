"""Metrics of training steps: rates, and destinations.

JSON lines are always written, TensorBoard and Weights & Biases on request, all by rank 0.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from motet.assignment.sample import Sample
from motet.errors import UserError
from motet.plan import Plan
from motet.runtime.checkpoint.folder import write_atomically
from motet.schedule.routes import Routes

Values = Mapping[str, float | Sequence[int]]
"""Metrics by name; those that each rank has of its own, by rank."""


ShortestSeconds = Callable[[Routes, Sequence[Sample]], float]
"""Seconds of an iteration in which all devices compute model FLOPs at their peak."""


class Rates:
    """Rates of the steps of a plan. `shortest_s`: None: the peak of the devices is not known."""

    def __init__(self, plan: Plan, shortest_s: ShortestSeconds | None) -> None:
        self._shortest_s = shortest_s
        self._with_loss = {module.data_module(name) for name, module in plan.modules.items() if module.loss_weight}

    def of_step(self, routes: Routes, samples: Sequence[Sample], step_s: float) -> dict[str, float]:
        """Tokens are those of the sequences with a loss; of contrastive towers those of all modules."""
        values = {"samples_per_s": len(samples) / step_s, "tokens_per_s": self._num_tokens(samples) / step_s}
        if self._shortest_s is not None:
            values["mfu"] = self._shortest_s(routes, samples) / step_s
        return values

    def _num_tokens(self, samples: Sequence[Sample]) -> int:
        modules = {module for sample in samples for module in sample.layouts}
        return sum(sample.num_tokens(module) for module in modules & self._with_loss or modules for sample in samples)


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
