"""A tiny encoder of each family, with samples of several items, for the tests of whoever runs encoders."""

from types import SimpleNamespace

import torch
import transformers
from torch import Tensor, nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from motet.assignment.sample import Sample, Segment
from motet.families.encoders.token_counts import encoder_segment

HIDDEN, HEADS, INNER, BLOCKS = 32, 2, 48, 4
MEL_BINS, MEL_FRAMES = 5, 24

VIT = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "num_hidden_layers": BLOCKS,
    "image_size": 16,
    "patch_size": 4,
}
AUDIO = {
    "d_model": HIDDEN,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "encoder_layers": BLOCKS,
    "num_mel_bins": MEL_BINS,
    "max_source_positions": MEL_FRAMES // 2,
}
QWEN_VISION = {
    "hidden_size": HIDDEN,
    "num_heads": HEADS,
    "intermediate_size": INNER,
    "depth": BLOCKS,
    "patch_size": 4,
    "window_size": 16,
    "out_hidden_size": 24,
    "fullatt_block_indexes": [1, 3],
}

ENCODERS = {
    "siglip": (transformers.SiglipVisionModel, transformers.SiglipVisionConfig, VIT),
    "clip": (transformers.CLIPVisionModel, transformers.CLIPVisionConfig, VIT),
    "dinov2": (
        transformers.Dinov2Model,
        transformers.Dinov2Config,
        {k: VIT[k] for k in VIT if k != "intermediate_size"},
    ),
    "qwen2_5_vl": (
        transformers.Qwen2_5_VisionTransformerPretrainedModel,
        transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig,
        QWEN_VISION,
    ),
    "pixtral": (transformers.PixtralVisionModel, transformers.PixtralVisionConfig, VIT),
    "whisper": (WhisperEncoder, transformers.WhisperConfig, AUDIO),
    "qwen2_audio": (transformers.Qwen2AudioEncoder, transformers.Qwen2AudioEncoderConfig, AUDIO),
}

GRIDS: dict[str, list[list[tuple[int, ...]]]] = {
    "siglip": [[(4, 4), (4, 4)], [(4, 4)], [(4, 4)] * 3],
    "clip": [[(4, 4), (4, 4)], [(4, 4)], [(4, 4)] * 3],
    "dinov2": [[(4, 4), (4, 4)], [(2, 3)], [(2, 3)] * 3, [(4, 4)]],
    "qwen2_5_vl": [[(1, 4, 6), (1, 10, 6)], [(2, 6, 4)], [(1, 2, 2)]],
    "pixtral": [[(3, 2), (1, 4)], [(4, 4)], [(1, 1), (2, 5), (3, 3)]],
    "whisper": [[(24,), (9,)], [(16,)], [()]],
    "qwen2_audio": [[(24,), (9,)], [(16,)], [()]],
}
"""For each family, the grids of the items of each sample: different ones where the family can."""


def tiny_encoder(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Every parameter is drawn at random: fresh norms and biases would hide mistakes."""
    model_class, config_class, values = ENCODERS[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**values)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def modality_module(module: nn.Module, projector: nn.Module | None = None, **callbacks: object) -> SimpleNamespace:
    absent = ("preprocess_callback", "postprocess_module_callback", "postprocess_projector_callback")
    return SimpleNamespace(module=module, projector=projector, **(dict.fromkeys(absent) | callbacks))


def samples_of(family: str, config: object, *, name: str = "encoder", select: str = "patch") -> list[Sample]:
    return [
        Sample(
            id=f"s{index}",
            layouts={
                name: tuple(
                    encoder_segment(config, item=item, grid=grid, feature_select=select)
                    for item, grid in enumerate(grids)
                )
            },
        )
        for index, grids in enumerate(GRIDS[family])
    ]


def features_of(
    family: str, segments: tuple[Segment, ...], *, seed: int, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """What the family's processor would return for one sample."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    grids = [segment.grid for segment in segments]
    if family in ("whisper", "qwen2_audio"):
        return {"input_features": draw(len(grids), MEL_BINS, MEL_FRAMES)}
    if family == "qwen2_5_vl":
        return {"pixel_values": draw(sum(t * h * w for t, h, w in grids), 3 * 2 * 4 * 4)}
    rows, columns = (max(grid[axis] for grid in grids) for axis in (0, 1))
    return {"pixel_values": draw(len(grids), 3, 4 * rows, 4 * columns)}
