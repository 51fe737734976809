import subprocess
import sys

import pytest
from transformers import (
    CLIPVisionConfig,
    Dinov2Config,
    PixtralVisionConfig,
    Qwen2AudioEncoderConfig,
    SiglipVisionConfig,
    WhisperConfig,
)
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

from motet.assignment.sample import Segment
from motet.families.encoders.token_counts import encoder_segment, grid_of, selection_of, token_counts

WHISPER = WhisperConfig(max_source_positions=50)
QWEN2_AUDIO = Qwen2AudioEncoderConfig(max_source_positions=50)
QWEN_VISION = Qwen2_5_VLVisionConfig(spatial_merge_size=2)


@pytest.mark.parametrize(
    ("config", "processed", "segment"),
    [
        (SiglipVisionConfig(image_size=32, patch_size=8), {"image_size": (32, 32)}, Segment(16, None, 3, 16, (4, 4))),
        (SiglipVisionConfig(image_size=32, patch_size=8), {"image_size": (17, 40)}, Segment(10, None, 3, 10, (2, 5))),
        (CLIPVisionConfig(image_size=32, patch_size=8), {"image_size": (32, 32)}, Segment(17, None, 3, 16, (4, 4))),
        (Dinov2Config(image_size=28, patch_size=14), {"image_size": (28, 42)}, Segment(7, None, 3, 6, (2, 3))),
        (PixtralVisionConfig(patch_size=16), {"image_size": (48, 32)}, Segment(6, None, 3, 6, (3, 2))),
        (QWEN_VISION, {"image_grid_thw": (2, 4, 6)}, Segment(48, None, 3, 12, (2, 4, 6))),
        (WHISPER, {"num_mel_frames": 100}, Segment(50, None, 3, 50, (100,))),
        (WHISPER, {"num_mel_frames": 31}, Segment(50, None, 3, 16, (31,))),
        (QWEN2_AUDIO, {"num_mel_frames": 100}, Segment(50, None, 3, 25, (100,))),
        (QWEN2_AUDIO, {"num_mel_frames": 31}, Segment(50, None, 3, 8, (31,))),
    ],
)
def test_segment_of_an_item(config, processed, segment):
    grid = grid_of(config, **processed)
    assert encoder_segment(config, item=3, grid=grid) == segment
    assert encoder_segment(config.to_dict(), item=3, grid=grid) == segment


def test_full_selection_keeps_class_token_and_padding():
    clip = CLIPVisionConfig(image_size=32, patch_size=8)
    assert encoder_segment(clip, item=0, grid=(4, 4), feature_select="full").num_outputs == 17
    assert encoder_segment(WHISPER, item=0, grid=(31,), feature_select="full").num_outputs == 50
    assert encoder_segment(QWEN2_AUDIO, item=0, grid=(31,), feature_select="full").num_outputs == 25


def test_empty_grid_is_the_configured_size():
    assert token_counts(CLIPVisionConfig(image_size=32, patch_size=8), ()).num_tokens == 17
    assert token_counts(WHISPER, ()).num_patch == 50


def test_selection_is_read_from_the_layout():
    clip = CLIPVisionConfig(image_size=32, patch_size=8)
    patch = selection_of(clip, encoder_segment(clip, item=0, grid=(4, 4), num_tiles=3))
    assert (patch.num_tiles, patch.num_full, patch.first, patch.num_tokens) == (3, 17, 1, 16)
    assert patch.num_outputs == 48
    full = selection_of(clip, encoder_segment(clip, item=0, grid=(4, 4), feature_select="full"))
    assert (full.num_tiles, full.first, full.num_tokens) == (1, 0, 17)


def test_qwen2_audio_lengths_are_those_of_transformers():
    import torch
    from transformers import Qwen2AudioEncoder

    frames = torch.arange(3, 101)
    _, outputs = Qwen2AudioEncoder._get_feat_extract_output_lengths(None, frames)
    assert [token_counts(QWEN2_AUDIO, (n,)).num_patch for n in frames.tolist()] == outputs.tolist()


@pytest.mark.parametrize(
    ("config", "grid", "names"),
    [
        (QWEN_VISION, (1, 3, 4), "spatial_merge_size"),
        (QWEN_VISION, (4, 4), "frames, patch rows"),
        (PixtralVisionConfig(), (), "patch rows"),
        (PixtralVisionConfig(), (0, 3), "at least 1"),
        (WHISPER, (101,), "1 to 100"),
        (QWEN2_AUDIO, (2,), "3 to 100"),
        ({"model_type": "whisper"}, (2,), "max_source_positions is missing"),
        ({"model_type": "gpt2"}, (), "'gpt2' is not known"),
    ],
)
def test_what_is_wrong_is_named(config, grid, names):
    with pytest.raises(ValueError, match=names):
        token_counts(config, grid)


def test_missing_size_and_misfit_are_named():
    with pytest.raises(ValueError, match="needs image_grid_thw"):
        grid_of(QWEN_VISION, image_size=(28, 28))
    with pytest.raises(ValueError, match="num_tokens 5"):
        selection_of(QWEN_VISION, Segment(5, grid=(1, 2, 2)))


def test_imports_no_torch():
    code = "import sys, motet.families.encoders.token_counts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
