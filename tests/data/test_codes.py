"""Codes of sounds: how many there are follows from configurations alone, and the codec's are kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generator_run import generator_config, generator_run, write_codec
from transformers import AutoModel

from motet.assignment.sample import Segment
from motet.config import RunConfig
from motet.data import codes
from motet.data.run_file import open_data, open_samples
from motet.errors import UserError
from motet.shapes.codes import DAC_DEFAULTS, MIMI_DEFAULTS, read_codec


def voice(folder: Path, **given: Any) -> Any:
    return generator_config(folder, sounds=True, codes=given, num_devices=5)


@pytest.mark.parametrize("kind", ["mimi", "dac"])
def test_codes_are_those_of_the_codec(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    config = voice(tmp_path, codec=kind)
    data = open_data(config)
    layout = data.preparation.modules["voice"]
    model = AutoModel.from_pretrained(tmp_path / kind)
    hop = {"mimi": 40, "dac": 16}[kind]
    number = 0
    for index in range(len(data.train)):
        sample, found = data.train.sample(index), data.train.features(index, "voice")["codes"]
        example = data.train.examples[index]
        taken = 0
        for segment, (_, media) in zip(
            sample.layouts.get("voice", ()), example.items(("generate_audio",)), strict=True
        ):
            num_frames = -(-(media.size()[0] // 4) // hop)
            assert segment.num_tokens == 1 + 2 * num_frames
            own = found[taken : taken + 2 * num_frames].view(num_frames, 2)
            taken, number = taken + 2 * num_frames, number + 1
            assert (own[:, 0] // 17 == 0).all()
            assert ((own[:, 1] - 1) // 16 == 1).all()
            wave = torch.zeros(1, 1, num_frames * hop)
            rate = codes.resample(media.load(), media.size()[1], 4000)
            wave[0, 0, : len(rate)] = torch.from_numpy(np.asarray(rate))
            with torch.no_grad():
                expected = model.encode(wave).audio_codes[0, :2]
            assert torch.equal((own - 1) % 16, expected.T)
        assert taken == len(found)
        assert sample.num_loss_tokens["voice"] == len(sample.layouts.get("voice", ()))
    assert number > 4
    assert len(set(found.tolist())) > 4 or number
    # Kept: the codec is not asked again.
    monkeypatch.setattr(codes, "encode", None)
    example = next(e for e in data.train.examples if e.items(("generate_audio",)))
    assert len(layout.codes(example)) > 0


def test_layouts_need_no_codec(tmp_path: Path) -> None:
    config = voice(tmp_path, loss_per="place")
    (tmp_path / "mimi" / "model.safetensors").unlink()
    source = open_samples(config)
    sample = source.sample(0)
    assert sample.layouts["voice"] == (Segment(1 + 2 * 19, item=0),)
    assert sample.num_loss_tokens["voice"] == 39


def test_rates_of_known_codecs() -> None:
    mimi = read_codec({"model_type": "mimi", **MIMI_DEFAULTS, "frame_rate": 12.5}, 8, "codec")
    assert (mimi.hop, mimi.num_frames(24_000), mimi.vocabulary) == (1920, 13, 1 + 8 * 2048)
    assert read_codec({"model_type": "mimi", "frame_rate": 25}, 8, "codec").hop == 960
    dac = read_codec({"model_type": "dac", **DAC_DEFAULTS}, 9, "codec")
    assert (dac.hop, dac.num_frames(16_000), dac.num_tokens(32)) == (512, 32, 1 + 9 * 32)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"codec: is a 'encodec'; give a codec of transformers, mimi or dac"):
        read_codec({"model_type": "encodec"}, 8, "codec")
    with pytest.raises(UserError, match=r"codec.num_codebooks: is 33, but the codec has 32; give at most 32"):
        read_codec({"model_type": "mimi"}, 33, "codec")
    with pytest.raises(UserError, match=r"codec: has 2 channels; give a codec of one"):
        read_codec({"model_type": "mimi", "audio_channels": 2}, 8, "codec")
    for key, value in (("upsampling_ratios", None), ("upsampling_ratios", [0, 2]), ("num_quantizers", "9")):
        with pytest.raises(UserError, match=rf"codec: config\.json: {key}: is .*; give a"):
            read_codec({"model_type": "mimi", key: value}, 2, "codec")
    with pytest.raises(UserError, match=r"codec: is a \['mimi'\]"):
        read_codec({"model_type": ["mimi"]}, 2, "codec")
    config = voice(tmp_path, values={"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 20})
    with pytest.raises(UserError, match=r"a sound has 38 codes, but model.generators.voice makes at most 19"):
        open_samples(config).sample(0)
    with pytest.raises(UserError, match=r"model.generators.voice.codec: .* cannot be loaded"):
        open_data(voice_of_damaged(tmp_path)).train.features(0, "voice")


def voice_of_damaged(folder: Path) -> Any:
    """Of which no codes are kept."""
    run = generator_run(folder, sounds=True, codes={}, num_devices=5)
    run["model"]["generators"]["voice"]["codec"]["path"] = write_codec(folder / "other", "mimi")
    (folder / "other" / "mimi" / "model.safetensors").write_text("no weights")
    return RunConfig.model_validate(run)
