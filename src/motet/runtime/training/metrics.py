"""Where the numbers of a run go: JSON lines always, TensorBoard and Weights & Biases if asked for; rank 0 writes."""

import json
import math
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from motet.errors import UserError
from motet.runtime.checkpoint.atomic_write import write_atomically


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One object per line; a number that is not finite is null. A resumed run goes on after the lines of the steps
    that it keeps."""

    def __init__(self, path: Path, *, keep_until_step: int) -> None:
        keep_lines(path, until_step=keep_until_step)
        self._file = path.open("a", buffering=1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")

    def close(self) -> None:
        self._file.close()


def keep_lines(path: Path, *, until_step: int) -> None:
    """Drops the lines of later steps from a file of JSON lines, if there is one."""
    if path.is_file():
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

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Offline: `wandb sync` sends it where it belongs."""

    def __init__(self, folder: Path) -> None:
        self._run: Any = _import("wandb", "wandb").init(dir=str(folder), project="motet", mode="offline")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

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
