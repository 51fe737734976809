"""The encoders' tensors in a dict of tensors, as images and clips: see `motet.models.dict_batch`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from motet.assignment.sample import Segment
from motet.errors import UserError
from motet.families.encoders import ENCODER_FAMILIES
from motet.families.token_counts import encoder_segment, grid_of

if TYPE_CHECKING:
    from motet.models.multimodal import ModalityModule

TEXT_KEYS = ("input_ids", "attention_mask", "labels")
BY_PRODUCTS = ("token_type_ids", "mm_token_type_ids")
"""Of processors: they say nothing that the placeholders do not."""
SIZE_KEY = {
    "qwen2_5_vl_vision": "image_grid_thw",
    "pixtral": "image_sizes",
    "whisper": "feature_attention_mask",
    "qwen2_audio_encoder": "feature_attention_mask",
}
"""By family: what tells the items' sizes. The others' are those of `pixel_values`."""
NUM_DIMS = {"pixel_values": 4, "input_features": 3}


@dataclass(frozen=True)
class Items:
    """All items of one encoder in the batch."""

    segments: tuple[Segment, ...] = ()
    """Of each item, in the encoder's layout; `item` is 0."""
    features: tuple[dict[str, Tensor], ...] = ()
    """Of each item, with a leading dimension along which those of a sample are concatenated."""

    def features_of(self, items: Sequence[int]) -> dict[str, Tensor]:
        """Of a sample with these items."""
        own = [self.features[i] for i in items]
        return {key: torch.cat([f[key] for f in own]) for key in (own[0] if own else ())}


def _feature_key(encoder: "ModalityModule") -> str:
    return ENCODER_FAMILIES[encoder.module.config.model_type].feature


def _keys_of(encoder: "ModalityModule") -> tuple[str, ...]:
    """What it reads, and what tells its items' sizes."""
    size_key = SIZE_KEY.get(encoder.module.config.model_type)
    return (_feature_key(encoder),) if size_key is None else (_feature_key(encoder), size_key)


def tensors_of_encoders(
    batch: Mapping[str, Any], encoders: Mapping[str, "ModalityModule"]
) -> dict[str, Mapping[str, Any]]:
    """For each encoder, what the batch has for it."""
    found: dict[str, Mapping[str, Any]] = {}
    readers: dict[str, str] = {}
    known = {*TEXT_KEYS, *BY_PRODUCTS}
    for name, encoder in encoders.items():
        known |= {name, f"num_{name}_items", f"num_{name}_outputs"}
        if batch.get(name) is not None:
            if not isinstance(batch[name], Mapping):
                raise UserError(f"batch: {name} is {described(batch[name])}; give a dict with {_feature_key(encoder)}")
            found[name] = batch[name]
            continue
        shared = {key: batch[key] for key in _keys_of(encoder) if batch.get(key) is not None}
        for key in shared:
            if key in readers:
                raise UserError(
                    f"batch: {readers[key]} and {name} both read {key}; give each its own, in dicts under their names"
                )
            readers[key] = name
        found[name] = shared
        known |= set(_keys_of(encoder))
    for key in batch:
        if key not in known and batch[key] is not None:
            raise UserError(f"batch: {key!r} is not a known key; known are {', '.join(sorted(known))}")
    return found


def read_items(name: str, encoder: "ModalityModule", tensors: Mapping[str, Any], outputs: Any) -> Items:
    """`outputs`: how many tokens each item becomes, if that was given."""
    key, config = _feature_key(encoder), encoder.module.config
    if tensors.get(key) is None:
        if tensors:
            raise UserError(f"batch: {key} of {name} is missing, but there is {', '.join(tensors)}; give both")
        return Items()
    grids = _grids(name, encoder, tensors)
    rows = [1] * len(grids)
    if config.model_type == "qwen2_5_vl_vision":
        rows = [frames * height * width for frames, height, width in grids]
    if sum(rows) != len(tensors[key]):
        raise UserError(
            f"batch: {key} of {name} has {len(tensors[key])} rows, "
            f"but {SIZE_KEY[config.model_type]} tells of {sum(rows)}"
        )
    if outputs is not None and len(outputs) != len(grids):
        raise UserError(
            f"batch: num_{name}_outputs has {len(outputs)} entries for {len(grids)} items; give one for each"
        )
    pieces: list[dict[str, Tensor]] = [{key: piece} for piece in tensors[key].split(rows)]
    for other in set(tensors) - set(_keys_of(encoder)):
        if not isinstance(tensors[other], Tensor) or len(tensors[other]) != len(grids):
            raise UserError(
                f"batch: {other} of {name} is {described(tensors[other])}; give a tensor [{len(grids)}, ...]"
            )
        for piece, row in zip(pieces, tensors[other].split(1), strict=True):
            piece[other] = row
    segments = [_segment(encoder, grid, piece) for grid, piece in zip(grids, pieces, strict=True)]
    if outputs is not None:
        segments = [replace(segment, num_outputs=int(n)) for segment, n in zip(segments, outputs, strict=True)]
    return Items(tuple(segments), tuple(pieces))


def _grids(name: str, encoder: "ModalityModule", tensors: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Of every item."""
    key, config = _feature_key(encoder), encoder.module.config
    features, size_key = tensors[key], SIZE_KEY.get(config.model_type)
    num_dims = 2 if size_key == "image_grid_thw" else NUM_DIMS[key]
    if not isinstance(features, Tensor) or features.dim() != num_dims:
        raise UserError(f"batch: {key} of {name} is {described(features)}; give a tensor of {num_dims} dimensions")
    sizes = None if size_key is None else tensors.get(size_key)
    if size_key == "image_grid_thw":
        if sizes is None:
            raise UserError(f"batch: image_grid_thw of {name} is missing; Qwen2.5-VL's processor returns it")
        return [grid_of(config, image_grid_thw=(t, h, w)) for t, h, w in torch.as_tensor(sizes).tolist()]
    if size_key == "feature_attention_mask":
        frames = [features.shape[-1]] * len(features) if sizes is None else sizes.sum(-1).tolist()
        return [grid_of(config, num_mel_frames=int(count)) for count in frames]
    if sizes is None:
        return [grid_of(config, image_size=(features.shape[-2], features.shape[-1]))] * len(features)
    return [grid_of(config, image_size=(height, width)) for height, width in torch.as_tensor(sizes).tolist()]


def _segment(encoder: "ModalityModule", grid: tuple[int, ...], item: Mapping[str, Tensor]) -> Segment:
    """The item's entry in the encoder's layout. A `preprocess_callback` may cut it into equal tiles (AnyRes)."""
    key, config, num_tiles = _feature_key(encoder), encoder.module.config, 1
    if encoder.preprocess_callback is not None:
        with torch.no_grad():
            tiles = encoder.preprocess_callback(dict(item))[key]
        num_tiles = max(1, len(tiles) // len(item[key]))
        if SIZE_KEY.get(config.model_type) is None and tiles.dim() == 4:
            grid = grid_of(config, image_size=(tiles.shape[-2], tiles.shape[-1]))
    return encoder_segment(config, item=0, grid=grid, feature_select=encoder.feature_select, num_tiles=num_tiles)


def described(value: Any) -> str:
    return f"a tensor {list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"of {type(value)}"
