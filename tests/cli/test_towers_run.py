"""Run files with towers through every command."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import yaml
from mistakes import expect_mistake
from PIL import Image
from quick_profile import profile_quickly
from torch.nn.utils.rnn import pad_sequence
from tower_run import RUN, SMALL, give_decoder, give_stored_clip, run, write_tower_run
from transformers import CLIPModel, CLIPVisionConfig, CLIPVisionModel, CLIPVisionModelWithProjection

from motet.cli.main import main
from motet.config import load_run_config
from motet.data.chat import word_level_tokenizer
from motet.data.loader import Loader
from motet.data.run_file import open_data
from motet.data.service.tickets import InProcess
from motet.models.hub.export import load_towers
from motet.models.stages.contrastive import ContrastiveLoss


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_tower_run(tmp_path)


def test_plan_simulate_verify_train(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    plan = run_file.with_name("plan.json")
    planned = run(capsys, "plan", run_file, "--out", plan)
    assert [stage["module"] for stage in planned["stages"]] == ["image", "audio", "text", "contrastive"]
    simulated = run(capsys, "simulate", run_file, "--plan", plan)
    assert simulated["iteration_time_s"] == planned["iteration_time_s"] > 0
    verified = run(capsys, "verify", run_file, "--plan", plan)
    assert verified["passed"]
    assert verified["max_grad_rel_err"] <= 1e-5
    assert verified["num_parameters_compared"] > 50
    trained = run(capsys, "train", run_file, "--plan", plan, "--set", "train.eval_every=2")
    assert len(trained["losses"]) == 2
    assert trained["evaluations"]
    assert load_towers(trained["export"]).width == 8


@pytest.mark.campaign
def test_in_bfloat16(capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured costs, verification, and a training that goes on from its checkpoint."""
    profile_quickly(monkeypatch)
    half = ["--set", "train.dtype=bfloat16", "--set", "train.lr_schedule=constant"]
    costs = run_file.with_name("costs.json")
    run(capsys, "profile", run_file, *half, "--out", costs)
    assert run(capsys, "plan", run_file, *half, "--set", f"cluster.costs={costs}")["costs"]["source"] != "analytic"
    assert run(capsys, "verify", run_file, *half)["passed"]
    whole = run(capsys, "train", run_file, *half, "--set", "train.steps=4")["losses"]
    run(capsys, "train", run_file, *half, "--set", f"train.output={run_file.with_name('again')}")
    more = ["--set", f"train.output={run_file.with_name('again')}", "--set", "train.resume=latest"]
    assert run(capsys, "train", run_file, *half, *more, "--set", "train.steps=4")["losses"] == whole[2:]


def test_held_out_losses_are_those_of_whole_contrastive_batches(
    capfd: pytest.CaptureFixture[str], run_file: Path
) -> None:
    """11 held-out samples are one global batch of 8 and a rest; of 5 there is no whole one, which is told."""
    losses, told = {}, {}
    for num_samples in (8, 11, 5):
        options = ["--set", "train.steps=1", "--set", "train.eval_every=1", "--set", "train.checkpoint_every=0"]
        options += ["--set", f"train.eval_samples={num_samples}"]
        assert main(["train", str(run_file), "--json", *options]) == 0
        printed = capfd.readouterr()
        (losses[num_samples],) = json.loads(printed.out)["evaluations"].values()
        told[num_samples] = "the held-out loss is that of 5 samples" in printed.err
    assert losses[8] == losses[11] != losses[5]
    assert told == {8: False, 11: False, 5: True}


def test_explicit_towers_have_the_schedule_made_for_them(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    content = yaml.safe_load(run_file.read_text())
    del content["parallel"]["schedule"]
    run_file.write_text(yaml.safe_dump(content, sort_keys=False))
    assert run(capsys, "plan", run_file)["schedule"] == "distmm_pipe"
    assert run(capsys, "plan", run_file, "--set", "parallel.schedule=1f1b")["schedule"] == "1f1b"


def test_the_scale_may_begin_at_its_limit(run_file: Path) -> None:
    overrides = ["model.contrastive.loss=sigmoid", f"model.contrastive.max_logit_scale={math.log(10)}"]
    contrastive = load_run_config(run_file, overrides).model.contrastive
    assert contrastive.max_logit_scale == pytest.approx(ContrastiveLoss("sigmoid").logit_scale.item())


@pytest.mark.campaign
def test_towers_out_of_a_stored_model(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """Both towers of one CLIPModel: the loss is that of transformers' own model, and what is exported is it again."""
    model, _ = give_stored_clip(run_file)
    content = yaml.safe_load(run_file.read_text())
    content["parallel"]["explicit"]["text"] = {"pp": 2}
    content["train"] = {**content["train"], "contrastive_batch_size": 8, "learning_rate": 1e-12}
    run_file.write_text(yaml.safe_dump(content, sort_keys=False))
    verified = run(capsys, "verify", run_file)
    assert verified["passed"]
    assert run(capsys, "verify", run_file, "--set", "train.dtype=float64")["max_grad_rel_err"] < 1e-9
    config = load_run_config(run_file)
    data = open_data(config)
    drawn = next(Loader(InProcess(data.train), 8, seed=config.train.seed, batches_ahead=0))
    ids = [drawn.features("text", i)["input_ids"][0] for i in range(8)]
    inputs = {
        "pixel_values": torch.cat([drawn.features("image", i)["pixel_values"] for i in range(8)]),
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=5),
    }
    assert verified["loss_distributed"] == pytest.approx(model(**inputs, return_loss=True).loss.item(), rel=1e-6)
    trained = run(capsys, "train", run_file)
    again = CLIPModel.from_pretrained(f"{trained['export']}/whole").state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-10)


def test_a_projection_stored_beside_one_tower(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """Refused before the run, as a CLIPModel's. A tower without one is planned, though it has a projection_dim."""
    vision = CLIPVisionConfig(**SMALL, image_size=48, patch_size=16, projection_dim=6)
    for model in (CLIPVisionModelWithProjection(vision), CLIPVisionModel(vision)):
        folder = run_file.with_name(type(model).__name__)
        model.save_pretrained(folder)
        capsys.readouterr()
        arguments = ["plan", run_file, "--set", f"model.towers.image={{path: {folder}}}"]
        if isinstance(model, CLIPVisionModelWithProjection):
            message = "image.projector: the stored projection is 6 wide, but the features are 8 wide; set"
            expect_mistake(capsys, arguments, message)
            arguments[-1] = f"model.towers.image={{path: {folder}, projector: linear}}"
        run(capsys, *arguments)


def test_texts_that_are_wider_than_their_features(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """SigLIP's `projection_size`: with a projector behind it, and as the width of the features."""
    values = {**SMALL, "vocab_size": 32, "max_position_embeddings": 12, "projection_size": 24}
    text = f"model.towers.text={{config: SiglipTextConfig, values: {json.dumps(values)}, projector: linear}}"
    with_text = ("--set", text, "--set", "model.contrastive.width=9")
    assert run(capsys, "verify", run_file, *with_text)["passed"]
    bare = (*with_text, "--set", "model.towers.text.projector=null")
    message = "model.towers.text.projector: is null, but the tower's width is 24 and that of the features 9; give it a"
    expect_mistake(capsys, ["plan", run_file, *bare], message)
    give_decoder(run_file, "GPT2Config")
    decoder = ("--set", "model.decoder.reads=text")
    expect_mistake(
        capsys,
        ["plan", run_file, *with_text, *decoder],
        "model.towers.text: outputs 16 features for each token, but a pooled output of 24",
    )


def test_pairs_in_files(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """A locked tower of images and one of sounds, with the sigmoid loss."""
    records, folder = [], run_file.parent
    for i in range(8):
        Image.fromarray(np.full((20, 30, 3), 20 * i, np.uint8)).save(folder / f"{i}.png")
        soundfile.write(folder / f"{i}.wav", np.sin(np.arange(1600) * (i + 1) / 9), 16_000)
        records.append({"image": f"{i}.png", "audio": f"{i}.wav"})
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    processors = {
        "image": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 48, "width": 48}},
        "audio": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 16,
            "chunk_length": 1,
            "hop_length": 160,
            "sampling_rate": 16_000,
        },
    }
    for name, values in processors.items():
        (folder / name).mkdir()
        (folder / name / "preprocessor_config.json").write_text(json.dumps(values))
    towers = {name: RUN["model"]["towers"][name] for name in ("image", "audio")}
    towers["image"] = {**towers["image"], "projector": None, "train": {"module": False}}
    content = {
        "model": {"towers": towers, "contrastive": {"loss": "sigmoid"}},
        "data": {
            "kind": "pairs",
            "files": str(folder / "pairs.jsonl"),
            "image_folder": str(folder),
            "audio_folder": str(folder),
            "processors": {name: str(folder / name) for name in processors},
        },
        "cluster": {"num_devices": 3},
        "parallel": {"planner": "explicit", "explicit": {"image": {}, "audio": {"dp": 2}}, "num_microbatches": 1},
        "train": {"global_batch_size": 7},
    }
    run_file.write_text(yaml.safe_dump(content, sort_keys=False))
    assert run(capsys, "verify", run_file)["passed"]
    (folder / "pairs.jsonl").write_text(json.dumps({"image": "0.png"}))
    expect_mistake(capsys, ["verify", run_file], "pairs.jsonl:1: has image to be compared; give image and audio")


def test_files_in_which_items_are_lacking(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """Two towers of images and one of texts: a sample has two of the three."""
    records, folder = [], run_file.parent
    for i in range(9):
        Image.fromarray(np.full((20, 30, 3), 20 * i, np.uint8)).save(folder / f"{i}.png")
        records.append({"image": f"{i}.png", "text": f"{i}" if i % 3 else None})
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    processor = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 48, "width": 48}}
    (folder / "image").mkdir()
    (folder / "image" / "preprocessor_config.json").write_text(json.dumps(processor))
    word_level_tokenizer(["one"]).save_pretrained(folder / "words")
    image, text = (RUN["model"]["towers"][name] for name in ("image", "text"))
    content = {
        "model": {"towers": {"image": image, "again": {**image, "seed": 1}, "text": text}, "contrastive": {"width": 8}},
        "data": {
            "kind": "pairs",
            "files": str(folder / "pairs.jsonl"),
            "image_folder": str(folder),
            "processors": {name: str(folder / "image") for name in ("image", "again")},
            "tokenizer": str(folder / "words"),
        },
        "cluster": {"num_devices": 4},
        "parallel": {
            "planner": "explicit",
            "explicit": {"image": {}, "again": {}, "text": {"dp": 2}},
            "num_microbatches": 2,
        },
        "train": {"global_batch_size": 9},
    }
    run_file.write_text(yaml.safe_dump(content, sort_keys=False))
    assert run(capsys, "verify", run_file)["passed"]
    expect_mistake(
        capsys,
        ["plan", run_file, "--set", "model.contrastive.anchor=text"],
        "pairs.jsonl:1: has image to be compared; give text and image",
    )
    (folder / "pairs.jsonl").write_text("\n".join([json.dumps({"image": "0.png"})] * 9))
    expect_mistake(capsys, ["profile", run_file], "profile: no sample of the first global batch has an item for text")


@pytest.mark.campaign
def test_profile_and_plans_of_others(
    capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured costs, and sizes instead of data."""
    profile_quickly(monkeypatch)
    costs = run_file.with_name("costs.json")
    run(capsys, "profile", run_file, "--out", costs)
    measured = run(capsys, "plan", run_file, "--set", f"cluster.costs={costs}")
    assert measured["costs"]["source"] != "analytic"
    images, sounds = "images: {image: {height: 48, width: 48}}", "sounds: {audio: {seconds: 0.5}}"
    data = f"data={{kind: described, text_tokens: 8, {images}, {sounds}}}"
    described = run(capsys, "plan", run_file, "--set", data, "--set", "parallel={}")
    assert described["planner"] == "distmm"
    expect_mistake(
        capsys,
        ["plan", run_file, "--set", "data={kind: described, images: {image: {height: 48, width: 48}}}"],
        "data: has no entry for tower 'audio'; give it under images or sounds",
    )
