"""A dict of tensors, as HuggingFace processors return it, as a `motet.models.stages.stage.Batch`.

Keys (B samples; n items, that is images or clips, of one encoder, in the order of the samples):

* `input_ids` [B, T]; `attention_mask` [B, T] (0 = padding, on either side); `labels` [B, T] (-100 = no loss);
* what encoders read: `pixel_values` [n, C, H, W] (Qwen2.5-VL: [sum of patches, d]), `input_features` [n, mel, frames];
* what tells an item's size: `image_grid_thw` [n, 3] (Qwen2.5-VL), `image_sizes` [n, 2] in pixels (Pixtral),
  `feature_attention_mask` [n, frames] (audio); without the latter two, items have no padding;
* `num_<encoder>_items` [B]: how many items each sample has; `num_<encoder>_outputs` [n]: tokens that each item becomes,
  where callbacks or a projector of the user's own change their number.

What encoders read stands either in the batch itself or, where two encoders read the same key, in a dict of their own
under the encoder's name: `batch["vision"] = {"pixel_values": ...}`. Further tensors [n, ...] there are for its
callbacks.

Placeholders tell which items are a sample's: each sample takes the next items until its placeholders are filled. An
item's placeholders may stand apart (Pixtral's rows). Otherwise `num_<encoder>_items` tells; without it, all samples
have equally many. Prepended items stand before the sample's own tokens, encoder after encoder.

A `preprocess_callback` is called once more for each item, to learn how many tiles it makes of it.
"""

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
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from motet.assignment.sample import IGNORED_LABEL, Sample
from motet.models.stages.projector import PROJECTORS
from motet.plan import LANGUAGE_MODEL

if TYPE_CHECKING:
    from motet.models.multimodal import ModalityModule, MultimodalModule


# The encoders' tensors in a dict of tensors, as images and clips: see `motet.models.dict_batch`.


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


@dataclass(frozen=True)
class DictBatch:
    """Implements `motet.models.stages.stage.Batch`."""

    samples: tuple[Sample, ...]
    tensors: Mapping[str, Sequence[Mapping[str, Tensor]]]
    """By module, for each sample."""

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        return dict(self.tensors[module][sample])


def batch_from_dict(model: "MultimodalModule", batch: Mapping[str, Any]) -> DictBatch:
    """Reads only configurations, callbacks and settings of `model`, none of its weights.

    Raises `ValueError` naming the key that is missing, unknown or does not fit the others.
    """
    encoders = model.modality_modules(encoders_only=True)
    texts = texts_of(batch)
    items = {
        name: read_items(name, encoders[name], tensors, batch.get(f"num_{name}_outputs"))
        for name, tensors in tensors_of_encoders(batch, encoders).items()
    }
    owned: dict[str, list[range]] = {}
    for name, encoder in encoders.items():
        counts = _given_counts(name, len(items[name].segments), len(texts), batch)
        if model.merge == "placeholder":
            placeholders = _count_placeholders(model, name, texts, items[name])
            items[name] = _with_outputs_from_placeholders(name, encoder, items[name], placeholders, counts, batch)
            owned[name] = _items_by_placeholders(name, items[name], placeholders, batch)
        else:
            owned[name] = _items_by_counts(name, counts, len(items[name].segments))
    samples, language_model = [], []
    for index, text in enumerate(texts):
        own = {
            name: tuple(replace(items[name].segments[i], item=k) for k, i in enumerate(owned[name][index]))
            for name in encoders
        }
        text, layout = _lay_out(model, text, own)
        num_loss_tokens = int((text["labels"][1:] != IGNORED_LABEL).sum())
        layouts = {LANGUAGE_MODEL: layout, **{name: segments for name, segments in own.items() if segments}}
        samples.append(Sample(str(index), layouts, {LANGUAGE_MODEL: num_loss_tokens}))
        language_model.append(_in_vocabulary(model, index, text))
    tensors = {name: [items[name].features_of(indices) for indices in owned[name]] for name in encoders}
    return DictBatch(tuple(samples), {**tensors, LANGUAGE_MODEL: language_model})


# Text -----------------------------------------------------------------------------------------------------------------


def texts_of(batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """`input_ids` and `labels` of each sample, without padding."""
    if "input_ids" not in batch:
        raise UserError("batch: input_ids is missing; give token ids [samples, tokens]")
    ids = batch["input_ids"]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        raise UserError(f"batch: input_ids is {described(ids)}; give a tensor of token ids [samples, tokens]")
    for key in TEXT_KEYS[1:]:
        given = batch.get(key)
        if given is not None and (not isinstance(given, Tensor) or given.shape != ids.shape):
            raise UserError(f"batch: {key} is {described(given)}; give the shape of input_ids, {list(ids.shape)}")
    labels = batch.get("labels")
    if labels is None:
        labels = torch.full_like(ids, IGNORED_LABEL)
    mask = batch.get("attention_mask")
    present = [slice(0, ids.shape[1])] * len(ids) if mask is None else columns_of(mask)
    return [{"input_ids": ids[i, own], "labels": labels[i, own]} for i, own in enumerate(present)]


def columns_of(mask: Tensor) -> list[slice]:
    """Of each sample, the columns in which it stands. Raises `UserError` for one that is all padding, or has a gap."""
    columns = []
    for index, row in enumerate(mask.tolist()):
        if not any(row):
            raise UserError(f"batch: sample {index} is all padding; leave it out")
        first, last = row.index(1), len(row) - row[::-1].index(1)
        if not all(row[first:last]):
            raise UserError(
                f"batch: attention_mask of sample {index} has a gap in columns {first} to {last - 1}; padding stands "
                "on the left or on the right"
            )
        columns.append(slice(first, last))
    return columns


def _in_vocabulary(model: "MultimodalModule", index: int, text: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ids that can be looked up. A placeholder need not be in the vocabulary: what is looked up there is replaced."""
    ids = text["input_ids"]
    outside = (ids < 0) | (ids >= model.num_embeddings)
    if not outside.any():
        return text
    unknown = set(ids[outside].tolist()) - set(model.placeholder_token_ids.values())
    if unknown:
        raise UserError(
            f"batch: input_ids of sample {index} has {min(unknown)}, but the language model has the ids 0 to "
            f"{model.num_embeddings - 1}"
        )
    if model.preprocess_callback is not None:
        raise UserError(
            f"placeholder_token_ids: {int(ids[outside][0])} is outside the language model's {model.num_embeddings} "
            "embeddings, where preprocess_callback could not see it; resize them"
        )
    return {**text, "input_ids": ids.masked_fill(outside, 0)}


# Which items are a sample's -------------------------------------------------------------------------------------------


def _given_counts(name: str, num_items: int, num_samples: int, batch: Mapping[str, Any]) -> list[int] | None:
    """Items of each sample by `num_<name>_items`; without it equally many, or None if they cannot be."""
    given = batch.get(f"num_{name}_items")
    if given is None:
        return None if num_items % num_samples else [num_items // num_samples] * num_samples
    counts = [int(count) for count in given]
    if len(counts) != num_samples or sum(counts) != num_items:
        raise UserError(
            f"batch: num_{name}_items is {counts}; give the number of items of each of {num_samples} samples, "
            f"{num_items} in all"
        )
    return counts


def _items_by_counts(name: str, counts: Sequence[int] | None, num_items: int) -> list[range]:
    if counts is None:
        raise UserError(f"batch: the samples cannot have equally many of {num_items} items; give num_{name}_items")
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def _count_placeholders(
    model: "MultimodalModule", name: str, texts: Sequence[Mapping[str, Tensor]], items: Items
) -> list[int]:
    """Of each sample."""
    if name not in model.placeholder_token_ids:
        if items.segments:
            raise UserError(
                f"placeholder_token_ids: {name} is missing; give the id of the token in whose places its outputs stand"
            )
        return [0] * len(texts)
    token = model.placeholder_token_ids[name]
    return [int((text["input_ids"] == token).sum()) for text in texts]


def _with_outputs_from_placeholders(
    name: str,
    encoder: "ModalityModule",
    items: Items,
    placeholders: Sequence[int],
    counts: Sequence[int] | None,
    batch: Mapping[str, Any],
) -> Items:
    """Where the user's own code may change how many tokens an item becomes, and does, its placeholders say it."""
    callbacks = (encoder.postprocess_module_callback, encoder.postprocess_projector_callback)
    is_known = all(c is None for c in callbacks) and type(encoder.projector) in (type(None), *PROJECTORS.values())
    if is_known or f"num_{name}_outputs" in batch or not items.segments or _fits(items, placeholders):
        return items
    if counts is None or any(
        num_tokens % count if count else num_tokens for num_tokens, count in zip(placeholders, counts, strict=True)
    ):
        raise UserError(f"batch: the placeholders of {name} do not tell its items apart; give num_{name}_outputs")
    num_outputs = [n // count for n, count in zip(placeholders, counts, strict=True) for _ in range(count)]
    return replace(
        items,
        segments=tuple(replace(s, num_outputs=n) for s, n in zip(items.segments, num_outputs, strict=True)),
    )


def _fits(items: Items, placeholders: Sequence[int]) -> bool:
    """Whether every sample's placeholders are as many as some next items' outputs, and no item is left."""
    bounds = {0, *accumulate(segment.outputs for segment in items.segments)}
    return set(accumulate(placeholders)) <= bounds and sum(placeholders) == max(bounds)


def _items_by_placeholders(
    name: str, items: Items, placeholders: Sequence[int], batch: Mapping[str, Any]
) -> list[range]:
    """For each sample the indices of its items; its placeholders must be as many as its items' outputs."""
    ranges: list[range] = []
    first = 0
    for index, wanted in enumerate(placeholders):
        last, filled = first, 0
        while filled < wanted and last < len(items.segments):
            filled += items.segments[last].outputs
            last += 1
        if filled != wanted:
            raise UserError(
                f"batch: sample {index} has {wanted} placeholders of {name}, but its {last - first} items make "
                f"{filled} tokens"
            )
        ranges.append(range(first, last))
        first = last
    if first != len(items.segments):
        raise UserError(f"batch: there are {len(items.segments)} items of {name}, but placeholders for only {first}")
    given = batch.get(f"num_{name}_items")
    if given is not None and [int(count) for count in given] != [len(own) for own in ranges]:
        raise UserError(
            f"batch: num_{name}_items is {[int(count) for count in given]}, but by the placeholders it is "
            f"{[len(own) for own in ranges]}"
        )
    return ranges


# Layouts --------------------------------------------------------------------------------------------------------------


def _lay_out(
    model: "MultimodalModule", text: dict[str, Tensor], own: Mapping[str, tuple[Segment, ...]]
) -> tuple[dict[str, Tensor], tuple[Segment, ...]]:
    """A sample's token ids and labels, and its layout in the language model."""
    ids, labels = text["input_ids"], text["labels"]
    if model.merge == "placeholder":
        return text, _layout_by_placeholders(model, ids, own)
    if model.merge == "cross_attention":
        return text, (Segment(len(ids)),)
    before = [Segment(segment.outputs, source=name, item=segment.item) for name in own for segment in own[name]]
    num_before = sum(segment.num_tokens for segment in before)
    prepended = {
        "input_ids": torch.cat([ids.new_zeros(num_before), ids]),
        "labels": torch.cat([labels.new_full((num_before,), IGNORED_LABEL), labels]),
    }
    return prepended, (*before, Segment(len(ids)))


def _layout_by_placeholders(
    model: "MultimodalModule", ids: Tensor, own: Mapping[str, tuple[Segment, ...]]
) -> tuple[Segment, ...]:
    """Runs of the sample's own tokens and of one item's outputs."""
    encoder_of = {token: name for name, token in model.placeholder_token_ids.items()}
    waiting = {name: iter([s.item for s in segments for _ in range(s.outputs)]) for name, segments in own.items()}
    owners: list[tuple[str | None, int]] = []
    for token in ids.tolist():
        name = encoder_of.get(token)
        owners.append((None, 0) if name is None else (name, next(waiting[name])))
    return tuple(Segment(len(list(run)), source=name, item=item) for (name, item), run in groupby(owners))
