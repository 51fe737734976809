"""A dict of tensors, as HuggingFace processors return it, as the batch of a contrastive model.

Keys (B samples): `pixel_values` [B, C, H, W], `input_features` [B, mel, frames],
`input_ids` [B, T] with or without `attention_mask` [B, T]. Where two towers read the same key, each has a dict of its
own under its name: `batch["left"] = {"pixel_values": ...}`. Audio may come with `feature_attention_mask` [B, frames].
A key that nothing reads is refused.

Where some samples have no item for a tower, `batch["present"][tower]` [B] says which do; what stands in the places of
the others is not looked at. A sample is compared in the pairs of towers of which it has both.

A mask does what it does in transformers: with it padding is attended to by nothing, a caption decoder included, on the
right or (not for BERT) on the left. Without one CLIP's and SigLIP's texts stay as they are, padding included, as their
processors return them.

A caption decoder has a dict of its own, `batch["decoder"]`: `input_ids` [B, T], and either `labels` [B, T] as
transformers takes them (-100: no loss) or none, if all tokens are to be predicted; `attention_mask` [B, T] (0 =
padding, all of it where a sample has no caption). A sample without an item for the tower that the decoder reads has no
caption.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from motet.assignment.sample import IGNORED_LABEL, Sample, Segment
from motet.errors import UserError
from motet.families.encoders import family_of
from motet.families.token_counts import LEGACY_END, encoder_segment, grid_of, reads_text
from motet.models.dict_batch import DictBatch, columns_of, described, texts_of
from motet.plan import CONTRASTIVE, DECODER
from motet.schedule.batch_sync import num_comparisons

if TYPE_CHECKING:
    from motet.models.contrastive import ContrastiveModule


def batch_of_towers(model: "ContrastiveModule", batch: Mapping[str, Any]) -> DictBatch:
    """Reads only configurations of `model`. Raises `UserError` naming the key that is missing or does not fit."""
    towers = model.modality_modules()
    keys = {name: family_of(tower.module).feature for name, tower in towers.items()}
    for name in batch.get("present", {}):
        if name not in towers:
            raise UserError(f"batch: present[{name!r}] is of no tower; the model has {', '.join(towers)}")
    segments: dict[str, list[Segment | None]] = {}
    tensors: dict[str, list[dict[str, Tensor]]] = {}
    read = {"present", "return_loss", *([DECODER] if model.reads else [])}
    for name, tower in towers.items():
        given = batch.get(name, batch)
        if given is batch and list(keys.values()).count(keys[name]) > 1:
            raise UserError(f"batch: several towers read {keys[name]}; give each a dict of its own under its name")
        present = batch.get("present", {}).get(name)
        read |= _keys_of(tower.module.config, keys[name]) if given is batch else {name}
        if given is not batch:
            _check_keys(given, _keys_of(tower.module.config, keys[name]), f"batch[{name!r}]")
        segments[name], tensors[name] = _items(
            name, tower.module.config, keys[name], given, present, is_read=name == model.reads
        )
    _check_keys(batch, read, "batch")
    sizes = {name: len(own) for name, own in segments.items()}
    if len(set(sizes.values())) > 1 or not all(sizes.values()):
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(f"batch: the towers have different numbers of samples ({listed}); give each sample to all")
    if model.reads:
        segments[model.reads] = [s and replace(s, num_outputs=1 + s.num_tokens) for s in segments[model.reads]]
        tensors[DECODER] = _captions(batch, segments[model.reads])
    samples = []
    for i in range(next(iter(sizes.values()))):
        layouts = {name: (segment,) for name, own in segments.items() if (segment := own[i]) is not None}
        num_loss_tokens = {CONTRASTIVE: num_comparisons(model.pairs, layouts)}
        caption = tensors[DECODER][i] if model.reads else {}
        if caption:
            layouts[DECODER] = (Segment(len(caption["input_ids"])),)
            num_loss_tokens[DECODER] = int((caption["labels"][1:] != IGNORED_LABEL).sum())
        samples.append(Sample(str(i), layouts, num_loss_tokens))
    return DictBatch(tuple(samples), tensors)


def _keys_of(config: Any, feature: str) -> set[str]:
    """What a tower reads."""
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
    """Of each sample, `input_ids` and `labels`, without padding; empty where there is no caption, or nothing to see."""
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
    captions = zip(texts_of(text), written.tolist(), seen, strict=True)
    return [caption if is_written and segment is not None else {} for caption, is_written, segment in captions]


def _items(
    name: str, config: Any, key: str, given: Mapping[str, Any], present: Any, *, is_read: bool
) -> tuple[list[Segment | None], list[dict[str, Tensor]]]:
    """Of each sample; None and empty for those that have no item. `is_read`: by a caption decoder."""
    features = given.get(key)
    if not isinstance(features, Tensor) or features.dim() < 2:
        raise UserError(f"batch: {key} of tower {name} is missing or no tensor of all samples")
    if not len(features):
        raise UserError(f"batch: {key} of tower {name} has no samples; give at least two")
    if present is not None and (not isinstance(present, Tensor) or present.shape != features.shape[:1]):
        raise UserError(f"batch: present[{name!r}] is no tensor of {len(features)} truth values; give one a sample")
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
            grid = _text_grid(config, feature[0], attended, is_read=is_read)
        elif key == "input_features":
            mask = given.get("feature_attention_mask")
            grid = grid_of(config, num_mel_frames=feature.shape[-1] if mask is None else int(mask[i].sum()))
        else:
            grid = grid_of(config, image_size=(feature.shape[-2], feature.shape[-1]))
        segment = encoder_segment(config, item=0, grid=grid)
        segments.append(Segment(segment.num_tokens, num_outputs=1, grid=segment.grid))
        tensors.append({key: feature})
    return segments, tensors


def _attended(config: Any, given: Mapping[str, Any], ids: Tensor, present: Tensor | None) -> list[slice]:
    """Of each sample, the tokens that are attended to: all without a mask."""
    kinds = given.get("token_type_ids")
    if config.model_type == "bert" and isinstance(kinds, Tensor) and kinds.any():
        raise UserError("batch: token_type_ids are not all 0; a tower's texts are of one kind, leave them out")
    mask = given.get("attention_mask")
    if mask is None:
        return [slice(0, ids.shape[1])] * len(ids)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise UserError(f"batch: attention_mask is {described(mask)}; give the shape of input_ids, {list(ids.shape)}")
    mask = mask.bool()
    if present is not None:
        mask = mask | ~present.bool()[:, None]
    columns = columns_of(mask)
    for i, own in enumerate(columns):
        if config.model_type == "bert" and own.start:
            raise UserError(f"batch: attention_mask of sample {i}: BERT's padding stands on the right; pad there")
    return columns


def _text_grid(config: Any, ids: Tensor, attended: slice, *, is_read: bool) -> tuple[int, ...]:
    place = len(ids) - 1
    if config.model_type == "clip_text_model":
        ends = ids if config.eos_token_id == LEGACY_END else (ids == config.eos_token_id).int()
        place = int(ends.argmax())
        # It is causal: no token sees the padding behind it. A caption decoder would.
        hides_padding = attended.start == 0 and place < attended.stop and not is_read
        if hides_padding or attended == slice(0, len(ids)):
            return len(ids), place
    if attended == slice(0, len(ids)):
        return (len(ids),)
    return len(ids), place, attended.start, attended.stop
