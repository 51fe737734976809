"""Reads a dict of tensors, as HuggingFace processors return it, as a `motet.models.stages.stage.Batch`.

A multimodal model (`batch_from_dict`) takes these keys (B samples; n items, that is images or clips, of one encoder, in
the order of the samples):

* `input_ids` [B, T]; `attention_mask` [B, T] (0 = padding, on either side); `labels` [B, T] (-100 = no loss);
* what encoders read: `pixel_values` [n, C, H, W] (Qwen2.5-VL: [sum of patches, d]), `input_features` [n, mel, frames],
  [n, ...] under the name of an encoder of the user's own;
* what determines an item's size: `image_grid_thw` [n, 3] (Qwen2.5-VL), `image_sizes` [n, 2] in pixels (Pixtral),
  `feature_attention_mask` [n, frames] (audio); without the latter two, items have no padding;
* `num_<encoder>_items` [B]: how many items each sample has; `num_<encoder>_outputs` [n]: tokens that each item becomes,
  where callbacks or a projector of the user's own change their number.

What encoders read is either in the batch itself or, where two encoders read the same key, in a dict of their own under
the encoder's name: `batch["vision"] = {"pixel_values": ...}`. Such a dict may have further tensors [n, ...] for
callbacks.

Placeholders decide which items belong to a sample: each sample takes the next items until its placeholders are filled.
The placeholders of one item need not be adjacent (Pixtral's rows). Without placeholders, `num_<encoder>_items` decides,
or all samples have equally many. Prepended items come before the sample's own tokens, encoder after encoder. A
`preprocess_callback` is called once more for each item, to count the tiles that it makes of the item.

A contrastive model (`batch_of_towers`) takes `pixel_values` [B, C, H, W], `input_features` [B, mel, frames] with or
without `feature_attention_mask` [B, frames], and `input_ids` [B, T] with or without `attention_mask` [B, T]. Where two
towers read the same key, each has a dict of its own under its name. `batch["present"][tower]` [B] says which samples
have an item for the tower, if not all do; the entries of the others are not read. A sample is compared in the pairs of
towers of which it has both.

A mask does what it does in transformers: nothing attends to padding, neither do caption decoders. Padding may be on the
right or (not for BERT) on the left. Without a mask, the texts of CLIP and SigLIP stay as they are, padding included, as
their processors return them.

A caption decoder has a dict of its own, `batch["decoder"]`: `input_ids` [B, T]; `labels` [B, T] as transformers takes
them (-100: no loss), or none if all tokens are to be predicted; `attention_mask` [B, T] (0 = padding, everywhere in a
sample without a caption). A sample without an item for the tower that the decoder reads has no caption.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from motet.assignment.sample import IGNORED_LABEL, Sample, Segment
from motet.errors import UserError
from motet.families.encoders.encoder_families import family_of
from motet.families.encoders.own_encoders import own_config
from motet.families.encoders.token_counts import LEGACY_END, encoder_segment, grid_of, pooled, reads_text
from motet.models.graph import (
    DecoderNode,
    EncoderNode,
    LanguageModelNode,
    LossNode,
    ModalityModule,
    ModuleGraph,
    TowerNode,
)
from motet.models.stages.projector import PROJECTORS
from motet.plan import CONTRASTIVE, DECODER, LANGUAGE_MODEL
from motet.schedule.batch_sync import num_comparisons


@dataclass(frozen=True)
class DictBatch:
    """Implements `motet.models.stages.stage.Batch`."""

    samples: tuple[Sample, ...]
    tensors: Mapping[str, Sequence[Mapping[str, Tensor]]]
    """Tensors of each sample, by module."""

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        return dict(self.tensors[module][sample])


TEXT_KEYS = ("input_ids", "attention_mask", "labels")
BY_PRODUCTS = ("token_type_ids", "mm_token_type_ids")
"""Outputs of processors that are ignored because placeholders carry the same information."""
SIZE_KEY = {
    "qwen2_5_vl_vision": "image_grid_thw",
    "pixtral": "image_sizes",
    "whisper": "feature_attention_mask",
    "qwen2_audio_encoder": "feature_attention_mask",
}
"""Key of a batch with the items' sizes, by family; other families take the sizes of `pixel_values`."""
NUM_DIMS = {"pixel_values": 4, "input_features": 3}


@dataclass(frozen=True)
class Items:
    """All items of one encoder in the batch."""

    segments: tuple[Segment, ...] = ()
    """Of each item, in the encoder's layout; `item` is 0."""
    features: tuple[dict[str, Tensor], ...] = ()
    """Of each item, with a leading dimension along which those of a sample are concatenated."""

    def features_of(self, items: Sequence[int]) -> dict[str, Tensor]:
        """Returns the features of a sample with these items."""
        own = [self.features[i] for i in items]
        return {key: torch.cat([f[key] for f in own]) for key in (own[0] if own else ())}


def _feature_key(encoder: ModalityModule) -> str:
    return family_of(encoder.module).feature


def _keys_of(encoder: ModalityModule) -> tuple[str, ...]:
    """Returns the keys that an encoder reads, and the key with its items' sizes."""
    size_key = SIZE_KEY.get(encoder.config.model_type)
    return (_feature_key(encoder),) if size_key is None else (_feature_key(encoder), size_key)


def _tensors_of_encoders(
    batch: Mapping[str, Any], encoders: Mapping[str, ModalityModule]
) -> dict[str, Mapping[str, Any]]:
    """Returns the batch's tensors for each encoder."""
    found: dict[str, Mapping[str, Any]] = {}
    readers: dict[str, str] = {}
    known = {*TEXT_KEYS, *BY_PRODUCTS}
    for name, encoder in encoders.items():
        known |= {name, f"num_{name}_items", f"num_{name}_outputs"}
        if batch.get(name) is not None and not (name == _feature_key(encoder) and isinstance(batch[name], Tensor)):
            if not isinstance(batch[name], Mapping):
                raise UserError(f"batch: {name} is {_described(batch[name])}; give a dict with {_feature_key(encoder)}")
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


def _read_items(name: str, encoder: ModalityModule, tensors: Mapping[str, Any], outputs: Any) -> Items:
    """`outputs`: how many tokens each item becomes, if that was given."""
    key, config = _feature_key(encoder), encoder.config
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
            f"batch: {key} of {name} has {len(tensors[key])} rows, but {SIZE_KEY[config.model_type]} has {sum(rows)}"
        )
    if outputs is not None and len(outputs) != len(grids):
        raise UserError(
            f"batch: num_{name}_outputs has {len(outputs)} entries for {len(grids)} items; give one for each"
        )
    pieces: list[dict[str, Tensor]] = [{key: piece} for piece in tensors[key].split(rows)]
    for other in set(tensors) - set(_keys_of(encoder)):
        if not isinstance(tensors[other], Tensor) or len(tensors[other]) != len(grids):
            raise UserError(
                f"batch: {other} of {name} is {_described(tensors[other])}; give a tensor [{len(grids)}, ...]"
            )
        for piece, row in zip(pieces, tensors[other].split(1), strict=True):
            piece[other] = row
    segments = [_segment(encoder, grid, piece) for grid, piece in zip(grids, pieces, strict=True)]
    if outputs is not None:
        segments = [replace(segment, num_outputs=int(n)) for segment, n in zip(segments, outputs, strict=True)]
    return Items(tuple(segments), tuple(pieces))


def _grids(name: str, encoder: ModalityModule, tensors: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Returns the grid of every item."""
    key, config = _feature_key(encoder), encoder.config
    if own_config(encoder.module) is not None:
        if not isinstance(tensors[key], Tensor) or tensors[key].dim() < 2:
            raise UserError(f"batch: {key} of {name} is {_described(tensors[key])}; give a tensor [items, ...]")
        return [tuple(tensors[key].shape[1:])] * len(tensors[key])
    features, size_key = tensors[key], SIZE_KEY.get(config.model_type)
    num_dims = 2 if size_key == "image_grid_thw" else NUM_DIMS[key]
    if not isinstance(features, Tensor) or features.dim() != num_dims:
        raise UserError(f"batch: {key} of {name} is {_described(features)}; give a tensor of {num_dims} dimensions")
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


def _segment(encoder: ModalityModule, grid: tuple[int, ...], item: Mapping[str, Tensor]) -> Segment:
    """The item's entry in the encoder's layout. A `preprocess_callback` may cut it into equal tiles (AnyRes)."""
    key, config, num_tiles = _feature_key(encoder), encoder.config, 1
    if encoder.preprocess_callback is not None:
        with torch.no_grad():
            tiles = encoder.preprocess_callback(dict(item))[key]
        num_tiles = max(1, len(tiles) // len(item[key]))
        if SIZE_KEY.get(config.model_type) is None and tiles.dim() == 4:
            grid = grid_of(config, image_size=(tiles.shape[-2], tiles.shape[-1]))
    return encoder_segment(config, item=0, grid=grid, feature_select=encoder.feature_select, num_tiles=num_tiles)


def _described(value: Any) -> str:
    return f"a tensor {list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"of {type(value)}"


def batch_from_dict(model: ModuleGraph, batch: Mapping[str, Any]) -> DictBatch:
    """The batch of encoders and a language model. Raises `UserError` naming the key that is missing, unknown or does
    not fit the others."""
    llm = model.nodes[LANGUAGE_MODEL]
    assert isinstance(llm, LanguageModelNode)
    encoders = {name: node.module for name, node in model.nodes.items() if isinstance(node, EncoderNode)}
    texts = _texts_of(batch)
    items = {
        name: _read_items(name, encoders[name], tensors, batch.get(f"num_{name}_outputs"))
        for name, tensors in _tensors_of_encoders(batch, encoders).items()
    }
    owned: dict[str, list[range]] = {}
    for name, encoder in encoders.items():
        counts = _given_counts(name, len(items[name].segments), len(texts), batch)
        if llm.merge == "placeholder":
            placeholders = _count_placeholders(llm, name, texts, items[name])
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
        text, layout = _lay_out(llm, text, own)
        num_loss_tokens = int((text["labels"][1:] != IGNORED_LABEL).sum())
        layouts = {LANGUAGE_MODEL: layout, **{name: segments for name, segments in own.items() if segments}}
        samples.append(Sample(str(index), layouts, {LANGUAGE_MODEL: num_loss_tokens}))
        language_model.append(_in_vocabulary(llm, index, text))
    tensors = {name: [items[name].features_of(indices) for indices in owned[name]] for name in encoders}
    return DictBatch(tuple(samples), {**tensors, LANGUAGE_MODEL: language_model})


# Text -----------------------------------------------------------------------------------------------------------------


def _texts_of(batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """`input_ids` and `labels` of each sample, without padding."""
    if "input_ids" not in batch:
        raise UserError("batch: input_ids is missing; give token ids [samples, tokens]")
    ids = batch["input_ids"]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        raise UserError(f"batch: input_ids is {_described(ids)}; give a tensor of token ids [samples, tokens]")
    for key in TEXT_KEYS[1:]:
        given = batch.get(key)
        if given is not None and (not isinstance(given, Tensor) or given.shape != ids.shape):
            raise UserError(f"batch: {key} is {_described(given)}; give the shape of input_ids, {list(ids.shape)}")
    labels = batch.get("labels")
    if labels is None:
        labels = torch.full_like(ids, IGNORED_LABEL)
    mask = batch.get("attention_mask")
    present = [slice(0, ids.shape[1])] * len(ids) if mask is None else _columns_of(mask)
    return [{"input_ids": ids[i, own], "labels": labels[i, own]} for i, own in enumerate(present)]


def _columns_of(mask: Tensor) -> list[slice]:
    """Returns the columns of each sample. Raises `UserError` for one that is all padding, or has a gap."""
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


def _in_vocabulary(llm: LanguageModelNode, index: int, text: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ids that can be looked up. A placeholder need not be in the vocabulary: what is looked up there is replaced."""
    ids, labels = text["input_ids"], text["labels"]
    # A head may have fewer rows than the table of tokens (Mllama).
    num_predicted = min(llm.num_embeddings, llm.module.module.config.get_text_config().vocab_size)
    wrong = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= num_predicted))
    if wrong.any():
        raise UserError(
            f"batch: labels of sample {index} has {int(labels[wrong][0])}, but the language model predicts the ids "
            f"0 to {num_predicted - 1}; give {IGNORED_LABEL} where nothing is to be predicted"
        )
    outside = (ids < 0) | (ids >= llm.num_embeddings)
    if not outside.any():
        return text
    unknown = set(ids[outside].tolist()) - set(llm.placeholder_token_ids.values())
    if unknown:
        raise UserError(
            f"batch: input_ids of sample {index} has {min(unknown)}, but the language model has the ids 0 to "
            f"{llm.num_embeddings - 1}"
        )
    if llm.preprocess_callback is not None:
        raise UserError(
            f"placeholder_token_ids: {int(ids[outside][0])} is outside the language model's {llm.num_embeddings} "
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
    llm: LanguageModelNode, name: str, texts: Sequence[Mapping[str, Tensor]], items: Items
) -> list[int]:
    """Counts the placeholders of each sample."""
    if name not in llm.placeholder_token_ids:
        if items.segments:
            raise UserError(
                f"placeholder_token_ids: {name} is missing; give the id of the token that marks where its outputs go"
            )
        return [0] * len(texts)
    token = llm.placeholder_token_ids[name]
    return [int((text["input_ids"] == token).sum()) for text in texts]


def _with_outputs_from_placeholders(
    name: str,
    encoder: ModalityModule,
    items: Items,
    placeholders: Sequence[int],
    counts: Sequence[int] | None,
    batch: Mapping[str, Any],
) -> Items:
    """Takes numbers of outputs from the placeholders where the user's own code changes how many tokens an item
    becomes."""
    is_known = all(callback is None for callback in encoder.callbacks[1:]) and type(encoder.projector) in (
        type(None),
        *PROJECTORS.values(),
    )
    if is_known or f"num_{name}_outputs" in batch or not items.segments or _fits(items, placeholders):
        return items
    if counts is None or any(
        num_tokens % count if count else num_tokens for num_tokens, count in zip(placeholders, counts, strict=True)
    ):
        raise UserError(f"batch: the placeholders of {name} do not separate its items; give num_{name}_outputs")
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
    llm: LanguageModelNode, text: dict[str, Tensor], own: Mapping[str, tuple[Segment, ...]]
) -> tuple[dict[str, Tensor], tuple[Segment, ...]]:
    """A sample's token ids and labels, and its layout in the language model."""
    ids, labels = text["input_ids"], text["labels"]
    if llm.merge == "placeholder":
        return text, _layout_by_placeholders(llm, ids, own)
    if llm.merge == "cross_attention":
        return text, (Segment(len(ids)),)
    before = [Segment(segment.outputs, source=name, item=segment.item) for name in own for segment in own[name]]
    num_before = sum(segment.num_tokens for segment in before)
    prepended = {
        "input_ids": torch.cat([ids.new_zeros(num_before), ids]),
        "labels": torch.cat([labels.new_full((num_before,), IGNORED_LABEL), labels]),
    }
    return prepended, (*before, Segment(len(ids)))


def _layout_by_placeholders(
    llm: LanguageModelNode, ids: Tensor, own: Mapping[str, tuple[Segment, ...]]
) -> tuple[Segment, ...]:
    """Runs of the sample's own tokens and of one item's outputs."""
    encoder_of = {token: name for name, token in llm.placeholder_token_ids.items()}
    waiting = {name: iter([s.item for s in segments for _ in range(s.outputs)]) for name, segments in own.items()}
    owners: list[tuple[str | None, int]] = []
    for token in ids.tolist():
        name = encoder_of.get(token)
        owners.append((None, 0) if name is None else (name, next(waiting[name])))
    return tuple(Segment(len(list(run)), source=name, item=item) for (name, item), run in groupby(owners))


# Contrastive models ---------------------------------------------------------------------------------------------------


def batch_of_towers(model: ModuleGraph, batch: Mapping[str, Any]) -> DictBatch:
    """The batch of towers. Raises `UserError` naming the key that is missing or does not fit."""
    towers = {name: node for name, node in model.nodes.items() if isinstance(node, TowerNode)}
    loss, decoder = model.nodes[CONTRASTIVE], model.nodes.get(DECODER)
    assert isinstance(loss, LossNode)
    keys = {name: family_of(tower.module.module).feature for name, tower in towers.items()}
    for name in batch.get("present", {}):
        if name not in towers:
            raise UserError(f"batch: present[{name!r}] is not a tower; the model has {', '.join(towers)}")
    segments: dict[str, list[Segment | None]] = {}
    tensors: dict[str, list[dict[str, Tensor]]] = {}
    known = {"present", "return_loss", *([] if decoder is None else [DECODER])}
    for name, tower in towers.items():
        given = batch.get(name, batch)
        if given is batch and list(keys.values()).count(keys[name]) > 1:
            raise UserError(f"batch: several towers read {keys[name]}; give each a dict of its own under its name")
        own_keys = _keys_of_tower(tower.config, keys[name])
        known |= own_keys if given is batch else {name}
        if given is not batch:
            _check_keys(given, own_keys, f"batch[{name!r}]")
        segments[name], tensors[name] = _tower_items(tower, keys[name], given, batch.get("present", {}).get(name))
    _check_keys(batch, known, "batch")
    sizes = {name: len(own) for name, own in segments.items()}
    if len(set(sizes.values())) > 1 or not all(sizes.values()):
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(f"batch: the towers have different numbers of samples ({listed}); give each sample to all")
    if isinstance(decoder, DecoderNode):
        tensors[DECODER] = _captions(batch, segments[decoder.reads])
    samples = []
    for i in range(next(iter(sizes.values()))):
        layouts = {name: (segment,) for name, own in segments.items() if (segment := own[i]) is not None}
        num_loss_tokens = {CONTRASTIVE: num_comparisons(loss.pairs, layouts)}
        caption = tensors[DECODER][i] if DECODER in tensors else {}
        if caption:
            layouts[DECODER] = (Segment(len(caption["input_ids"])),)
            num_loss_tokens[DECODER] = int((caption["labels"][1:] != IGNORED_LABEL).sum())
        samples.append(Sample(str(i), layouts, num_loss_tokens))
    return DictBatch(tuple(samples), tensors)


def _keys_of_tower(config: Any, feature: str) -> set[str]:
    """Returns the keys that a tower reads."""
    if reads_text(config):
        return {feature, "attention_mask", *(["token_type_ids"] if config.model_type == "bert" else [])}
    return {feature, *(["feature_attention_mask"] if feature == "input_features" else [])}


def _check_keys(given: Any, known: Set[str], where: str) -> None:
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: is a {type(given).__name__}; give a dict of tensors")
    for key in given:
        if key not in known:
            raise UserError(f"{where}: nothing reads {key!r}; leave it out, or give one of {', '.join(sorted(known))}")


def _captions(batch: Mapping[str, Any], seen: Sequence[Segment | None]) -> list[dict[str, Tensor]]:
    """Returns `input_ids` and `labels` of each sample, without padding; empty without a caption, or without an item."""
    given = batch.get(DECODER)
    if not isinstance(given, Mapping) or "input_ids" not in given:
        raise UserError(f"batch: {DECODER} is missing; give it a dict with the captions' input_ids")
    _check_keys(given, {"input_ids", "labels", "attention_mask"}, f"batch[{DECODER!r}]")
    mask = given.get("attention_mask")
    written = torch.ones(len(given["input_ids"]), dtype=torch.bool) if mask is None else mask.any(1)
    text = {"labels": given["input_ids"], **given}
    if mask is not None:
        text["attention_mask"] = mask.masked_fill(~written[:, None], 1)
    if len(written) != len(seen):
        raise UserError(f"batch: {DECODER} has {len(written)} captions for {len(seen)} samples; give each sample one")
    captions = zip(_texts_of(text), written.tolist(), seen, strict=True)
    return [caption if is_written and segment is not None else {} for caption, is_written, segment in captions]


def _tower_items(
    tower: TowerNode, key: str, given: Mapping[str, Any], present: Any
) -> tuple[list[Segment | None], list[dict[str, Tensor]]]:
    """Returns each sample's item and features; None and empty for samples without an item."""
    name, config = tower.name, tower.config
    features = given.get(key)
    if not isinstance(features, Tensor) or features.dim() < 2:
        raise UserError(f"batch: {key} of tower {name} is missing, or is not a tensor [samples, ...]")
    if not len(features):
        raise UserError(f"batch: {key} of tower {name} has no samples; give at least two")
    if present is not None and (not isinstance(present, Tensor) or present.shape != features.shape[:1]):
        raise UserError(
            f"batch: present[{name!r}] must be a boolean tensor with one value for each of {len(features)} samples"
        )
    columns = _attended(config, given, features, present) if reads_text(config) else []
    segments: list[Segment | None] = []
    tensors: list[dict[str, Tensor]] = []
    for i, feature in enumerate(features.split(1)):
        if present is not None and not present[i]:
            segments.append(None)
            tensors.append({})
            continue
        if reads_text(config):
            attended = columns[i]
            if config.model_type == "bert":
                feature = feature[:, attended]
                attended = slice(0, feature.shape[1])
            grid = _text_grid(tower, feature[0], attended)
        elif key == "input_features":
            mask = given.get("feature_attention_mask")
            grid = grid_of(config, num_mel_frames=feature.shape[-1] if mask is None else int(mask[i].sum()))
        else:
            grid = grid_of(config, image_size=(feature.shape[-2], feature.shape[-1]))
        segments.append(pooled(encoder_segment(config, item=0, grid=grid), tower.module.pooling))
        tensors.append({key: feature})
    return segments, tensors


def _attended(config: Any, given: Mapping[str, Any], ids: Tensor, present: Tensor | None) -> list[slice]:
    """Returns the attended tokens of each sample: all if there is no mask."""
    kinds = given.get("token_type_ids")
    if config.model_type == "bert" and isinstance(kinds, Tensor) and kinds.any():
        raise UserError("batch: token_type_ids are not all 0; a tower's texts are of one kind, leave them out")
    mask = given.get("attention_mask")
    if mask is None:
        return [slice(0, ids.shape[1])] * len(ids)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise UserError(f"batch: attention_mask is {_described(mask)}; give the shape of input_ids, {list(ids.shape)}")
    mask = mask.bool()
    if present is not None:
        mask = mask | ~present.bool()[:, None]
    columns = _columns_of(mask)
    for i, own in enumerate(columns):
        if config.model_type == "bert" and own.start:
            raise UserError(f"batch: attention_mask of sample {i}: BERT's padding stands on the right; pad there")
    return columns


def _text_grid(tower: TowerNode, ids: Tensor, attended: slice) -> tuple[int, ...]:
    config, place = tower.config, len(ids) - 1
    if config.model_type == "clip_text_model":
        ends = ids if config.eos_token_id == LEGACY_END else (ids == config.eos_token_id).int()
        place = int(ends.argmax())
        # It is causal: no token sees the padding behind it. A caption decoder would.
        hides_padding = attended.start == 0 and place < attended.stop and tower.module.pooling == "alone"
        if hides_padding or attended == slice(0, len(ids)):
            return len(ids), place
    if attended == slice(0, len(ids)):
        return (len(ids),)
    return len(ids), place, attended.start, attended.stop
