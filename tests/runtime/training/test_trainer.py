"""The training loop: evaluation beside it, metrics of it, steps that are not finite, steps that do not end."""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from distributed import run_distributed
from training import Layout, ids_of_step, plan_of, run_config, spoil, stored_tensors, train

from motet.assignment.sample import Sample
from motet.cli.main import main
from motet.config import RunConfig
from motet.data.loader import LoadedBatch
from motet.data.service.tickets import Corrupt, Split
from motet.data.service.workers import Preparer
from motet.errors import UserError
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import StageInput, StageOutput
from motet.runtime.engine import Engine, StartedIteration
from motet.runtime.training.trainer import TrainingSummary
from motet.runtime.training.worker import train_worker
from motet.timeline import Timeline

TP2: Layout = {"language_model": {"tp": 2}}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    common = {"model__language_model__values__attention_dropout": 0.3, "train__eval_samples": 6}
    without, with_it = train(
        run_config(tmp_path / "without", **common), run_config(tmp_path / "with", train__eval_every=1, **common)
    )
    assert with_it["losses"] == without["losses"]
    assert set(with_it["evaluations"]) == {1, 2, 3, 4}
    assert without["evaluations"] == {}


def test_evaluation_is_without_dropout(tmp_path: Path) -> None:
    """With weights that stay as they are, dropout shows in the losses of the steps only."""
    common = {"train__eval_every": 2, "train__eval_samples": 6, "train__learning_rate": 1e-30}
    without, with_it = train(
        run_config(tmp_path / "without", **common),
        run_config(tmp_path / "with", model__language_model__values__attention_dropout=0.3, **common),
    )
    assert with_it["losses"] != without["losses"]
    assert with_it["evaluations"] == without["evaluations"]


def test_every_step_draws_its_own_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, start = tmp_path / "seeds", Engine.start

    def telling(self: Engine, *args: Any, seed: tuple[int, ...] | None = None, **kwargs: Any) -> StartedIteration:
        if dist.get_rank() == 0:
            with told.open("a") as file:
                file.write(f"{seed}\n")
        return start(self, *args, seed=seed, **kwargs)

    monkeypatch.setattr(Engine, "start", telling)
    train(run_config(tmp_path / "run"))
    seeds = told.read_text().splitlines()
    assert len(seeds) == len(set(seeds)) == 4


def test_metrics_are_complete_and_not_doubled_when_resumed(tmp_path: Path) -> None:
    common = {"train__eval_every": 2, "train__eval_samples": 6, "train__checkpoint_every": 2}
    path = tmp_path / "metrics.jsonl"
    (whole,) = train(run_config(tmp_path, **common))
    before = read_lines(path)
    with path.open("a") as file:
        file.write('{"step": 3, "loss"')  # A crash cut the last line short.
    (resumed,) = train(run_config(tmp_path, train__resume=str(tmp_path / "checkpoints/step_00000002"), **common))
    lines = read_lines(path)
    for values in (before, lines):
        assert [line["step"] for line in values] == [1, 2, 2, 3, 4, 4]
        assert [line["loss"] for line in values if "loss" in line] == whole["losses"]
        assert {line["step"]: line["held_out_loss"] for line in values if "held_out_loss" in line} == (
            whole["evaluations"]
        )
    assert lines[:3] == before[:3]
    assert resumed["evaluations"] == {4: whole["evaluations"][4]}
    steps = [line for line in lines if "loss" in line]
    names = {"loss", "gradient_norm", "learning_rate", "samples_per_s", "tokens_per_s", "peak_memory_bytes"}
    assert all(line.keys() == {"step", "step_s", "data_s", *names} for line in steps)
    assert all(line["step_s"] >= line["data_s"] >= 0 and line["gradient_norm"] > 0 for line in steps)
    assert all(len(line["peak_memory_bytes"]) == 2 and min(line["peak_memory_bytes"]) > 2**20 for line in steps)


def test_stages_are_told_of_every_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"

    def after_update(stage: LanguageModelStage) -> None:
        with told.open("a") as file:
            file.write("language model\n")

    monkeypatch.setattr(LanguageModelStage, "after_update", after_update)
    train(run_config(tmp_path / "run", train__eval_every=2, train__eval_samples=6))
    assert len(told.read_text().splitlines()) == 4


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    """With a learning rate that ruins the model, the first one."""
    common = {"train__eval_every": 1, "train__eval_samples": 6, "train__checkpoint_every": 4}
    config = run_config(tmp_path, train__learning_rate=1.0, train__keep_checkpoints=1, **common)
    (result,) = train(config)
    best_step = min(result["evaluations"], key=lambda step: result["evaluations"][step])
    assert best_step < 4
    assert (tmp_path / "checkpoints/best").resolve().name == f"step_{best_step:08d}"
    assert (tmp_path / "checkpoints/latest").resolve().name == "step_00000004"
    stored = json.loads((tmp_path / "checkpoints/latest/checkpoint.json").read_text())
    assert stored["state"]["metrics"]["best_loss"] == result["evaluations"][best_step]


def test_a_step_that_is_not_finite_is_skipped_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, TP2, train__on_nonfinite="skip", train__checkpoint_every=1, train__keep_checkpoints=9)
    ids = ids_of_step(config, 1)
    spoil(monkeypatch, ids)
    (result,) = train(config)
    assert result["skipped_steps"] == [2]
    assert [loss is None for loss in result["losses"]] == [False, True, False, False]
    first = tmp_path / "checkpoints/step_00000001"
    before, after, later = (stored_tensors(tmp_path / f"checkpoints/step_{step:08d}") for step in (1, 2, 3))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not all(torch.equal(tensor, later[name]) for name, tensor in after.items())
    states = [json.loads((tmp_path / f"checkpoints/step_{s:08d}/checkpoint.json").read_text())["state"] for s in (1, 2)]
    assert [state["data"]["step"] for state in states] == [1, 2], "the data's position moves on"
    (line,) = read_lines(tmp_path / "non_finite.jsonl")
    assert line["step"] == 2
    assert line["samples"] == ids
    train(config.model_copy(update={"train": config.train.model_copy(update={"resume": f"{first}"})}))
    assert read_lines(tmp_path / "non_finite.jsonl") == [line], "not doubled when the step is taken again"
    assert read_lines(tmp_path / "metrics.jsonl")[1]["loss"] is None


def test_ranks_that_cannot_read_the_same_samples_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that one machine can read and another cannot: all would go on with batches of their own."""

    def sample(self: Preparer, split: Split, index: int) -> Sample | Corrupt:
        return Corrupt(index, "a.png: is gone") if index == 3 and dist.get_rank() == 1 else original(self, split, index)

    original = Preparer._sample
    monkeypatch.setattr(Preparer, "_sample", sample)
    with pytest.raises(Exception, match="the ranks do not agree on which samples can be prepared; do all of them"):
        train(run_config(tmp_path, data__on_corrupt="skip"))


def test_a_batch_is_cut_once_however_far_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by the thread that trains, which would wait for it."""

    def start(self: Engine, batch: LoadedBatch, **options: Any) -> StartedIteration:
        assert any(samples is batch.samples for samples, _ in self._assigned)
        return original(self, batch, **options)

    original = Engine.start
    monkeypatch.setattr(Engine, "start", start)
    train(run_config(tmp_path, data__batches_ahead=9, train__steps=4))


def test_a_step_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, train__on_nonfinite="stop")
    ids = ids_of_step(config, 1)
    spoil(monkeypatch, ids)
    with pytest.raises(AssertionError, match=r"NonFiniteError: step 2: loss (nan|inf).*sample ids are in .*non_finite"):
        train(config)
    assert read_lines(tmp_path / "non_finite.jsonl")[0]["samples"] == ids


def test_bfloat16_and_float64_runs_learn(tmp_path: Path) -> None:
    configs = [run_config(tmp_path / dtype, train__steps=12, train__dtype=dtype) for dtype in ("bfloat16", "float64")]
    for result in train(*configs):
        assert sum(result["losses"][-3:]) / 3 < result["losses"][0] - 0.2


def test_the_measured_timeline_is_one(tmp_path: Path) -> None:
    (result,) = train(run_config(tmp_path, {"language_model": {"pp": 2}}))
    timeline = Timeline.from_json(result["measured"]["timeline"])
    for rank in range(3):
        spans = timeline.of_rank(rank)
        assert spans
        for earlier, later in pairwise(spans):
            assert earlier.end <= later.start, f"{earlier} and {later} overlap"
        assert all(span.start <= span.end for span in spans)
        assert spans[-1].kind == "optimizer"
        # One iteration's, not several's.
        assert sum(span.kind == "optimizer" for span in spans) == 1
    names = {span.name for span in timeline.spans}
    assert {f"language_model[0].{stage}{kind}{i}" for stage in (0, 1) for kind in "FB" for i in (0, 1)} <= names
    assert any(span.kind == "wait" for span in timeline.spans)
    assert 0 < timeline.bubble_fraction < 1


def test_no_room_for_the_checkpoints_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the first step, by the size of all that will stand there at once."""
    (result,) = train(run_config(tmp_path / "measured", train__checkpoint_every=4))
    stored = stored_tensors(Path(result["checkpoint"]))
    one = sum(tensor.nbytes for tensor in stored.values() if tensor.dim())
    config = run_config(tmp_path / "full", train__checkpoint_every=4, train__keep_checkpoints=3)
    plan = plan_of(config)

    def refusal(free: int) -> str | None:
        usage = type("usage", (), {"free": free})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda folder: usage)
            try:
                run_distributed(lambda rank: train_worker(config, plan), plan.num_ranks)
            except AssertionError as error:
                return str(error).strip().splitlines()[-1]
        return None

    message = refusal(4 * one - 1)
    assert message is not None
    assert f"train.output: no space for a checkpoint in {tmp_path}/full" in message
    assert not (tmp_path / "full/metrics.jsonl").exists()
    assert refusal(4 * one) is None


# Through the command line, with real processes.


def write_run_file(config: RunConfig, folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    return path


def test_a_step_that_hangs_says_who_waits_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forward = LanguageModelStage.forward

    def hanging(stage: LanguageModelStage, inputs: StageInput) -> StageOutput:
        calls.append(stage)
        if len(calls) == 6:
            time.sleep(300)
        return forward(stage, inputs)

    calls: list[LanguageModelStage] = []
    monkeypatch.setattr(LanguageModelStage, "forward", hanging)
    config = run_config(tmp_path, {"language_model": {"pp": 1}}, cluster={"num_devices": 2}, train__step_timeout_s=5.0)
    started = time.monotonic()
    assert main(["train", str(write_run_file(config, tmp_path))]) == 1
    assert time.monotonic() - started < 150
    said = capfd.readouterr().err
    # The rank that hangs is the cause, and it is told where.
    assert "failed: rank 1: StepOverrunError: rank 1 is at language_model[0].0F1 after 5 s (train.step" in said
    assert "in hanging" in said
    # The other one waits for the gradient of its outputs.
    waiting = [line for line in said.splitlines() if line.startswith("motet: rank 0 is at ")]
    assert len(waiting) == 1
    assert " and waits for message " in waiting[0]
    assert "<-language_model[0].0:" in waiting[0]
    assert "1>0 with rank 1" in waiting[0]


def test_one_ranks_trouble_with_its_data_is_all_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only the encoders' rank reads the image; the other one waits for it."""
    config = run_config(tmp_path, cluster={"num_devices": 2})
    (bad,) = ids_of_step(config, 2)[:1]
    original = LoadedBatch.features

    def features(batch: LoadedBatch, module: str, sample: int) -> dict[str, torch.Tensor]:
        if module == "vision" and batch.samples[sample].id == bad:
            raise UserError(f"data.files: the image of {bad} is damaged; take it out")
        return original(batch, module, sample)

    monkeypatch.setattr(LoadedBatch, "features", features)
    assert main(["train", str(write_run_file(config, tmp_path))]) == 2
    said = capfd.readouterr().err.splitlines()
    assert said[-1] == f"motet: error: data.files: the image of {bad} is damaged; take it out"
    assert not [line for line in said[:-1] if not line.startswith("step ")]


def test_a_run_that_goes_back_to_a_checkpoint_keeps_the_record_of_the_steps_before() -> None:
    before = TrainingSummary(steps=5, losses=[3.0, 4.0, 5.0], evaluations={2: 9.0, 4: 8.0}, skipped_steps=[3, 5])
    after = TrainingSummary(steps=4)
    after.keep_record(before)
    assert (after.losses, after.evaluations, after.skipped_steps) == ([3.0, 4.0], {2: 9.0, 4: 8.0}, [3])
    older = TrainingSummary(steps=1)
    older.keep_record(before)
    assert (older.losses, older.evaluations, older.skipped_steps) == ([], {}, [])
