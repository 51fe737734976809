"""Samples by their sizes: laid out as the encoders' own rules say, for planning only."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from motet.config import load_run_config
from motet.data.run_file import open_data
from motet.data.run_file_samples import open_samples

RUN: dict[str, Any] = {
    "model": {
        "encoders": {
            "vision": {
                "config": "CLIPVisionConfig",
                "values": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14,
                           "intermediate_size": 64, "image_size": 336},
                "projector": "mlp",
            },
            "audio": {
                "config": "WhisperConfig",
                "values": {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64},
                "projector": "linear",
            },
        },
        "language_model": {
            "config": "LlamaConfig",
            "values": {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 4},
        },
    },
    "data": {
        "kind": "described",
        "text_tokens": 100,
        "images": {"vision": {"height": 336, "width": 336, "count": 2}},
        "sounds": {"audio": {"seconds": 30}},
    },
    "cluster": {"num_devices": 3},
}  # fmt: skip


def config(tmp_path: Path, *overrides: str) -> Any:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return load_run_config(tmp_path / "run.yaml", list(overrides))


def test_tokens_are_those_of_the_families(tmp_path: Path) -> None:
    samples = open_samples(config(tmp_path))
    sample = samples.sample(3)
    assert sample == type(sample)("described 3", samples.sample(0).layouts, {"language_model": 100})
    vision = sample.layouts["vision"]
    assert [segment.item for segment in vision] == [0, 1]
    # CLIP adds a class token and hands on the 24 x 24 patches; Whisper halves 3000 frames.
    assert (vision[0].num_tokens, vision[0].outputs) == (577, 576)
    assert sample.num_tokens("audio") == 1500
    assert sample.num_tokens("language_model") == 2 * 576 + 1500 + 100


def test_it_cannot_be_trained_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.kind: is described, which has sizes but no data"):
        open_data(config(tmp_path))


def test_an_encoder_that_the_model_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data: there is no encoder 'smell'; the model has audio, vision"):
        open_samples(config(tmp_path, "data.sounds={smell: {seconds: 1}}"))
