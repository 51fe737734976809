"""Runs of two alike pipelines, and what becomes of their processes at a step."""

import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from training import plan_of, run_config, train
from waiting import wait_until

from motet.config import RunConfig
from motet.resilience.failure_log import FAILURES
from motet.resilience.launch_nodes import train_on_nodes
from motet.runtime.training.trainer import Trainer

TWO_PIPELINES = {name: {"dp": 2} for name in ("vision", "audio", "language_model")}
STEPS = 6


def config_of(output: Path, **overrides: Any) -> RunConfig:
    overrides = {
        "train__steps": STEPS,
        "train__dtype": "float64",
        "train__failures": {"tolerate": 1, "detect_s": 10},
        **overrides,
    }
    return run_config(output, TWO_PIPELINES, **overrides)


@contextmanager
def before_each_step(at_step: Callable[[Trainer], None]) -> Iterator[None]:
    """`at_step` is called in every process that is started meanwhile."""
    original = Trainer._launch

    def launch(self: Trainer, number: int) -> Any:
        at_step(self)
        return original(self, number)

    with mock.patch.object(Trainer, "_launch", launch):
        yield


def train_and(config: RunConfig, at_step: Callable[[Trainer], None]) -> dict[str, Any]:
    """Trains two pipelines of two nodes of one process each."""
    plan = plan_of(config)
    with before_each_step(at_step):
        return train_on_nodes(config, plan, None, num_nodes=plan.num_ranks, node_size=1)


@cache
def undisturbed() -> list[float]:
    """The losses."""
    with tempfile.TemporaryDirectory() as folder:
        return train(config_of(Path(folder)))[0]["losses"]


def failures(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.train.output) / FAILURES).read_text().splitlines()]


def once() -> Callable[[], bool]:
    """True for the first process that asks, in all processes."""
    lock = multiprocessing.get_context("fork").Lock()
    return lambda: lock.acquire(block=False)


def at(step: int, rank: int, act: Callable[[], None]) -> Callable[[Trainer], None]:
    """`act` once, in the process of that rank, before that step (the first is 0)."""
    first = once()

    def when_due(trainer: Trainer) -> None:
        if trainer.finished_steps == step and trainer.engine.model.mesh.rank == rank and first():
            act()

    return when_due


def all_at(step: int, ranks: Sequence[int], act: Callable[[], None]) -> Callable[[Trainer], None]:
    """As `at`, in several processes, and in none before all have come there: what becomes of one may keep the others
    from coming."""
    together = multiprocessing.get_context("fork").Barrier(len(ranks))

    def meet_and_act() -> None:
        together.wait()
        act()

    acts = [at(step, rank, meet_and_act) for rank in ranks]

    def when_due(trainer: Trainer) -> None:
        for each in acts:
            each(trainer)

    return when_due


def once_a_node_has_joined(folder: Path, act: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    """`act` at each step, but step 1 waits until a node wants to join, or one was lost."""

    def at_step(trainer: Trainer) -> None:
        if trainer.finished_steps == 1:
            wait_until(lambda: trainer.engine.wants_pause() or (folder / FAILURES).exists())
        act(trainer)

    return at_step


def wait_for_a_change(trainer: Trainer) -> None:
    """However long it takes the agents to tell of it: a step before which this is called is not the last."""
    wait_until(trainer.engine.wants_pause)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def warn_node() -> None:
    os.kill(os.getppid(), signal.SIGTERM)


def kill_node() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
