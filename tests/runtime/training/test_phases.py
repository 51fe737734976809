"""Training in phases: each is planned by itself and starts from the weights of the one before it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from distributed import run_distributed
from generator_run import generator_config, generator_run
from safetensors.torch import load_file

import motet
from motet.cli.main import main
from motet.config import RunConfig, phases_of
from motet.data.run_file import open_samples
from motet.errors import UserError
from motet.plan import Plan
from motet.planner.from_run_file import plan_for, planning_problem
from motet.runtime.training.worker import train_worker

FREEZE = {"model.language_model.train.module": False, "model.encoders.vision.train": {"module": False}}
PHASES = [
    {"name": "speak", "steps": 2, "set": {"model.generators.image.train": {"module": False, "projector": False}}},
    {"name": "draw", "steps": 3, "set": {**FREEZE, "train.learning_rate": 0.01, "train.global_batch_size": 4}},
]


def in_phases(folder: Path, *more: dict[str, Any], **train: Any) -> RunConfig:
    own = {"output": str(folder / "output"), "lr_schedule": "constant", "phases": [*PHASES, *more], **train}
    return generator_config(folder, train=own)


def planned(config: RunConfig) -> tuple[RunConfig, Plan]:
    source = open_samples(config)
    samples = [source.sample(index) for index in range(config.train.global_batch_size)]
    return config, plan_for(config, planning_problem(config, samples))


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in (folder / "checkpoints" / f"step_{step:08d}").glob("*.safetensors"):
        found |= {name: value for name, value in load_file(path).items() if name.startswith("model/")}
    return found


def test_phases_are_runs_of_their_own(tmp_path: Path) -> None:
    speak, draw = phases_of(in_phases(tmp_path)).values()
    assert (speak.train.steps, draw.train.steps) == (2, 3)
    assert draw.train.start_from == f"{tmp_path}/output/speak/checkpoints/step_00000002"
    assert speak.train.start_from is None
    assert speak.model.causal_lm.train.module
    assert not draw.model.causal_lm.train.module
    assert (speak.train.global_batch_size, draw.train.global_batch_size) == (8, 4)
    assert {module for module, own in planned(draw)[1].modules.items() if own.trainable} == {
        "vision", "image_queries", "image",
    }  # fmt: skip


def test_a_phase_goes_on_from_the_weights_of_the_one_before(tmp_path: Path) -> None:
    config = in_phases(tmp_path)
    phases = phases_of(config)
    elsewhere = phases_of(
        RunConfig.model_validate_json(
            json.dumps(
                {
                    **config.model_dump(mode="json", exclude_unset=True),
                    "parallel": {
                        "planner": "explicit",
                        "num_microbatches": 2,
                        "explicit": {"vision": {"dp": 2}, "language_model": {}, "image": {}},
                    },
                }
            )
        )
    )["draw"].model_copy(update={"cluster": config.cluster.model_copy(update={"num_devices": 4})})
    elsewhere = elsewhere.model_copy(
        update={"train": elsewhere.train.model_copy(update={"output": str(tmp_path / "other")})}
    )
    runs = [planned(phases["speak"]), planned(phases["draw"])]

    def work(rank: int) -> list[dict[str, Any]]:
        return [train_worker(*run) for run in runs]

    speak, draw = run_distributed(work, 3, timeout=120)[0]
    (other,) = run_distributed(lambda rank: [train_worker(*planned(elsewhere))], 4, timeout=120)[0]
    assert (len(speak["losses"]), len(draw["losses"])) == (2, 3)
    assert other["losses"] == pytest.approx(draw["losses"], rel=1e-9)
    before, after = weights(tmp_path / "output" / "speak", 2), weights(tmp_path / "output" / "draw", 3)
    assert before.keys() == after.keys()
    moved = {name.split("/")[1].split(".module")[0].split(".projector")[0] for name in before
             if not torch.equal(before[name], after[name])}  # fmt: skip
    assert moved == {"vision", "image", "image_queries"}  # Of vision, the projector.
    assert not any(name.startswith("model/vision.module") and not torch.equal(before[name], after[name])
                   for name in before)  # fmt: skip


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"only_phase": "sing"}, r"train\.only_phase: there is no phase 'sing'; train\.phases has speak, draw"),
        ({"resume": "somewhere"}, r"train\.resume: is somewhere, but a training in phases resumes from latest"),
        ({"start_from": "somewhere"}, r"train\.start_from: is not supported with train\.phases"),
        ({"phases": [PHASES[0], PHASES[0]]}, r"train\.phases: two are called speak"),
        ({"phases": [{"name": "a", "steps": 1, "set": {"train.steps": 3}}]}, r"phases\[0\]\.set\.train\.steps: is the"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, train: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        in_phases(tmp_path, **train)


def test_a_wrong_value_names_its_phase(tmp_path: Path) -> None:
    config = in_phases(tmp_path, {"name": "c", "steps": 1, "set": {"model.language_modle.train": {}}})
    with pytest.raises(UserError, match=r"train\.phases\[2\] \(c\): .*language_modle"):
        phases_of(config)
    with pytest.raises(UserError, match=r"train\.phases: are speak, draw; this command needs one of them"):
        motet.simulate(in_phases(tmp_path))


def test_that_a_later_phase_trains_what_should_run_ahead_is_said_before_the_first(tmp_path: Path) -> None:
    ahead = {"parallel.run_ahead": True}
    phases = [
        {**PHASES[1], "set": {**PHASES[1]["set"], **ahead}},
        {"name": "all", "steps": 2, "set": ahead},
    ]
    with pytest.raises(
        UserError, match=r"^parallel\.run_ahead: no encoder begins with a frozen layer; freeze .*vision"
    ):
        motet.train(in_phases(tmp_path, phases=phases))
    assert not (tmp_path / "output").exists()


def test_a_phase_that_runs_ahead_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, plans = motet.train, []
    monkeypatch.setattr(motet.api, "train", lambda phase, plan: plans.append(plan) or {})
    draw = {**PHASES[1], "set": {**PHASES[1]["set"], "parallel.run_ahead": True}}
    train(in_phases(tmp_path, phases=[PHASES[0], draw]))
    assert plans[0] is None  # What trains it makes its plan.
    assert plans[1].run_ahead


@pytest.mark.campaign
def test_one_command_trains_all_and_goes_on(tmp_path: Path) -> None:
    run = generator_run(tmp_path, train={"output": str(tmp_path / "output"), "phases": PHASES})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    first = motet.train(tmp_path / "run.yaml")
    assert {name: own["steps"] for name, own in first["phases"].items()} == {"speak": 2, "draw": 3}
    assert Path(first["export"]) == tmp_path / "output" / "draw" / "export"
    with pytest.raises(UserError, match=r"train\.resume: every phase is finished"):
        motet.train(tmp_path / "run.yaml", ["train.resume=latest"])
    more = [PHASES[0], {**PHASES[1], "steps": 4}]
    then = motet.train(tmp_path / "run.yaml", ["train.resume=latest", f"train.phases={json.dumps(more)}"])
    assert {name: len(own["losses"]) for name, own in then["phases"].items()} == {"draw": 1}


def test_each_phase_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = generator_run(tmp_path, train={"output": str(tmp_path / "output"), "phases": PHASES})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["plan", str(tmp_path / "run.yaml"), "--json"]) == 0
    phases = json.loads(capsys.readouterr().out)["phases"]
    assert list(phases) == ["speak", "draw"]
    backwards = {name: {s["module"]: s["backward_s"] for s in own["stages"]} for name, own in phases.items()}
    # The generator's weights have gradients in the second phase only, and half as many images.
    assert backwards["draw"]["image"] > 0.5 * backwards["speak"]["image"]
    assert main(["plan", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "plan.json")]) == 2
    assert "--out: a file holds one plan; add --set train.only_phase=NAME" in capsys.readouterr().err
