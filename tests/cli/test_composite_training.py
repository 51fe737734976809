"""Whole models of several modalities: trained, exported, and asked by plain transformers."""

import json

import pytest
import soundfile
import torch
from composite_run import composite_run
from mistakes import expect_mistake
from PIL import Image
from sampling import in_campaigns
from tiny_composites import COMPOSITES
from transformers import AutoModelForMultimodalLM, AutoProcessor

from motet.api import train
from motet.config import RunConfig
from motet.data.composite import turn_parts
from motet.runtime.verification import feature_check


@torch.no_grad()
def answer(model, processor, record, folder):
    """To the first turn, by transformers alone."""
    question = record["conversations"][0]["value"]
    if type(processor).__name__ == "VoxtralProcessor":
        inputs = processor.apply_chat_template([{"role": "user", "content": voxtral_parts(question, record, folder)}])
        made = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=11)
        return processor.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    turn = {"role": "user", "content": turn_parts(question)}
    media = {}
    if record.get("image"):
        media["images"] = [Image.open(folder / file) for file in record["image"]]
    if record.get("audio"):
        media |= {
            "audio": [soundfile.read(folder / file, dtype="float32")[0] for file in record["audio"]],
            "sampling_rate": 16000,
        }
    text = processor.apply_chat_template([turn], add_generation_prompt=True)
    inputs = processor(text=[text], return_tensors="pt", add_special_tokens=False, **media)
    end = processor.tokenizer.eos_token_id
    made = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=0)
    return processor.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def voxtral_parts(question, record, folder):
    """Parts of a turn in the form of mistral-common, which reads the files itself."""
    files = iter(record.get("audio", ()))
    return [
        {"type": "audio", "path": str(folder / next(files))} if part["type"] == "audio" else part
        for part in turn_parts(question)
    ]


def train_and_ask(name, folder, steps):
    """The losses, and how many of the answers to 16 samples that were learned the exported model gives."""
    train_keys = {
        "steps": steps,
        "dtype": "float32",
        "learning_rate": 1e-2,
        "checkpoint_every": steps,
        "global_batch_size": 16,
        "output": str(folder / "out"),
    }
    # Padded together, Voxtral's samples would be twice as many tokens.
    num_microbatches = 16 if name == "voxtral" else 2
    values = composite_run(folder, name, pp=2, num_samples=16, num_microbatches=num_microbatches, **train_keys)
    result = train(RunConfig.model_validate_json(json.dumps(values)))
    before, after = (AutoModelForMultimodalLM.from_pretrained(path) for path in (folder / "model", result["export"]))
    assert type(before) is type(after)
    assert list(before.state_dict()) == list(after.state_dict())
    processor = AutoProcessor.from_pretrained(result["export"])
    records = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    given = [answer(after.eval(), processor, record, folder) for record in records]
    learned = [record["conversations"][1]["value"] for record in records]
    return result["losses"], sum(a == b for a, b in zip(given, learned, strict=True))


@pytest.mark.parametrize("name", ["qwen3_vl", *in_campaigns(["qwen2_audio"])])
def test_a_trained_model_answers_from_its_export(name, tmp_path):
    losses, right = train_and_ask(name, tmp_path, 100)

    assert losses[-1] < losses[0] / 10
    assert right >= 8


class ReachedError(Exception):
    """Raised in the place of what comes after the check of the export."""


@pytest.fixture
def lacking(monkeypatch, tmp_path):
    """A run of ShieldGemma 2, whose language model transformers' own save_pretrained loses. What is probed next is not
    reached."""

    def reached(config, plan):
        raise ReachedError

    monkeypatch.setattr(feature_check, "check_features", reached)
    values = composite_run(tmp_path, "gemma3", output=str(tmp_path / "out"))
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "shieldgemma2"}))
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(values))
    return path


LACKS = r"export: transformers would not load [0-9]+ of the tensors of a Gemma3ForCond.* set train\.export to false"


def test_an_export_that_would_lack_weights_is_refused_before_the_training(capsys, lacking):
    expect_mistake(capsys, ["train", lacking, "--set", "train.checkpoint_every=2"], LACKS, says_more=True)
    for keys in (["train.checkpoint_every=2", "train.export=false"], ["train.checkpoint_every=0"]):
        with pytest.raises(ReachedError):
            train(lacking, keys)
    assert not (lacking.parent / "out").exists()


def test_phases_are_refused_before_the_first_one(capsys, lacking):
    phases = "train.phases=[{name: a, steps: 1, set: {train.export: false}}, {name: b, steps: 1}]"
    expect_mistake(capsys, ["train", lacking, "--set", phases], LACKS, says_more=True)


@pytest.mark.campaign
@pytest.mark.parametrize("name", COMPOSITES)
def test_each_learns_its_samples_by_heart(name, tmp_path):
    losses, right = train_and_ask(name, tmp_path, 100 if name == "voxtral" else 250)

    assert losses[-1] < 0.05
    assert right == 16
