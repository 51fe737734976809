"""Training of a model that generates: it learns, resumes to the bit, and has the same losses under another plan."""

import json
from pathlib import Path
from typing import Any

import pytest
from distributed import run_distributed
from generator_run import planned

from motet.runtime.training.worker import train_worker

STEPS = 4


def results_of(folder: Path, num_devices: int, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of several runs, one after the other, on the same processes."""
    cases = [planned(folder, {"num_devices": num_devices, **run}) for run in runs]

    def work(rank: int) -> list[dict[str, Any]]:
        return [train_worker(config, plan) for config, plan in cases]

    return run_distributed(work, num_devices, timeout=200)[0]


def test_it_resumes_to_the_bit_and_under_another_plan(tmp_path: Path) -> None:
    def run(name: str, steps: int, explicit: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
        own = {"steps": steps, "output": str(tmp_path / name), "learning_rate": 1e-2, **train}
        return {
            "explicit": explicit or {"image": {"pp": 2}},
            "train": {"checkpoint_every": 2, "eval_every": 4, "eval_samples": 8, "lr_schedule": "constant", **own},
            "held_out": True,
        }

    resumed = {"resume": str(tmp_path / "half" / "checkpoints" / "step_00000002")}
    whole, half, rest, other = results_of(
        tmp_path,
        4,
        [
            run("whole", STEPS),
            run("half", 2),
            run("rest", STEPS, **resumed),
            run("other", STEPS, {"image": {"dp": 2}}, **resumed),
        ],
    )
    assert whole["losses"][-1] < whole["losses"][0]
    assert half["losses"] == whole["losses"][:2]
    assert rest["losses"] == whole["losses"][2:]
    assert rest["evaluations"] == whole["evaluations"]
    assert other["losses"] == pytest.approx(whole["losses"][2:], rel=1e-9)
    assert other["evaluations"][STEPS] == pytest.approx(whole["evaluations"][STEPS], rel=1e-9)
    values = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    steps = [value for value in values if "loss_image" in value]
    assert [v["loss"] for v in steps] == pytest.approx([v["loss_language_model"] + v["loss_image"] for v in steps])
