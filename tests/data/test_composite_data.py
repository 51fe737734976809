"""Conversations as the processors of models of several modalities prepare them."""

import json
from unittest.mock import Mock

import pytest
import torch
from composite_run import composite_run, write_conversations
from PIL import Image
from tiny_composites import COMPOSITES
from transformers import AutoProcessor

from motet.assignment.sample import IGNORED_LABEL
from motet.config import RunConfig
from motet.data import run_file
from motet.data.run_file import open_data, open_samples
from motet.errors import UserError
from motet.plan import LANGUAGE_MODEL


def run_config(folder, name, **data):
    values = composite_run(folder, name)
    values["data"] |= data
    return RunConfig.model_validate_json(json.dumps(values))


@pytest.mark.parametrize("name", COMPOSITES)
def test_answers_have_labels_and_placeholders_are_as_many_as_layouts_say(name, tmp_path):
    data = open_data(run_config(tmp_path, name))
    tokenizer = data.preparation.tools[LANGUAGE_MODEL].tokenizer
    functions = {m: p.functions for m, p in data.preparation.modules[LANGUAGE_MODEL].whole.composite.encoders.items()}

    for index in range(4):
        sample, text = data.train.sample(index), data.train.features(index, LANGUAGE_MODEL)
        ids, labels = text["input_ids"], text["labels"]
        assert sample.num_tokens(LANGUAGE_MODEL) == len(ids) == len(labels)
        answer = tokenizer.decode(labels[labels != IGNORED_LABEL])
        assert answer == f"It is {index * 37 % 10}.{tokenizer.eos_token if name == 'voxtral' else '<eos>'}"
        assert sample.num_loss_tokens[LANGUAGE_MODEL] == int((labels != IGNORED_LABEL).sum())
        for module, own in functions.items():
            tokens = torch.tensor([function.token_id for function in own])
            assert sample.num_outputs(module) == int(torch.isin(ids, tokens).sum())
            assert [segment.item for segment in sample.layouts.get(module, ())] == list(
                range(len(sample.layouts.get(module, ())))
            )
            placed = [s for s in sample.layouts[LANGUAGE_MODEL] if s.source == module]
            assert sum(segment.num_tokens for segment in placed) == sample.num_outputs(module)
            if sample.has(module):
                assert any(value.is_floating_point() for value in data.train.features(index, module).values())


def test_voxtral_reads_a_conversation_as_mistral_common_does(tmp_path):
    config = run_config(tmp_path, "voxtral")
    data = open_data(config)
    processor = AutoProcessor.from_pretrained(config.model.composite.path)
    whole = data.preparation.modules[LANGUAGE_MODEL].whole
    records = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]

    for index in (0, 1, 2):
        audio = [{"type": "audio", "path": str(tmp_path / file)} for file in records[index].get("audio", ())]
        question = {"type": "text", "text": f"What is the number {index}?"}
        theirs = processor.apply_chat_template([{"role": "user", "content": [*audio, question]}])
        assert whole.prompt(data.train.examples[index]) == theirs["input_ids"][0].tolist()
        if audio:
            assert torch.equal(data.train.features(index, "audio")["input_features"], theirs["input_features"])


def test_metadata_alone_are_those_of_the_data_and_are_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    config = run_config(tmp_path, "llava_onevision")
    data = open_data(config).train
    expected = [data.sample(i) for i in range(8)]

    assert [open_samples(config).sample(i) for i in range(8)] == expected

    with monkeypatch.context() as without:
        without.setattr(run_file, "_composite_layouts", None)
        assert [open_samples(config).sample(i) for i in range(8)] == expected
    (stored,) = (tmp_path / "cache" / "layouts").iterdir()
    stored.write_text(stored.read_text()[:-20])  # As after a process that was ended while it wrote.
    assert [open_samples(config).sample(i) for i in range(8)] == expected


@pytest.mark.parametrize(
    "changed", ["another template", "another number of frames", "another image", "another text", "other values"]
)
def test_layouts_are_made_again_where_they_may_differ(changed, tmp_path, monkeypatch):
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    config = run_config(tmp_path, "llava_onevision")
    open_samples(config).sample(0)
    if changed == "another template":
        template = tmp_path / "model" / "chat_template.jinja"
        template.write_text(template.read_text() + " ")
    elif changed == "another number of frames":
        config = run_config(tmp_path, "llava_onevision", video={"frames": 2})
    elif changed == "another image":
        for picture in tmp_path.glob("*.png"):
            Image.open(picture).resize((100, 60)).save(picture)
    elif changed == "another text":
        data = tmp_path / "data.jsonl"
        data.write_text(data.read_text().replace("the number", "a number"))
    else:
        config.model.values["vision_feature_select_strategy"] = "default"

    monkeypatch.setattr(run_file, "_composite_layouts", Mock(side_effect=UserError("made again")))
    with pytest.raises(UserError, match="made again"):
        open_samples(config).sample(0)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_audio"])
def test_media_that_the_model_does_not_take_are_refused(name, tmp_path):
    write_conversations(tmp_path, "llava_onevision" if name == "qwen2_audio" else "qwen2_audio")
    config = run_config(tmp_path, name)

    with pytest.raises(UserError, match=r"data.jsonl:1: .*(image|audio)"):
        open_data(config).train.sample(0)


def test_processors_of_other_modules_are_refused(tmp_path):
    config = run_config(tmp_path, "gemma3", processors={"vision": "somewhere"})

    with pytest.raises(UserError, match=r"data\.processors.vision: the model has a processor of its own"):
        open_data(config)


def test_a_folder_without_processor_is_told(tmp_path):
    config = run_config(tmp_path, "gemma3")
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    for file in (tmp_path / "model").glob("*processor*"):
        file.unlink()

    with pytest.raises(UserError, match=r"model: the processor in .* cannot be loaded"):
        open_data(config)
