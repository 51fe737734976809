"""Processes are killed; those that are left go on, and come to what an undisturbed run comes to."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training import plan_of, run_config, train

from motet.config import RunConfig
from motet.resilience.failure_log import FAILURES
from motet.resilience.launch_nodes import train_on_nodes
from motet.runtime.trainer import Trainer

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


def train_and(monkeypatch: pytest.MonkeyPatch, config: RunConfig, at_step: Callable[[Trainer], None]) -> dict[str, Any]:
    """Trains on nodes of one process each. `at_step`: called in every process before each of its steps."""
    original = Trainer._step

    def step(self: Trainer, batch: Any) -> Any:
        at_step(self)
        return original(self, batch)

    monkeypatch.setattr(Trainer, "_step", step)
    plan = plan_of(config)
    return train_on_nodes(config, plan, None, num_nodes=plan.num_ranks, node_size=1)


def failures(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.train.output) / FAILURES).read_text().splitlines()]


def once() -> Callable[[], bool]:
    """True for the first process that asks, in all processes."""
    lock = multiprocessing.get_context("fork").Lock()
    return lambda: lock.acquire(block=False)


def test_survivors_go_on_and_lose_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_of(tmp_path / "killed")
    first = once()

    def kill(trainer: Trainer) -> None:
        if trainer.finished_steps == 2 and trainer.engine.model.mesh.rank == 3 and first():
            os.kill(os.getpid(), signal.SIGKILL)

    result = train_and(monkeypatch, config, kill)
    monkeypatch.undo()
    expected = train(config_of(tmp_path / "undisturbed"))[0]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert result["world_size"] == 2
    [failure] = failures(config)
    assert [(change["kind"], change["node"]) for change in failure["changes"]] == [("lost", 3)]
    assert "was ended by SIGKILL" in failure["changes"][0]["how"]
    assert failure["done"] == "went on with step 3: 1 whole pipelines are left"
