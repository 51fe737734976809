"""Tiny multimodal models of several parts, with a batch of samples that have one image, several, or none."""

import torch
from tiny_encoders import MEL_BINS, MEL_FRAMES, tiny_encoder
from tiny_language_models import SIZES, tiny_language_model
from torch import nn

from motet.families.encoders.encoder_families import family_of
from motet.families.encoders.token_counts import encoder_segment
from motet.models.graph import ModalityModule
from motet.models.hub.generation import Prompt
from motet.models.multimodal import MultimodalModule

IMAGE_ID, AUDIO_ID = SIZES["vocab_size"] - 1, SIZES["vocab_size"] - 2


def tiny_multimodal(
    *,
    vision: str = "siglip",
    audio: str | None = None,
    language_model: str = "llama",
    merge: str = "placeholder",
    projector: str | nn.Module | None = "mlp",
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> MultimodalModule:
    encoders = {"vision": ModalityModule(tiny_encoder(vision, dtype=dtype), projector, **options)}
    ids = {"vision": IMAGE_ID}
    if audio is not None:
        encoders["audio"] = ModalityModule(tiny_encoder(audio, seed=1, dtype=dtype), "linear")
        ids["audio"] = AUDIO_ID
    return MultimodalModule(
        encoders, tiny_language_model(language_model, dtype), merge=merge, placeholder_token_ids=ids
    )


def prompts_of(model: MultimodalModule, dtype: torch.dtype = torch.float64) -> list[Prompt]:
    """Of different lengths: two images, one, none, a clip, both."""
    counts = [{"vision": 2}, {"vision": 1}, {}, {"audio": 1}, {"audio": 1, "vision": 1}, {"vision": 1}]
    encoders = model.modality_modules(encoders_only=True)
    generator = torch.Generator().manual_seed(5)
    prompts = []
    for index, count in enumerate(counts):
        segments, features, pieces = {}, {}, []
        for name in encoders:
            if not count.get(name):
                continue
            segments[name], features[name] = _items(encoders[name], count[name], generator, dtype)
            if model.merge != "cross_attention":
                num_outputs = sum(segment.outputs for segment in segments[name])
                pieces.append(torch.full((num_outputs,), model.placeholder_token_ids[name]))
        text = torch.randint(3, 30, (4 + index,), generator=generator)
        front = text[:0] if model.merge == "prepend" else text[:2]
        prompts.append(Prompt(torch.cat([front, *pieces, text[len(front) :]]), segments, features))
    return prompts


def _items(encoder, count, generator, dtype):
    config = encoder.module.config
    is_audio = family_of(encoder.module).feature == "input_features"
    grids = [(9 + 5 * item,) if is_audio else (4, 4) for item in range(count)]
    if config.model_type == "qwen2_5_vl_vision":
        grids = [(1, 4, 6)] * count
        shape, key = (24 * count, 3 * 2 * 4 * 4), "pixel_values"
    elif is_audio:
        shape, key = (count, MEL_BINS, MEL_FRAMES), "input_features"
    else:
        shape, key = (count, 3, 16, 16), "pixel_values"
    segments = tuple(
        encoder_segment(config, item=item, grid=grid, feature_select=encoder.feature_select)
        for item, grid in enumerate(grids)
    )
    return segments, {key: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)}
