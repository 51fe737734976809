"""Training of a model that generates: it learns, resumes to the bit, and has the same losses under another plan."""

from pathlib import Path
from typing import Any

import pytest
from distributed import run_distributed
from generator_run import planned

from motet.runtime.training.worker import train_worker

STEPS = 4


def losses_of(folder: Path, num_devices: int, runs: list[dict[str, Any]]) -> list[list[float]]:
    """Of several runs, one after the other, on the same processes."""
    cases = [planned(folder, {"num_devices": num_devices, **run}) for run in runs]

    def work(rank: int) -> list[list[float]]:
        return [train_worker(config, plan)["losses"] for config, plan in cases]

    return run_distributed(work, num_devices, timeout=200)[0]


def test_it_resumes_to_the_bit_and_under_another_plan(tmp_path: Path) -> None:
    def run(name: str, steps: int, explicit: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
        own = {"steps": steps, "output": str(tmp_path / name), "learning_rate": 1e-2, "warmup_steps": 0, **train}
        return {"explicit": explicit or {"image": {"pp": 2}}, "train": {"checkpoint_every": 2, **own}}

    resumed = {"resume": str(tmp_path / "half" / "checkpoints" / "step_00000002")}
    schedule = {"lr_schedule": "constant"}
    whole, half, rest, other = losses_of(
        tmp_path,
        4,
        [
            run("whole", STEPS, **schedule),
            run("half", 2, **schedule),
            run("rest", STEPS, **schedule, **resumed),
            run("other", STEPS, {"image": {"dp": 2}}, **schedule, **resumed),
        ],
    )
    assert whole[-1] < whole[0]
    assert half == whole[:2]
    assert rest == whole[2:]
    assert other == pytest.approx(whole[2:], rel=1e-9)
