"""Training with encoders that run ahead: the same losses to the bit, and nothing of the next batch is ever saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training import ids_of_step, plan_of, run_config, spoil, stored_tensors, train

import motet
from motet.config import RunConfig
from motet.errors import UserError
from motet.runtime.engine import Engine

DROPOUT = {"model__language_model__values__attention_dropout": 0.2}
"""Frozen encoders have none."""
FROZEN = {"model__encoders__audio__train": {"module": False}, "model__encoders__vision__train": {"module": False}}
"""Projectors are trained: they are stages of their own where encoders run ahead."""


def run(folder: Path, *, ahead: bool, **overrides: Any) -> RunConfig:
    common = {"train__dtype": "float64", "train__steps": 6, **FROZEN, **DROPOUT}
    return run_config(folder, parallel__run_ahead=ahead, **{**common, **overrides})


def test_losses_are_those_without_run_ahead_to_the_bit(tmp_path: Path) -> None:
    """With dropout in the language model, samples without images and sounds, and evaluations between."""
    evaluated = {"train__eval_every": 2, "train__eval_samples": 6}
    without, ahead, seen = train(
        run(tmp_path / "without", ahead=False),
        run(tmp_path / "ahead", ahead=True),
        run(tmp_path / "seen", ahead=True, **evaluated),
    )
    assert ahead["losses"] == seen["losses"] == without["losses"]
    lines = [json.loads(line) for line in (tmp_path / "ahead/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7))


def test_a_resumed_run_is_that_without_interruption_to_the_bit(tmp_path: Path) -> None:
    """The first step after it runs its own forwards, as the checkpoint holds none."""
    saving = {"train__checkpoint_every": 2, "train__keep_checkpoints": 3}
    whole, without, rest = train(
        run(tmp_path / "whole", ahead=True, **saving),
        run(tmp_path / "without", ahead=False, **saving),
        run(tmp_path / "rest", ahead=True, train__resume=str(tmp_path / "whole/checkpoints/step_00000002")),
    )
    assert rest["losses"] == whole["losses"][2:]
    assert without["losses"] == whole["losses"]
    saved, expected = (stored_tensors(tmp_path / name / "checkpoints/step_00000004") for name in ("whole", "without"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def test_a_step_that_is_not_finite_leaves_the_next_one_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, ids_of_step(run(tmp_path, ahead=True), 2))
    skipping = {"train__on_nonfinite": "skip"}
    without, ahead = train(
        run(tmp_path / "without", ahead=False, **skipping), run(tmp_path / "ahead", ahead=True, **skipping)
    )
    assert ahead["skipped_steps"] == without["skipped_steps"] == [3]
    assert ahead["losses"][3:] == without["losses"][3:]


def test_every_step_but_the_last_tells_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, start = tmp_path / "told", Engine.start

    def telling(self: Engine, batch: Any, *, following: Any = None, **kwargs: Any) -> Any:
        with told.open("a") as file:
            ids = None if following is None else [sample.id for sample in following.batch.samples]
            file.write(json.dumps([[sample.id for sample in batch.samples], ids]) + "\n")
        return start(self, batch, following=following, **kwargs)

    monkeypatch.setattr(Engine, "start", telling)
    train(run(tmp_path / "run", ahead=True, train__steps=3))
    lines = set(told.read_text().splitlines())
    own = {json.dumps(json.loads(line)[0]) for line in lines}
    following = {json.dumps(json.loads(line)[1]) for line in lines}
    assert (len(lines), len(own & following), "null" in following) == (3, 2, True)


def test_projectors_become_stages_of_their_own(tmp_path: Path) -> None:
    plan = plan_of(run(tmp_path, ahead=True))
    assert plan.run_ahead
    assert [stage.layers for stage in plan.modules["vision"].replicas[0].stages] == [(0, 3), (3, 4)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"model__encoders__audio__train": {}, "model__encoders__vision__train": {}},
            "no encoder begins with a frozen",
        ),
        ({"train__failures": {"tolerate": 1}}, "is not supported with train.failures; leave one of them out"),
    ],
)
def test_what_is_not_shown_equal_is_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"^parallel\.run_ahead: ") as raised:
        plan_of(run(tmp_path, ahead=True, **overrides))
    assert message in str(raised.value)


def test_verify_compares_the_batch_that_was_run_ahead(tmp_path: Path) -> None:
    """And two steps of the optimizer, the second of which hands on what the first has kept."""
    config = run(tmp_path, ahead=True, cluster__num_devices=2)
    result = motet.verify(config, steps=3)
    assert result["passed"], result["failures"]
    assert result["max_grad_rel_err"] < 1e-9
    assert result["max_weight_rel_err"] < 1e-9
