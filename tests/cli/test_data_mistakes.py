"""Mistakes in the user's conversations and media files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import yaml
from mistakes import expect_mistake
from PIL import Image
from tiny_run import TINY_RUN
from transformers import WhisperFeatureExtractor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from motet.cli.main import main
from motet.data.chat import word_level_tokenizer

SEEN = {"image": "cat.png", "conversations": [["human", "<image> What is it?"], ["gpt", "A cat."]]}
HEARD = {"audio": "meow.wav", "conversations": [["human", "What is it? <audio>"], ["gpt", "A meow."]]}


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processors")
    word_level_tokenizer(["What is it? A cat. A meow."]).save_pretrained(folder / "tokenizer")
    SiglipImageProcessorPil(size={"height": 48, "width": 48}).save_pretrained(folder / "vision")
    WhisperFeatureExtractor(feature_size=16, chunk_length=1, hop_length=320, n_fft=400).save_pretrained(
        folder / "audio"
    )
    return folder


@pytest.fixture
def run_file(tmp_path: Path, processors: Path) -> Path:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 50, 3), np.uint8)).save(tmp_path / "cat.png")
    soundfile.write(tmp_path / "meow.wav", np.sin(np.arange(8000) / 10), 16000)
    values = {
        **TINY_RUN,
        "data": {
            "kind": "conversations",
            "files": str(tmp_path / "train.jsonl"),
            "image_folder": str(tmp_path),
            "audio_folder": str(tmp_path),
            "tokenizer": str(processors / "tokenizer"),
            "processors": {name: str(processors / name) for name in ("vision", "audio")},
        },
        "train": {"steps": 1, "global_batch_size": 4, "output": str(tmp_path / "output")},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    write_records(tmp_path, [SEEN, HEARD] * 3)
    return path


def write_records(folder: Path, records: list[dict[str, Any]]) -> None:
    lines = []
    for record in records:
        turns = [{"from": speaker, "value": text} for speaker, text in record["conversations"]]
        lines.append(json.dumps({**record, "conversations": turns}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


def test_right_conversations_are_trained_on(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(run_file), "--json"]) == 0, capsys.readouterr().err
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"conversations": [["human", "<image> <image> What?"], ["gpt", "A cat."]]},
            "image: names 1 files, but the turns hold 2 <image>",
        ),
        (
            {"conversations": [["human", "What is it?"], ["gpt", "A cat."]]},
            "image: names 1 files, but the turns hold 0 <image>",
        ),
        ({"image": "dog.png"}, "image: .*dog.png: there is no such file"),
        ({"image": 7}, "image: is 7; give a path or a list of paths"),
        ({"conversations": [["human", "<image> What?"]]}, "has no answer at its end; the last turn must be from gpt"),
        ({"conversations": [["human", "<image> What?"], ["gpt", " "]]}, "value: is an empty answer"),
        ({"conversations": [["person", "<image> What?"], ["gpt", "A cat."]]}, "from: is 'person'; give one of human"),
        ({"conversations": []}, "conversations: is missing or empty"),
    ],
)
def test_records(run_file: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str) -> None:
    write_records(run_file.parent, [HEARD, SEEN | changes, SEEN, HEARD])
    expect_mistake(capsys, ["plan", run_file], rf"train.jsonl:2: .*{message}")


def test_a_line_that_is_not_json(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_file.parent / "train.jsonl").write_text('{"conversations": [\n')
    expect_mistake(capsys, ["plan", run_file], "train.jsonl:1: is not JSON")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.files=nothing.jsonl", "nothing.jsonl: cannot be read"),
        ("data.tokenizer=/nowhere", "data.tokenizer: /nowhere cannot be loaded"),
        ("data.tokenizer=null", "data.tokenizer: is missing, and the model has random weights"),
        ("data.processors.vision=/nowhere", "data.processors.vision: /nowhere cannot be loaded"),
        ("data.processors.video=x", "data.processors.video: is not an encoder; the model has vision, audio"),
        ("train.global_batch_size=7", "train.global_batch_size: is 7, but there are 6 training samples"),
        ("model.language_model.values.vocab_size=9", "vocabulary has 9 tokens, but the tokenizer has"),
    ],
)
def test_where_data_come_from(run_file: Path, capsys: pytest.CaptureFixture[str], override: str, message: str) -> None:
    expect_mistake(capsys, ["plan", run_file, "--set", override], message)


def test_a_corrupt_image(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = run_file.parent / "cat.png"
    image.write_bytes(b"not a picture")
    expect_mistake(capsys, ["plan", run_file], "cat.png: is no image that Pillow reads; replace the file")


def test_an_image_cut_short_is_found_by_the_process_that_decodes_it(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = run_file.parent / "cat.png"
    image.write_bytes(image.read_bytes()[:2000])
    assert main(["train", str(run_file)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("motet: error:")
    assert "cat.png: cannot be decoded" in error


@pytest.mark.parametrize("kept", [0, 2000])
def test_corrupt_images_are_left_out_and_named_if_the_user_wants_it(
    run_file: Path, capsys: pytest.CaptureFixture[str], kept: int
) -> None:
    image = run_file.parent / "cat.png"
    image.write_bytes(image.read_bytes()[:kept])
    assert main(["train", str(run_file), "--json", "--set", "data.on_corrupt=skip"]) == 0, capsys.readouterr().err
    told = json.loads(capsys.readouterr().out)["data"]["skipped_samples"]
    assert told
    assert all("cat.png: " in reason for reason in told)
    (line,) = (run_file.parent / "output" / "skipped_samples.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "skipped": told}


def test_an_empty_clip(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soundfile.write(run_file.parent / "meow.wav", np.zeros(0), 16000)
    expect_mistake(capsys, ["plan", run_file], "meow.wav: is an empty clip; replace the file, or leave it out")


def test_a_clip_that_is_no_sound(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_file.parent / "meow.wav").write_bytes(b"meow")
    expect_mistake(capsys, ["plan", run_file], "meow.wav: cannot be read as a sound by libsndfile")
