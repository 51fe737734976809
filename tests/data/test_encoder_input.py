"""Layouts that are written from sizes alone fit what the real processors and encoders make, for every family."""

import numpy as np
import pytest
import torch
from feeding import FAMILIES, SOUND, SQUARE, encoder_input, items, sizes_for
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples
from tiny_configs import ENCODERS, VISION
from transformers import SiglipVisionConfig, WhisperConfig

from motet.data.encoder_layout import resampled_length
from motet.data.formats.media import resample
from motet.data.preparation import EncoderInput
from motet.errors import UserError


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", range(5))
def test_the_layout_is_as_long_as_what_the_encoder_makes(family: str, size: int) -> None:
    fed, media = encoder_input(family, "full"), items(family, [sizes_for(family)[size]])
    segment = fed.segment(0, media[0])
    torch.manual_seed(0)
    config, model_class = ENCODERS[family]
    model = model_class(config).eval()
    features = fed.features([(fed.modality, item) for item in media])
    with torch.no_grad():
        if family == "qwen2_5_vl":
            output = model(features["pixel_values"], grid_thw=torch.tensor([segment.grid]))
            assert len(features["pixel_values"]) == segment.num_tokens
            assert len(output.pooler_output) == segment.outputs
            return
        if family == "pixtral":
            pixels = [[rows * 8 for rows in segment.grid]]
            hidden = model(features["pixel_values"], image_sizes=torch.tensor(pixels)).last_hidden_state
        else:
            hidden = model(next(iter(features.values()))).last_hidden_state
    inside = segment.num_tokens // 2 if family == "qwen2_audio" else segment.num_tokens
    assert hidden.shape[:2] == (1, inside)
    assert segment.outputs == inside


@pytest.mark.parametrize("family", ["whisper", "qwen2_audio"])
@examples(25)
@given(num_samples=st.integers(400, 16_000))
def test_frames_of_a_sound_are_those_of_the_extractors_mask(family: str, num_samples: int) -> None:
    mask = SOUND(np.zeros(num_samples, np.float32), sampling_rate=16_000, return_attention_mask=True)["attention_mask"]
    assert encoder_input(family).grid((num_samples, 16_000)) == (int(np.sum(mask)),)


@examples(40)
@given(height=st.integers(5, 300), width=st.integers(5, 300))
def test_qwen2_vl_patches_are_those_of_its_processor(height: int, width: int) -> None:
    fed = encoder_input("qwen2_5_vl")
    outputs = fed.processor(images=[items("qwen2_5_vl", [(height, width)])[0].load()], return_tensors="pt")
    assert fed.grid((height, width)) == tuple(outputs["image_grid_thw"][0].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_several_items_of_a_sample_come_together(family: str) -> None:
    fed, media = encoder_input(family), items(family, sizes_for(family)[:3])
    (name, values), *others = fed.features([(fed.modality, item) for item in media]).items()
    assert not others
    assert name == ("input_features" if fed.modality == "audio" else "pixel_values")
    segments = [fed.segment(i, item) for i, item in enumerate(media)]
    assert [segment.item for segment in segments] == [0, 1, 2]
    if family == "qwen2_5_vl":
        assert len(values) == sum(segment.num_tokens for segment in segments)
    else:
        assert len(values) == 3
    if family == "pixtral":
        assert values.shape[-2:] == tuple(8 * max(s.grid[side] for s in segments) for side in (0, 1))


@given(num_samples=st.integers(1, 3000), own=st.sampled_from([8000, 11025, 22050, 44100, 48000, 16000]))
@examples(40)
def test_resampled_sounds_are_as_long_as_foretold(num_samples: int, own: int) -> None:
    wave = resample(np.ones(num_samples, np.float32), own, 16_000)
    assert wave.dtype == np.float32
    assert len(wave) == resampled_length((num_samples, own), 16_000)


def test_resampling_keeps_a_tones_pitch() -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(44_100) / 44_100).astype(np.float32)
    heard = resample(tone, 44_100, 16_000)
    assert np.argmax(np.abs(np.fft.rfft(heard))) * 16_000 / len(heard) == pytest.approx(440, abs=1)


def test_a_clip_that_is_too_long_is_refused() -> None:
    with pytest.raises(UserError, match=r"lasts 2\.0 s, but encoder takes at most 1 s"):
        encoder_input("whisper").grid((32_000, 16_000))


def test_a_feature_extractor_of_another_encoder_is_refused() -> None:
    with pytest.raises(UserError, match="makes 100 frames of a clip, but the encoder takes 3000"):
        EncoderInput("audio", SOUND, WhisperConfig())


def test_an_image_processor_of_another_encoder_is_refused() -> None:
    fed = EncoderInput("image", SQUARE, SiglipVisionConfig(**{**VISION, "image_size": 64}))
    with pytest.raises(UserError, match="makes 96 x 96 pixels, but encoder takes 64 x 64"):
        fed.grid((50, 50))
