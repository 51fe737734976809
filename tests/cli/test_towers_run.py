"""Run files with towers through every command, and what is wrong in them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import yaml
from mistakes import expect_mistake
from PIL import Image
from quick_profile import profile_quickly
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    GPT2Config,
    GPT2LMHeadModel,
)

from motet.cli.main import main
from motet.config import load_run_config
from motet.data.loader import Loader
from motet.data.preprocessing.producer import InProcess
from motet.data.run_file import open_data
from motet.data.tokenizer import word_level_tokenizer
from motet.models.contrastive import ContrastiveLoss
from motet.models.towers_io import load_towers

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
RUN: dict[str, Any] = {
    "model": {
        "towers": {
            "image": {"config": "SiglipVisionConfig", "values": {**SMALL, "image_size": 48, "patch_size": 16}},
            "audio": {
                "config": "WhisperConfig",
                "values": {
                    "d_model": 16,
                    "encoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 32,
                    "num_mel_bins": 16,
                    "max_source_positions": 50,
                },
                "projector": "mlp",
            },
            "text": {
                "config": "CLIPTextConfig",
                "values": {**SMALL, "vocab_size": 32, "max_position_embeddings": 12, "eos_token_id": 5},
                "projector": "linear",
            },
        },
        "contrastive": {"width": 8},
    },
    "data": {"kind": "same-digits", "num_train": 40, "num_held_out": 16, "workers": 0},
    "cluster": {"num_devices": 3},
    "parallel": {
        "planner": "explicit",
        "explicit": {"image": {}, "audio": {"num_microbatches": 1}, "text": {}},
        "num_microbatches": 2,
        "schedule": "distmm_pipe",
    },
    "train": {"steps": 2, "global_batch_size": 8, "contrastive_batch_size": 4, "checkpoint_every": 2},
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump({**RUN, "train": {**RUN["train"], "output": str(tmp_path / "run")}}, sort_keys=False)
    )
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


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


@pytest.mark.slow
def test_towers_out_of_a_stored_model(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """Both towers of one CLIPModel: the loss is that of transformers' own model, and what is exported is it again."""
    torch.manual_seed(0)
    folder, content = run_file.with_name("clip"), yaml.safe_load(run_file.read_text())
    text = {**SMALL, "vocab_size": 32, "max_position_embeddings": 12, "bos_token_id": 2, "eos_token_id": 5}
    vision = {**SMALL, "image_size": 48, "patch_size": 16}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    model.logit_scale.data.fill_(3.5)
    model.save_pretrained(folder)
    content["model"]["towers"] = {name: {"path": str(folder), "part": name} for name in ("image", "text")}
    content["parallel"]["explicit"] = {"image": {}, "text": {"pp": 2}}
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

    capsys.readouterr()  # transformers tells how far it has loaded.
    tower = "model.towers.text"
    for override, message in (
        (f"{tower}.part=null", f"{tower}.part: is missing, but what is stored is a clip of two towers; give image or"),
        (f"{tower}.part=words", f'{tower}.part: is "words"; give one of image, text'),
        (f"{tower}={{config: BertConfig, part: text}}", f"{tower}.part: is text, but config names one encoder; leave"),
        (f"{tower}={{path: {folder}, values: {{model_type: bert}}}}", "values.model_type: is what config, hub or path"),
        (
            "model.contrastive.width=9",
            "image.projector: the stored projection makes features of 8, but they are 9 wide",
        ),
    ):
        expect_mistake(capsys, ["plan", run_file, "--set", override], message)
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole["text_config"], "model_type": "clip_text_model"}))
    expect_mistake(
        capsys, ["plan", run_file], "image.part: is image, but what is stored is one clip_text_model without"
    )


def test_a_projection_stored_beside_one_tower(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """Refused before the run, as a CLIPModel's. A tower without one is planned, though it has a projection_dim."""
    vision = CLIPVisionConfig(**SMALL, image_size=48, patch_size=16, projection_dim=6)
    for model in (CLIPVisionModelWithProjection(vision), CLIPVisionModel(vision)):
        folder = run_file.with_name(type(model).__name__)
        model.save_pretrained(folder)
        capsys.readouterr()
        arguments = ["plan", run_file, "--set", f"model.towers.image={{path: {folder}}}"]
        if isinstance(model, CLIPVisionModelWithProjection):
            message = "image.projector: the stored projection makes features of 6, but they are 8 wide; set"
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
    with_decoder(run_file, "GPT2Config")
    decoder = ("--set", "model.decoder.reads=text")
    expect_mistake(
        capsys, ["plan", run_file, *with_text, *decoder], "model.towers.text: makes features of 16, but one of 24 of a"
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
    expect_mistake(capsys, ["profile", run_file], "profile: no sample of the first global batch has anything for text")


def with_decoder(run_file: Path, family: str) -> None:
    """Two towers, of images and of texts, and a decoder."""
    content = yaml.safe_load(run_file.read_text())
    del content["model"]["towers"]["audio"]
    size = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 12}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "GPT2Config" else {}
    values = {**size, "num_hidden_layers": 2, **still}
    content["model"]["decoder"] = {"config": family, "values": values, "reads": "image"}
    content["parallel"]["explicit"] = {"image": {}, "text": {}, "decoder": {"pp": 2}}
    content["cluster"]["num_devices"] = 4
    run_file.write_text(yaml.safe_dump(content, sort_keys=False))


def test_a_decoder_that_captions(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    with_decoder(run_file, "GPT2Config")
    planned = run(capsys, "plan", run_file)
    assert [stage["module"] for stage in planned["stages"]] == ["image", "text", "contrastive", "decoder", "decoder"]
    assert run(capsys, "verify", run_file)["passed"]
    trained = run(capsys, "train", run_file, "--set", "train.eval_every=2", "--set", "train.lr_schedule=constant")
    exported = load_towers(trained["export"])
    assert (exported.reads, exported.caption_weight, type(exported.decoder).__name__) == (
        "image",
        2.0,
        "GPT2LMHeadModel",
    )
    longer = ("--set", "train.steps=4", "--set", "train.lr_schedule=constant")
    layout = "parallel.explicit={image: {dp: 2}, text: {pp: 2}, decoder: {}}"
    other = ("--set", layout, "--set", "cluster.num_devices=5", "--set", "parallel.zero1=true")
    resumed = run(capsys, "train", run_file, *longer, "--set", "train.resume=latest", *other)
    straight = run(capsys, "train", run_file, *longer, "--set", f"train.output={run_file.parent / 'straight'}")
    assert resumed["losses"] == pytest.approx(straight["losses"][2:], rel=1e-5)
    data = "data={kind: described, text_tokens: 8, images: {image: {height: 48, width: 48}}}"
    assert run(capsys, "plan", run_file, "--set", data)["fits"]


@pytest.mark.parametrize(("planner", "family"), [("distmm", "GPT2Config"), ("auto", "BertConfig")])
def test_planners_place_a_decoder(
    capsys: pytest.CaptureFixture[str], run_file: Path, planner: str, family: str
) -> None:
    with_decoder(run_file, family)
    parallel = ("--set", f"parallel={{planner: {planner}}}")
    planned = run(capsys, "plan", run_file, *parallel)
    ranks = {
        name: {r for s in planned["stages"] if s["module"] == name for r in s["ranks"]} for name in ("decoder", "image")
    }
    assert ranks["decoder"]
    assert ranks["decoder"].isdisjoint(ranks["image"])
    assert run(capsys, "verify", run_file, *parallel)["passed"]
    message = "parallel.planner: no layout of image and text and decoder fits into 1 devices"
    expect_mistake(capsys, ["plan", run_file, *parallel, "--set", "cluster.num_devices=1"], message)


def test_devices_that_the_plan_leaves_over_stay_idle(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """What is best for models as small as these may be a plan of fewer ranks than there are devices."""
    with_decoder(run_file, "GPT2Config")
    parallel = ("--set", "parallel={planner: distmm}", "--set", "cluster.num_devices=8")
    used = run(capsys, "plan", run_file, *parallel)["num_devices"]
    assert used < 8
    assert main(["train", str(run_file), *parallel, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["world_size"] == used
    assert f"the plan runs on {used} of 8 devices" in printed.err


def test_a_pretrained_decoder_gets_cross_attention(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """A GPT-2 that was stored without it; what is stored is kept, the rest is drawn."""
    with_decoder(run_file, "GPT2Config")
    folder = run_file.parent / "gpt2"
    config = GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=12, vocab_size=32)
    GPT2LMHeadModel(config).save_pretrained(folder)
    decoder = f"model.decoder={{path: {folder}, reads: image}}"
    assert run(capsys, "verify", run_file, "--set", decoder)["passed"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.decoder.reads=sound", "model.decoder.reads: there is no tower 'sound'; give one of image, text"),
        ("model.decoder.config=LlamaConfig", "model.decoder: model_type 'llama' is no caption decoder; known are gpt2"),
        ("model.decoder.values.hidden_size=12", "model.decoder: is 12 wide, but the towers' features 8; set model.con"),
        ("model.decoder.values.is_decoder=false", "model.decoder.values.is_decoder: is False, but a decoder reads"),
        ("model.decoder.values.vocab_size=9", "model.decoder: its vocabulary has 9 tokens, but the tokenizer has 28"),
        ("parallel.explicit.decoder.tp=3", "parallel: decoder.tp_size: 3 does not divide n_head 2"),
        ("parallel.explicit.decoder.cp=2", "parallel.explicit.decoder.cp: is 2, but towers and decoders have whole"),
        ("parallel.explicit={image: {}, text: {}}", "parallel.explicit: has no decoder; give the layout of every"),
        ("model.decoder.loss_weight=0", "model.decoder.loss_weight: is 0"),
    ],
)
def test_mistakes_about_a_decoder(
    capsys: pytest.CaptureFixture[str], run_file: Path, override: str, message: str
) -> None:
    with_decoder(run_file, "GPT2Config")
    expect_mistake(capsys, ["plan", run_file, "--set", override], message)


def test_towers_share_no_tokens(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    limits = "parallel.limits={cp: [1, 2]}"
    expect_mistake(
        capsys, ["plan", run_file, "--set", limits], "parallel.limits.cp: is .*, but towers hand on whole items"
    )


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
        "data: says nothing of tower 'audio'; give it under images or sounds",
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.towers.image.config=LlamaConfig", "model.towers.image: llama is no encoder"),
        ("model.towers.image.values.vision_use_head=false", "vision_use_head: is false, so there are no features"),
        ("model.towers.image.projector=null", "projector: is null, but the tower's width is 16 and that .* 8"),
        ("model.towers.image.projector=conv", 'projector: is "conv"; give one of projection, linear, mlp'),
        ("model.towers={image: {config: SiglipVisionConfig}}", "model.towers: has image alone; give at least two"),
        ("model.contrastive.loss=softmin", 'model.contrastive.loss: is "softmin"; give one of softmax, sigmoid'),
        ("model.contrastive.anchor=txet", "contrastive.anchor: there is no tower 'txet'; give one of image, audio"),
        ("model.contrastive.width=null", "contrastive.width: is missing"),
        (
            "model.contrastive.max_logit_scale=1.0",
            "max_logit_scale: is 1.0, less than the initial logit_scale 2.66; give",
        ),
        (
            "model.contrastive={width: 8, logit_scale: 5.0, max_logit_scale: 4.6}",
            "max_logit_scale: is 4.6, less than the initial logit_scale 5; give",
        ),
        (
            "model.contrastive.logit_scale=90",
            "model.contrastive.logit_scale: is 90; give a number at least -7",
        ),
        ("model.contrastive.logit_scale=.nan", "model.contrastive.logit_scale: is NaN; give a number at least -7"),
        ("model.contrastive.max_logit_scale=.inf", "model.contrastive.max_logit_scale: is Infinity; give a number at"),
        ("model.contrastive.logit_bias=-.inf", "model.contrastive.logit_bias: is -Infinity; give a number at least"),
        ("model.contrastive.logit_bias=1.0", "contrastive.logit_bias: the softmax loss has none"),
        ("model.merge=prepend", "merge: stands beside towers"),
        ("model.towers.text.values.vocab_size=20", "model.towers.text: its vocabulary has 20 tokens, but .* 28"),
        ("train.contrastive_batch_size=3", "contrastive_batch_size: is 3, which does not divide .*global_batch_size 8"),
        ("train.contrastive_batch_size=1", "train.contrastive_batch_size: is 1, which leaves nothing to compare"),
        ("data={kind: dial-a-digit}", "data.kind: dial-a-digit has no pairs for towers; give pairs or same-digits"),
        ("data.min_digits=6", "max_digits: is 5, less than min_digits 6"),
        ("parallel.explicit.image.cp=2", "parallel.explicit.image.cp: is 2, but towers and decoders have whole items"),
        ("parallel.explicit.image.dp=2", "the plan uses 4 ranks but cluster has 3"),
        ("parallel.explicit.contrastive={}", "parallel.explicit: there is no module 'contrastive'"),
        ("parallel.recompute_features=[img]", "parallel.recompute_features: there is no module 'img'"),
        (
            "parallel={planner: distmm, recompute_features: [image]}",
            "parallel.recompute_features: planners choose that themselves",
        ),
        (
            "parallel={planner: auto, recompute_features: [image]}",
            "recompute_features: planners choose that themselves",
        ),
        (
            "parallel={planner: distmm, num_microbatches: 4}",
            "parallel.num_microbatches: planners choose that themselves for towers; leave it out, or give planner: exp",
        ),
        ("parallel={planner: auto, limits: {cp: [2]}}", "parallel.limits.cp: towers have whole items; leave it out"),
        (
            "parallel={planner: distmm, limits: {modules: {contrastive: {max_pp: 1}}}}",
            "parallel.limits.modules.contrastive: a loss is one stage on all ranks that hold features; leave it out",
        ),
        (
            "parallel={planner: distmm, limits: {dp: [2]}}",
            "parallel.limits.dp: planners balance towers by their replicas",
        ),
        ("parallel={planner: distmm, packing: true}", "parallel.packing: is of a language model's samples"),
        ("parallel={planner: auto, placement: replicated}", "parallel.placement: distmm puts towers apart"),
        ("parallel={planner: cornstarch}", "the model has towers that a loss contrasts; give distmm, auto or explicit"),
        ("parallel.placement=replicated", "parallel.placement: replicated is for encoders of a language model"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], run_file: Path, override: str, message: str) -> None:
    expect_mistake(capsys, ["plan", run_file, "--set", override], message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.contrastive_batch_size=4", "train.contrastive_batch_size: is of towers"),
        ("parallel.recompute_features=[vision]", "parallel.recompute_features: is of towers"),
        ("data={kind: same-digits}", "data.kind: same-digits is for towers"),
        ("model.contrastive={width: 8}", "model.contrastive: is the loss of towers"),
        ("model.decoder={config: GPT2Config, reads: vision}", "model.decoder: captions what a tower sees; give towers"),
        ("model={encoders: {}}", "model.language_model: is missing; give one, or towers"),
    ],
)
def test_keys_of_towers_without_towers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, override: str, message: str
) -> None:
    from tiny_run import write_tiny_run

    expect_mistake(capsys, ["plan", write_tiny_run(tmp_path), "--set", override], message)
