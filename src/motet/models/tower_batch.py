"""A dict of tensors, as HuggingFace processors return it, as the batch of a contrastive model.

Keys (B samples, each with one item for every tower): `pixel_values` [B, C, H, W], `input_features` [B, mel, frames],
`input_ids` [B, T] with, for BERT, its `attention_mask` [B, T] (0 = padding on the right). Where two towers read the
same key, each has a dict of its own under its name: `batch["left"] = {"pixel_values": ...}`. Audio may come with
`feature_attention_mask` [B, frames].

CLIP's and SigLIP's texts stay as they are, padding included: transformers computes them so.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from motet.data.sample import Sample, Segment
from motet.data.tower_layouts import LEGACY_END
from motet.errors import UserError
from motet.models.dict_batch import DictBatch
from motet.models.encoders import family_of
from motet.models.token_counts import encoder_segment, grid_of, reads_text
from motet.plan import CONTRASTIVE

if TYPE_CHECKING:
    from motet.models.contrastive import ContrastiveModule

FEATURES = ("pixel_values", "input_features", "input_ids")


def batch_of_towers(model: "ContrastiveModule", batch: Mapping[str, Any]) -> DictBatch:
    """Reads only configurations of `model`. Raises `UserError` naming the key that is missing or does not fit."""
    towers = model.modality_modules()
    keys = {name: family_of(tower.module).feature for name, tower in towers.items()}
    segments: dict[str, list[Segment]] = {}
    tensors: dict[str, list[dict[str, Tensor]]] = {}
    for name, tower in towers.items():
        given = batch.get(name, batch)
        if given is batch and list(keys.values()).count(keys[name]) > 1:
            raise UserError(f"batch: several towers read {keys[name]}; give each a dict of its own under its name")
        segments[name], tensors[name] = _items(name, tower.module.config, keys[name], given)
    sizes = {name: len(own) for name, own in segments.items()}
    if len(set(sizes.values())) > 1 or not all(sizes.values()):
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(f"batch: the towers have different numbers of samples ({listed}); give each sample to all")
    samples = tuple(
        Sample(str(i), {name: (own[i],) for name, own in segments.items()}, {CONTRASTIVE: 1})
        for i in range(next(iter(sizes.values())))
    )
    return DictBatch(samples, tensors)


def _items(name: str, config: Any, key: str, given: Mapping[str, Any]) -> tuple[list[Segment], list[dict[str, Tensor]]]:
    features = given.get(key)
    if not isinstance(features, Tensor) or features.dim() < 2:
        raise UserError(f"batch: {key} of tower {name} is missing or no tensor of all samples")
    segments, tensors = [], []
    for i, feature in enumerate(features.split(1)):
        if reads_text(config):
            feature = _without_padding(config, feature, given.get("attention_mask"), i)
            grid = _text_grid(config, feature[0])
        elif key == "input_features":
            mask = given.get("feature_attention_mask")
            grid = grid_of(config, num_mel_frames=feature.shape[-1] if mask is None else int(mask[i].sum()))
        else:
            grid = grid_of(config, image_size=(feature.shape[-2], feature.shape[-1]))
        segment = encoder_segment(config, item=0, grid=grid)
        segments.append(Segment(segment.num_tokens, num_outputs=1, grid=segment.grid))
        tensors.append({key: feature})
    return segments, tensors


def _without_padding(config: Any, ids: Tensor, mask: Tensor | None, sample: int) -> Tensor:
    if config.model_type != "bert" or mask is None:
        return ids
    length = int(mask[sample].sum())
    if not length or not bool(mask[sample, :length].all()):
        raise UserError(f"batch: attention_mask of sample {sample}: padding stands on the right, and some text before")
    return ids[:, :length]


def _text_grid(config: Any, ids: Tensor) -> tuple[int, ...]:
    if config.model_type != "clip_text_model":
        return (len(ids),)
    place = ids.argmax() if config.eos_token_id == LEGACY_END else (ids == config.eos_token_id).int().argmax()
    return len(ids), int(torch.as_tensor(place))
