"""Training of a model that generates: it learns, resumes to the bit, and has the same losses under another plan."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_distributed
from generator_run import planned
from safetensors.torch import load_file

import motet
from motet.models.hub.weights import AVERAGE_PREFIX
from motet.runtime.training.worker import train_worker

STEPS = 4


def averages(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in checkpoint.glob("*.safetensors"):
        found |= {name: value for name, value in load_file(path).items() if name.startswith(AVERAGE_PREFIX)}
    return {name.removeprefix(AVERAGE_PREFIX): value for name, value in found.items()}


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
            "ema": 0.25,
        }

    resumed = {"resume": str(tmp_path / "half" / "checkpoints" / "step_00000002")}
    whole, half, rest, other, cut = results_of(
        tmp_path,
        4,
        [
            run("whole", STEPS),
            run("half", 2),
            run("rest", STEPS, **resumed),
            run("other", STEPS, {"image": {"dp": 2}}, **resumed),
            run("cut", STEPS, {"image": {"tp": 2}}, **resumed),
        ],
    )
    assert whole["losses"][-1] < whole["losses"][0]
    assert half["losses"] == whole["losses"][:2]
    assert rest["losses"] == whole["losses"][2:]
    assert rest["evaluations"] == whole["evaluations"]
    for planned_otherwise in (other, cut):
        assert planned_otherwise["losses"] == pytest.approx(whole["losses"][2:], rel=1e-9)
        assert planned_otherwise["evaluations"][STEPS] == pytest.approx(whole["evaluations"][STEPS], rel=1e-9)
    runs = ("whole", "rest", "other", "cut")
    averaged = [averages(tmp_path / name / "checkpoints" / "step_00000004") for name in runs]
    assert {name.partition(".")[0] for name in averaged[0]} == {"image", "image_queries"}
    for name, value in averaged[0].items():
        assert torch.equal(averaged[1][name], value)
        torch.testing.assert_close(averaged[2][name], value, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(averaged[3][name], value, rtol=1e-9, atol=1e-12)
    config, _ = planned(tmp_path, {"num_devices": 4, **run("whole", STEPS)})
    export = motet.export_checkpoint(config, tmp_path / "whole" / "checkpoints" / "step_00000004")
    exported = load_file(export / "image" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(exported["proj_out.weight"], averaged[0]["image.module.proj_out.weight"])
    values = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    steps = [value for value in values if "loss_image" in value]
    assert [v["loss"] for v in steps] == pytest.approx([v["loss_language_model"] + v["loss_image"] for v in steps])


@pytest.mark.campaign
def test_codes_are_learned_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight samples are learned by heart; the training resumes to the bit, and what is exported is the average."""
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))

    def run(name: str, steps: int, **train: Any) -> dict[str, Any]:
        own = {"steps": steps, "output": str(tmp_path / name), "learning_rate": 1e-2, "lr_schedule": "constant"}
        return {
            "sounds": True,
            "codes": {"ema": 0.5, "values": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 160}},
            "ranks": {1: 0, 2: 0, 3: 1, 4: 1},
            "train": {"checkpoint_every": 20, **own, **train},
        }

    resumed = {"resume": str(tmp_path / "whole" / "checkpoints" / "step_00000020")}
    cases = [planned(tmp_path, {"num_devices": 5, **each}) for each in (run("whole", 40), run("rest", 40, **resumed))]

    def work(rank: int) -> list[dict[str, Any]]:
        return [train_worker(config, plan) for config, plan in cases]

    whole, rest = run_distributed(work, 2, timeout=400)[0]
    assert rest["losses"] == whole["losses"][20:]
    values = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    of_codes = [value["loss_voice"] for value in values if "loss_voice" in value]
    # 16 codes of each codebook and the end, of which a new decoder knows nothing: log 33.
    assert of_codes[0] == pytest.approx(np.log(33), abs=0.3)
    assert of_codes[-1] < 0.6 * of_codes[0]
    last = tmp_path / "whole" / "checkpoints" / "step_00000040"
    export = motet.export_checkpoint(cases[0][0], last)
    averaged, exported = averages(last), load_file(export / "voice" / "model.safetensors")
    assert torch.equal(exported["transformer.wte.weight"], averaged["voice.module.transformer.wte.weight"])
    assert (export / "voice_codec" / "model.safetensors").is_file()
