"""Videos in training: the frames that are read, their patches and tokens, and what `motet data-stats` says of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversation_files import words, write_conversations, write_media
from feeding import MERGED, SOUND, SQUARE, encoder_input
from PIL import Image
from tiny_configs import AUDIO, ENCODERS, VISION
from torch import nn
from video_files import write_video

from motet.api import verify
from motet.assignment.sample import Sample
from motet.cli.main import main
from motet.config import RunConfig, VideoConfig
from motet.data.chat import word_level_tokenizer
from motet.data.encoder_layout import frame_times
from motet.data.example import Example, Message, VideoSize
from motet.data.formats.media import ImageFile
from motet.data.formats.video import VideoFile
from motet.data.preparation import join_frames
from motet.data.run_file import open_data, open_samples
from motet.errors import UserError
from motet.models.graph import ModalityModule
from motet.models.stages.encoder import EncoderStage, num_encoder_layers
from motet.models.stages.stage import StageInput
from motet.strict_parsing import parse_strictly

MINUTE = VideoSize(480, 640, 1500, 60.0)


@pytest.mark.parametrize(
    ("sampling", "number"),
    [
        ({}, 60),
        ({"fps": 0.5}, 30),
        ({"fps": 10.0}, 64),
        ({"fps": 10.0, "max_frames": 100}, 100),
        ({"frames": 8}, 8),
        ({"fps": 0.001}, 1),
        ({"frames": 8, "max_tokens": 500}, 5),
        ({"frames": 8, "max_tokens": 99}, None),
    ],
)
def test_how_many_frames_are_read(sampling: dict[str, Any], number: int | None) -> None:
    if number is None:
        with pytest.raises(
            UserError, match=r"data\.video\.max_tokens: is 99, but a frame of 480 x 640 pixels takes 100"
        ):
            frame_times(MINUTE, VideoConfig(**sampling), tokens_per_patch=100)
    else:
        assert len(frame_times(MINUTE, VideoConfig(**sampling), tokens_per_patch=100)) == number


def test_frames_are_spread_from_the_first_to_the_last() -> None:
    assert frame_times(VideoSize(8, 8, 5, 1.0), VideoConfig(frames=3)) == pytest.approx((0, 0.4, 0.8))
    assert frame_times(VideoSize(8, 8, 5, 1.0), VideoConfig(frames=9)) == pytest.approx((0, 0.2, 0.4, 0.6, 0.8))
    assert frame_times(VideoSize(8, 8, 5, 1.0), VideoConfig(frames=1)) == (0.5,)
    # Two frames make up a patch, so the budget allows two for 100 tokens.
    budget = VideoConfig(frames=9, max_tokens=299)
    assert len(frame_times(MINUTE, budget, tokens_per_patch=100, frames_per_patch=2)) == 4


def mixed(folder: Path) -> Example:
    """An image, a video of seven frames, and an image."""
    write_media(folder)
    video = VideoFile(write_video(folder / "clip.mp4", 7))
    return Example(
        "mixed",
        (Message("user", "<image> <video> <image>?"), Message("assistant", "A cat.")),
        {"image": (ImageFile(folder / "wide.png"), ImageFile(folder / "tall.jpg")), "video": (video,)},
    )


@pytest.mark.parametrize("family", ["siglip", "clip", "dinov2", "pixtral", "qwen2_5_vl"])
def test_layouts_fit_what_the_encoder_makes(tmp_path: Path, family: str) -> None:
    pytest.importorskip("av")
    fed, example = replace(encoder_input(family), video=VideoConfig(frames=5)), mixed(tmp_path)
    layout, _ = fed.lay_out(example, {})
    assert [(segment.item, segment.num_frames) for segment in layout] == [(0, 0), (1, 5), (2, 0)]
    config, model_class = ENCODERS[family]
    model = model_class(config).eval()
    stage = EncoderStage("vision", ModalityModule(model), (0, num_encoder_layers(model, None)))
    # The stage itself compares what its layers make with the layout.
    output = stage(StageInput([Sample("mixed", {"vision": layout})], [fed.features(fed.items(example))])).hidden
    assert len(output) == sum(segment.outputs for segment in layout)


def test_patches_of_two_frames_are_those_of_a_convolution_over_the_video() -> None:
    rng = np.random.default_rng(0)
    frames = [Image.fromarray(rng.integers(0, 256, (16, 24, 3), dtype=np.uint8)) for _ in range(4)]
    joined = join_frames(MERGED(images=frames, return_tensors="pt")["pixel_values"], 4, 2)
    mean, std = torch.tensor(MERGED.image_mean), torch.tensor(MERGED.image_std)
    video = (torch.tensor(np.stack([np.asarray(frame) for frame in frames])) / 255 - mean) / std
    torch.manual_seed(0)
    convolution = nn.Conv3d(3, 5, kernel_size=(2, 4, 4), stride=(2, 4, 4), bias=False)
    expected = convolution(video.permute(3, 0, 1, 2)[None])[0]
    # Merged patches are adjacent: [5, 2 pairs, 4, 6] in blocks of 2 x 2.
    expected = expected.reshape(5, 2, 2, 2, 3, 2).permute(1, 2, 4, 3, 5, 0).reshape(-1, 5)
    own = joined @ convolution.weight.reshape(5, -1).T
    assert torch.allclose(own, expected, atol=1e-5)


QWEN = {"depth": 2, "hidden_size": 64, "num_heads": 4, "patch_size": 4, "out_hidden_size": 48, "intermediate_size": 64}
VISION_ENCODERS = {
    "siglip": ({"config": "SiglipVisionConfig", "values": VISION}, SQUARE),
    "qwen2_5_vl": ({"config": "Qwen2_5_VLVisionConfig", "values": QWEN}, MERGED),
}


def turns(question: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": "A cat."}]


RECORDS: list[dict[str, Any]] = [
    {"conversations": turns("What is old?")},
    {"image": "wide.png", "conversations": turns("<image>\nWhat is this?")},
    {"images": ["wide.png", "tall.jpg"], "conversations": turns("Is <image> like <image>?")},
    {"video": "short.mp4", "conversations": turns("<image>\nWhat is this?"), "data_source": "web"},
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "video", "video": "long.mp4"},
                    {"type": "image", "image": "tall.jpg"},
                    {"type": "text", "text": "Is it old?"},
                ],
            },
            {"role": "assistant", "content": "Time."},
        ]
    },
    {"video": ["long.mp4", "short.mp4"], "conversations": turns("Is <video> like <video>?")},
    {"conversations": turns("What is young?")},
    {"image": "tall.jpg", "conversations": turns("What is this? <image>")},
]


def write_run(folder: Path, family: str) -> dict[str, Any]:
    """A run file's content, and all that it names."""
    pytest.importorskip("av")
    write_media(folder)
    write_video(folder / "short.mp4", 3, size=(40, 48))
    write_video(folder / "long.mp4", 50, size=(30, 64))
    write_conversations(folder / "data.jsonl", RECORDS)
    word_level_tokenizer(words()).save_pretrained(folder / "tokenizer")
    encoder, processor = VISION_ENCODERS[family]
    processor.save_pretrained(folder / "vision")
    return {
        "model": {
            "encoders": {"vision": encoder},
            "language_model": {
                "config": "LlamaConfig",
                "values": {
                    "vocab_size": 60,
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                },
            },
        },
        "data": {
            "kind": "conversations",
            "files": str(folder / "data.jsonl"),
            "image_folder": str(folder),
            "video_folder": str(folder),
            "video": {"fps": 2.0, "max_frames": 8, "max_tokens": 5 * 144},
            "tokenizer": str(folder / "tokenizer"),
            "processors": {"vision": str(folder / "vision")},
        },
        "cluster": {"num_devices": 3},
        "parallel": {
            "planner": "explicit",
            "num_microbatches": 4,
            "explicit": {"vision": {}, "language_model": {"pp": 2}},
        },
        "train": {"global_batch_size": 8, "dtype": "float64"},
    }


@pytest.mark.parametrize("family", VISION_ENCODERS)
def test_data_stats_says_which_frames_and_tokens_training_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    values = write_run(tmp_path, family)
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    assert main(["data-stats", str(tmp_path / "run.yaml"), "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)["modules"]["vision"]["videos"]
    assert f"{tmp_path / 'data.jsonl'}: keys that are not read: data_source (first at" in err
    assert err.count("not read") == 1
    assert f"{told['number']} videos in vision: " in err

    run = parse_strictly(RunConfig, json.dumps(values), what="run.yaml")
    data, frames, tokens = open_data(run).train, [], []
    for index in range(len(data)):
        sample = data.sample(index)
        layout = sample.layouts.get("vision", ())
        ids = data.features(index, "language_model")["input_ids"].tolist()
        assert ids.count(word_level_tokenizer(words()).convert_tokens_to_ids("<image>")) == sum(
            s.outputs for s in layout
        )
        rows = len(data.features(index, "vision")["pixel_values"]) if layout else 0
        if family == "siglip":
            assert rows == sum(max(1, segment.num_frames) for segment in layout)
        else:
            assert rows == sum(segment.num_tokens for segment in layout)
            assert all(segment.grid[0] == -(-segment.num_frames // 2) for segment in layout if segment.num_frames)
        frames += [segment.num_frames for segment in layout if segment.num_frames]
        tokens += [segment.outputs for segment in layout if segment.num_frames]
    assert (told["number"], told["frames"]["max"], told["frames"]["mean"]) == (4, max(frames), np.mean(frames))
    assert (told["tokens"]["max"], told["tokens"]["mean"]) == (max(tokens), np.mean(tokens))
    # Three frames at ten a second are 0.3 s, which is less than one frame; five seconds are ten, of which eight are
    # read, or as many as the budget allows.
    assert frames == ([1, 5, 5, 1] if family == "siglip" else [1, 8, 8, 1])
    plain = open_samples(run)
    assert [plain.sample(i) for i in range(len(plain))] == [data.sample(i) for i in range(len(data))]


@pytest.mark.parametrize("family", VISION_ENCODERS)
def test_gradients_of_videos_are_those_of_one_process(tmp_path: Path, family: str) -> None:
    """Samples with and without media, with several images, videos, and both."""
    run = parse_strictly(RunConfig, json.dumps(write_run(tmp_path, family)), what="run.yaml")
    found = verify(run)
    assert found["passed"]
    assert found["max_grad_rel_err"] < 1e-9


def test_without_a_module_for_videos_they_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = write_run(tmp_path, "siglip")
    values["model"]["encoders"] = {"audio": {"config": "WhisperConfig", "values": AUDIO}}
    values["parallel"]["explicit"] = {"audio": {}, "language_model": {"pp": 2}}
    SOUND.save_pretrained(tmp_path / "audio")
    values["data"]["processors"] = {"audio": str(tmp_path / "audio")}
    write_conversations(tmp_path / "data.jsonl", [RECORDS[0], RECORDS[3]])
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    assert main(["plan", str(tmp_path / "run.yaml")]) == 2
    line = (
        f"{tmp_path / 'data.jsonl'}:2: video: no module of the model takes it; add one that does, or leave the key out"
    )
    assert line in capsys.readouterr().err
