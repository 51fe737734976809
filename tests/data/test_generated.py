"""Images to generate in conversations: layouts, labels, pixels, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from generator_run import SD3, generator_config, generator_run, planned
from PIL import Image

from motet.assignment.sample import Sample, Segment
from motet.config import RunConfig, SpectrogramConfig
from motet.data.generated import log_mel, mel_bands
from motet.data.run_file import open_data, open_samples
from motet.errors import UserError


def test_queries_stand_at_placeholders_and_name_their_reader(tmp_path: Path) -> None:
    data = open_data(generator_config(tmp_path)).train
    sample = data.sample(3)  # Two images to draw, 8 x 12 pixels.
    grid = {"num_tokens": 24, "grid": (4, 6)}
    assert sample.layouts["image"] == (Segment(item=0, **grid), Segment(item=1, **grid))
    assert sample.layouts["image_queries"] == (Segment(3, item=0), Segment(3, item=1))
    queries = [segment for segment in sample.layouts["language_model"] if segment.source == "image_queries"]
    assert queries == [Segment(3, source="image_queries", item=i, target="image") for i in (0, 1)]
    assert sample.num_loss_tokens["image"] == 2
    text = data.features(3, "language_model")
    marks = text["input_ids"] == text["input_ids"].max()  # The last token that was added.
    # That an image comes is learned at the first of its places.
    assert text["labels"][marks].tolist() == 2 * [text["input_ids"].max().item(), -100, -100]
    assert data.features(3, "image")["latents"].shape == (2 * 8 * 12,)
    assert "image" not in data.sample(4).layouts
    assert data.sample(4).num_loss_tokens["image"] == 0


def test_without_queries_the_prompt_is_read(tmp_path: Path) -> None:
    config = generator_config(tmp_path, queries=None)
    data = open_data(config).train
    sample = data.sample(1)  # An image to see, and one to draw.
    ids = data.features(1, "language_model")["input_ids"]
    mark = ids.tolist().index(ids.max())
    assert sample.output_places("language_model", "image") == list(range(mark + 1))
    assert data.features(1, "language_model")["labels"][mark] == ids.max()
    with pytest.raises(UserError, match="has several images, but image reads the whole prompt of one"):
        data.sample(3)


def test_a_prompt_ends_before_what_the_last_answer_generates(tmp_path: Path) -> None:
    data = open_data(generator_config(tmp_path))
    for index in range(5):
        prompt = data.preparation.prompt(data.train.examples[index])
        features = data.train.features(index, "language_model")
        is_answer = features["labels"] != -100
        assert prompt.tolist() == features["input_ids"][: int(is_answer.nonzero()[0])].tolist()


def test_pixels_are_grey_between_minus_one_and_one(tmp_path: Path) -> None:
    data = open_data(generator_config(tmp_path)).train
    pixels = np.asarray(Image.open(tmp_path / "generate_0_0.png").convert("L"), dtype=np.float32)
    np.testing.assert_allclose(data.features(0, "image")["latents"].view(8, 8), pixels / 127.5 - 1)


def test_metadata_read_without_torch_are_the_same(tmp_path: Path) -> None:
    config = generator_config(tmp_path)
    plain, whole = open_samples(config), open_data(config).train
    assert [plain.sample(i) for i in range(8)] == [whole.sample(i) for i in range(8)]


def test_rows_that_a_generator_reads() -> None:
    text = (
        Segment(2),
        Segment(3, source="q", target="image"),
        Segment(1),
        Segment(3, source="q", item=1, target="image"),
    )
    sample = Sample("a", {"language_model": text})
    assert sample.num_outputs("language_model") == 9
    assert sample.num_outputs("language_model", "image") == 6
    assert sample.output_places("language_model", "image") == [2, 3, 4, 6, 7, 8]
    assert sample.output_places("language_model", "other") == list(range(9))


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"generator": {**SD3, "config": "DiTTransformer2DModel"}}, r"config: a DiTTransformer2DModel takes class labels"),
    ({"generator": {**SD3, "config": "WanTransformer3DModel"}}, r"config: a WanTransformer3DModel generates videos"),
    ({"generator": {**SD3, "config": "SD4"}}, r"model\.generators\.image\.config: 'SD4' is not known"),
    ({"generator": {**SD3, "values": {**SD3["values"], "in_channels": 16, "out_channels": 16}}}, "in_channels: is 16"),
    (
        {"explicit": {"image": {"cp": 2}}},
        r"parallel\.explicit\.image\.cp: is 2, which is not supported for a generator",
    ),
    (
        {"explicit": {"image": {"tp": 2, "sequence_parallel": True}}},
        r"parallel\.explicit\.image\.sequence_parallel: is True, which is not supported for a generator",
    ),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    given = dict(changes)
    run = generator_run(tmp_path, given.pop("generator", SD3), **given)
    with pytest.raises((UserError, ValueError), match=message):
        open_data(RunConfig.model_validate(run))


CODE_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"objective": "v"}, "objective: is for diffusion models, but codec makes this a decoder of codes; leave it out"),
    ({"guidance": 3.5}, "guidance: is for diffusion models"),
    ({"spectrogram": {}}, "spectrogram: is for diffusion models"),
    ({"autoencoder": {"path": "somewhere"}}, "autoencoder: is for diffusion models"),
    (
        {"config": "LlamaConfig"},
        "config: a decoder of codes has random weights at first; give GPT2Config",
    ),
    ({"values": {"n_embd": 16, "vocab_size": 9}}, r"values\.vocab_size: follows from codec; leave it out"),
    ({"values": {"n_embd": 16, "n_heads": 2}}, r"model\.generators\.voice\.values\.n_heads"),
]


@pytest.mark.parametrize(("changes", "message"), CODE_MISTAKES)
def test_what_no_decoder_of_codes_can_be_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run = generator_run(tmp_path, sounds=True, codes=changes, num_devices=5)
    with pytest.raises((UserError, ValueError), match=message):
        open_data(RunConfig.model_validate(run))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"pp": 2}, r"voice.*1"),
        ({"tp": 2}, r"voice.*tp"),
        ({"cp": 2}, r"parallel\.explicit\.voice\.cp: is 2, which is not supported for a generator"),
    ],
)
def test_a_decoder_of_codes_is_one_stage(tmp_path: Path, layout: dict[str, Any], message: str) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        planned(tmp_path, {"sounds": True, "codes": {}, "explicit": {"voice": layout}, "num_devices": 6})


def test_an_image_that_patches_do_not_divide_is_refused(tmp_path: Path) -> None:
    config = generator_config(tmp_path)
    Image.new("L", (9, 8)).save(tmp_path / "generate_0_0.png")
    with pytest.raises(UserError, match=r"data\.jsonl:1: generate: an image has 8 x 9 pixels; give multiples of 2"):
        open_data(config).train.sample(0)


def test_two_generators_of_images_are_refused(tmp_path: Path) -> None:
    run = generator_run(tmp_path)
    run["model"]["generators"]["other"] = run["model"]["generators"]["image"]
    run["parallel"]["explicit"]["other"] = {}
    with pytest.raises(ValueError, match="generators: image and other both make images, but records name"):
        RunConfig.model_validate_json(json.dumps(run))


def test_several_generators_have_queries_of_their_own(tmp_path: Path) -> None:
    run = generator_run(tmp_path, queries=None, sounds=True, num_devices=5)
    with pytest.raises(ValueError, match=r"generators\.image\.queries: is null, but of several generators each reads"):
        RunConfig.model_validate_json(json.dumps(run))


def test_spectrograms_show_tones_where_they_sound(tmp_path: Path) -> None:
    options = SpectrogramConfig(sampling_rate=8000, window=256, hop=80, num_mels=40)
    seconds = np.arange(4000) / 8000
    seen = log_mel(0.5 * np.sin(2 * np.pi * 1000 * seconds).astype(np.float32), options, 56)
    assert seen.shape == (40, 56)
    peaks = mel_bands(8000, 256, 40).argmax(0) * 8000 / 256
    assert abs(peaks[seen[:, 25].argmax()] - 1000) < 100
    # Half of full scale, of which a band holds most: -6 dB and a little more.
    assert -8 < (seen[:, 25].max() - 1) * 40 < -4
    assert seen[:, 55].max() == -1  # Silence behind the sound.


def test_sounds_are_laid_out_by_their_length(tmp_path: Path) -> None:
    data = open_data(generator_config(tmp_path, sounds=True, num_devices=5)).train
    sample = data.sample(3)  # 0.2875 s at 4000 Hz are 11.5 hops: 6 patches of 2 frames.
    assert sample.layouts["voice"] == (Segment(24, item=0, grid=(4, 6)), Segment(24, item=1, grid=(4, 6)))
    assert data.features(3, "voice")["latents"].shape == (2 * 8 * 12,)
    queries = [segment for segment in sample.layouts["language_model"] if segment.target]
    assert [(segment.target, segment.item) for segment in queries] == [("voice", 0), ("image", 0), ("voice", 1)]


def test_latents_are_those_of_the_autoencoder_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    config = generator_config(tmp_path, latents=True)
    data = open_data(config).train
    assert data.sample(1).layouts["image"] == (Segment(6, item=0, grid=(2, 3)),)  # 8 x 12 pixels: latents of 4 x 6.
    features = data.features(1, "image")
    pixels = np.asarray(Image.open(tmp_path / "generate_1_0.png"), dtype=np.float32) / 127.5 - 1
    model = AutoencoderKL.from_pretrained(tmp_path / "autoencoder")
    with torch.no_grad():
        found = model.encode(torch.from_numpy(pixels).permute(2, 0, 1)[None]).latent_dist
    torch.testing.assert_close(features["latents"], ((found.mean - 0.1) * 0.7).flatten())
    torch.testing.assert_close(features["deviations"], (found.std * 0.7).flatten())
    (kept,) = (tmp_path / "cache" / "latents").iterdir()
    np.save(kept, np.zeros((2, 2, 4, 6), np.float32))
    assert not open_data(config).train.features(1, "image")["latents"].any()


def test_channels_and_sizes_are_those_of_the_autoencoder(tmp_path: Path) -> None:
    run = generator_run(tmp_path, latents=True)
    Image.new("RGB", (10, 8)).save(tmp_path / "generate_0_0.png")
    with pytest.raises(UserError, match="an image has 8 x 10 pixels; give multiples of 4, the side of a patch of lat"):
        open_data(RunConfig.model_validate_json(json.dumps(run))).train.sample(0)
    run["model"]["generators"]["image"]["values"] |= {"in_channels": 3, "out_channels": 3}
    with pytest.raises(UserError, match=r"in_channels: is 3, but the autoencoder has 2 latent channels; give 2"):
        open_data(RunConfig.model_validate_json(json.dumps(run)))
