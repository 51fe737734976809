"""The plain forward of an encoder, as its user would write it with transformers: what `motet verify` compares with.

Calls nothing but the user's own modules: the model's top-level forward, the callbacks, the projector. It reads the
layout (`Segment.grid`, `num_tokens`, `num_outputs`) in its own words, so that a slip in the stages cannot hide here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask

from motet.assignment.sample import Segment


def plain_encoder_output(modality_module: Any, features: Mapping[str, Tensor], segments: Sequence[Segment]) -> Tensor:
    """What one sample's items become: [sum of num_outputs, output size].

    Args:
        modality_module: has `module` (the transformers encoder), `projector` and the three callbacks (or None each);
            maybe `feature_layer`, the index into `hidden_states` of the features that are meant.
        features: the sample's tensors for this encoder.
        segments: the sample's layout in this encoder.
    """
    inputs = dict(features)
    if modality_module.preprocess_callback is not None:
        inputs = modality_module.preprocess_callback(inputs)
    output = _encode(modality_module.module, inputs, segments, getattr(modality_module, "feature_layer", None))
    if modality_module.postprocess_module_callback is not None:
        output = _tensor(modality_module.postprocess_module_callback(inputs, (output,)))
    if modality_module.projector is not None:
        output = _tensor(modality_module.projector(output))
    if modality_module.postprocess_projector_callback is not None:
        output = _tensor(modality_module.postprocess_projector_callback(inputs, (output,)))
    return output


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _encode(model: Any, inputs: Mapping[str, Tensor], segments: Sequence[Segment], feature_layer: int | None) -> Tensor:
    """The features that the layout asks for, items one after the other."""
    family = model.config.model_type
    if family == "qwen2_5_vl_vision":
        grid_thw = torch.tensor([segment.grid for segment in segments], device=inputs["pixel_values"].device)
        return model(inputs["pixel_values"], grid_thw=grid_thw).pooler_output
    if family == "qwen2_audio_encoder":
        return _leading(_encode_qwen2_audio(model, inputs["input_features"], segments), segments)
    if family == "whisper":
        return _leading(model(inputs["input_features"]).last_hidden_state, segments)

    def features(*args: Any, **kwargs: Any) -> Tensor:
        if feature_layer is None:
            return model(*args, **kwargs).last_hidden_state
        return model(*args, **kwargs, output_hidden_states=True).hidden_states[feature_layer]

    if family == "pixtral":
        return features(inputs["pixel_values"], image_sizes=_pixtral_sizes(model, segments))[0]
    if family == "dinov2":
        hidden = features(inputs["pixel_values"])
    else:
        hidden = features(inputs["pixel_values"], interpolate_pos_encoding=True)
    has_class_token = any(name.endswith((".class_embedding", ".cls_token")) for name, _ in model.named_parameters())
    if has_class_token and any(segment.outputs != segment.num_tokens for segment in segments):
        hidden = hidden[:, 1:]
    return hidden.flatten(0, 1)


def _leading(hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Of every clip, what comes before the padding."""
    return torch.cat([clip[: segment.outputs] for clip, segment in zip(hidden, segments, strict=True)])


def _pixtral_sizes(model: Any, segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """(height, width) in pixels of every image; several in a row for an item that a callback cuts into tiles."""
    patch = model.config.patch_size
    sizes = []
    for segment in segments:
        rows, columns = segment.grid
        sizes += [(rows * patch, columns * patch)] * (segment.num_tokens // (rows * columns))
    return sizes


def _encode_qwen2_audio(model: Any, mel: Tensor, segments: Sequence[Segment]) -> Tensor:
    """With padding masked, as `Qwen2AudioModel` calls its audio tower."""
    num_tokens = (mel.shape[-1] - 2) // 2 + 1
    frames = torch.tensor([segment.grid[0] if segment.grid else mel.shape[-1] for segment in segments])
    lengths = ((frames - 1) // 2 + 1).to(mel.device)
    valid = torch.arange(num_tokens, device=mel.device)[None, :] < lengths[:, None]
    mask = create_bidirectional_mask(
        config=model.config,
        inputs_embeds=mel.new_zeros(len(segments), num_tokens, 1),
        attention_mask=valid.long(),
    )
    return model(mel, attention_mask=mask).last_hidden_state
