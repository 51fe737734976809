"""From a run file to data: the built-in task for every encoder family, and conversations with saved processors."""

import json
from pathlib import Path
from typing import Any

import pytest
import soundfile
from conversation_files import CONVERSATIONS, words, write_conversations, write_media
from feeding import SOUND, SQUARE
from tiny_configs import AUDIO, DINO, VISION

from motet.config import RunConfig
from motet.data.chat import word_level_tokenizer
from motet.data.loader import Loader
from motet.data.preparation import ExampleDataset
from motet.data.run_file import LaidOutExamples, open_data, open_samples
from motet.data.service.tickets import InProcess
from motet.errors import UserError
from motet.strict_parsing import parse_strictly

LLM = {"config": "LlamaConfig", "values": {"vocab_size": 60, "hidden_size": 64}}
WHISPER = {"config": "WhisperConfig", "values": AUDIO}
SIGLIP = {"config": "SiglipVisionConfig", "values": VISION}
QWEN = {"depth": 2, "hidden_size": 64, "num_heads": 4, "patch_size": 4, "out_hidden_size": 48}
ENCODERS = {
    "siglip": SIGLIP,
    "clip": {"config": "CLIPVisionConfig", "values": VISION},
    "dinov2": {"config": "Dinov2Config", "values": DINO},
    "pixtral": {"config": "PixtralVisionConfig", "values": VISION},
    "qwen2_5_vl": {"config": "Qwen2_5_VLVisionConfig", "values": QWEN},
    "whisper": WHISPER,
    "qwen2_audio": {"config": "Qwen2AudioEncoderConfig", "values": AUDIO},
    "whisper of 30 s": {"config": "WhisperConfig", "values": {**AUDIO, "max_source_positions": 1500}},
}


def config(encoders: dict[str, Any], data: dict[str, Any], language_model: dict[str, Any] = LLM) -> RunConfig:
    values = {"model": {"encoders": encoders, "language_model": language_model}, "data": data}
    return parse_strictly(RunConfig, json.dumps(values), what="run.yaml")


@pytest.mark.parametrize("family", ENCODERS)
def test_dial_a_digit_feeds_every_encoder_family(family: str) -> None:
    task = {"kind": "dial-a-digit", "max_images": 2, "max_clips": 2, "num_train": 16, "num_held_out": 5}
    data = open_data(config({"encoder": ENCODERS[family]}, {**task, "no_image": 0.0, "no_sound": 0.0} | denied(family)))
    assert (len(data.train), len(data.held_out)) == (16, 5)
    batch = next(Loader(InProcess(data.train), 8, seed=0, batches_ahead=0))
    for place, sample in enumerate(batch.samples):
        assert sample.has("encoder")
        values = next(iter(batch.features("encoder", place).values()))
        expected = sample.num_tokens("encoder") if family == "qwen2_5_vl" else len(sample.layouts["encoder"])
        assert len(values) == expected
        assert len(batch.features("language_model", place)["input_ids"]) == sample.num_tokens("language_model")


@pytest.mark.parametrize("family", ENCODERS)
def test_metadata_read_without_torch_is_the_same(family: str) -> None:
    task = {"kind": "dial-a-digit", "max_images": 2, "max_clips": 2, "num_train": 16, "num_held_out": 5}
    run = config({"encoder": ENCODERS[family]}, {**task, "no_image": 0.0, "no_sound": 0.0} | denied(family))
    plain, whole = open_samples(run), open_data(run).train
    assert isinstance(plain, LaidOutExamples)
    assert [plain.sample(i) for i in range(len(plain))] == [whole.sample(i) for i in range(len(whole))]


def denied(family: str) -> dict[str, float]:
    """A model of one modality is given examples of that alone."""
    has_sound = ENCODERS[family]["config"] in ("WhisperConfig", "Qwen2AudioEncoderConfig")
    return {"no_image": 1.0} if has_sound else {"no_sound": 1.0}


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    small = {"config": "LlamaConfig", "values": {"vocab_size": 20}}
    with pytest.raises(
        UserError, match=r"model\.language_model: its vocabulary has 20 tokens, but the tokenizer has 30"
    ):
        open_data(config({"vision": SIGLIP}, {"kind": "dial-a-digit"}, small))


def test_two_encoders_of_one_modality_are_refused() -> None:
    with pytest.raises(UserError, match="several take image"):
        open_data(config({"a": SIGLIP, "b": ENCODERS["clip"]}, {"kind": "dial-a-digit"}))


def test_frames_that_do_not_divide_a_second_are_refused() -> None:
    odd = {"config": "WhisperConfig", "values": {**AUDIO, "max_source_positions": 27}}
    with pytest.raises(UserError, match=r"model\.encoders\.audio\.values\.max_source_positions: 27"):
        open_data(config({"audio": odd}, {"kind": "dial-a-digit"}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Conversations, media, a tokenizer and processors, as a user has them."""
    write_media(tmp_path)
    soundfile.write(tmp_path / "stereo.wav", soundfile.read(tmp_path / "stereo.wav")[0], 44_100)
    write_conversations(tmp_path / "data.jsonl")
    write_conversations(tmp_path / "eval.jsonl", CONVERSATIONS[:1])
    word_level_tokenizer(words()).save_pretrained(tmp_path / "tokenizer")
    SQUARE.save_pretrained(tmp_path / "vision")
    SOUND.save_pretrained(tmp_path / "audio")
    return tmp_path


def conversations(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "conversations",
        "files": str(folder / "data.jsonl"),
        "eval_files": [str(folder / "eval.jsonl")],
        "image_folder": str(folder),
        "audio_folder": str(folder),
        "tokenizer": str(folder / "tokenizer"),
        "processors": {"vision": str(folder / "vision"), "audio": str(folder / "audio")},
        **changes,
    }


def test_conversations_are_read_with_saved_processors(folder: Path) -> None:
    data = open_data(config({"vision": SIGLIP, "audio": WHISPER}, conversations(folder)))
    assert (len(data.train), len(data.held_out)) == (4, 1)
    samples = [data.train.sample(index) for index in range(4)]
    assert [len(sample.layouts.get("vision", ())) for sample in samples] == [1, 2, 0, 0]
    assert [len(sample.layouts.get("audio", ())) for sample in samples] == [0, 2, 0, 1]
    assert data.train.features(1, "audio")["input_features"].shape == (2, 16, 100)
    assert data.train.features(1, "vision")["pixel_values"].shape == (2, 3, 96, 96)


def test_conversations_metadata_read_without_torch_is_the_same(folder: Path) -> None:
    run = config({"vision": SIGLIP, "audio": WHISPER}, conversations(folder))
    plain, whole = open_samples(run), open_data(run).train
    assert isinstance(plain, LaidOutExamples)
    assert [plain.sample(i) for i in range(len(plain))] == [whole.sample(i) for i in range(len(whole))]


def test_a_processor_without_a_rule_is_asked_itself(folder: Path) -> None:
    values = json.loads((folder / "vision" / "preprocessor_config.json").read_text())
    (folder / "vision" / "preprocessor_config.json").write_text(
        json.dumps({**values, "image_processor_type": "DeiTImageProcessor", "crop_size": values["size"]})
    )
    run = config({"vision": SIGLIP, "audio": WHISPER}, conversations(folder))
    asked = open_samples(run)
    assert isinstance(asked, ExampleDataset)
    assert not asked.preparation.modules["vision"].has_rule
    assert asked.sample(0).layouts["vision"][0].num_tokens == 144


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": ({"tokenizer": None}, r"data\.tokenizer: is missing, and the model has random weights"),
    "tokenizer elsewhere": ({"tokenizer": "nowhere"}, r"data\.tokenizer: nowhere cannot be loaded"),
    "no processor": ({"processors": {}}, r"data\.processors\.vision: is missing"),
    "unknown encoder": (
        {"processors": {"touch": "x"}},
        r"data\.processors\.touch: is not an encoder; the model has vision",
    ),
    "file missing": ({"files": "nothing.jsonl"}, r"nothing\.jsonl: cannot be read"),
    "folder wrong": ({"image_folder": "nowhere"}, r"data\.jsonl:1: image: nowhere/wide\.png: there is no such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_names_its_key_or_file(folder: Path, name: str) -> None:
    changes, message = WRONG[name]
    for opened in (open_data, open_samples):
        with pytest.raises(UserError, match=message):
            opened(config({"vision": SIGLIP, "audio": WHISPER}, conversations(folder, **changes)))


def test_media_that_cannot_be_decoded_are_told_with_file_and_line(folder: Path) -> None:
    image = folder / "wide.png"
    image.write_bytes(image.read_bytes()[:-4000])
    data = open_data(config({"vision": SIGLIP, "audio": WHISPER}, conversations(folder)))
    assert data.train.sample(0).has("vision")
    with pytest.raises(UserError, match=r"data\.jsonl:1: .*wide\.png: cannot be decoded"):
        data.train.features(0, "vision")
