"""The plain forward of a whole multimodal model, as its user would write it with transformers: what `motet verify`
compares with. Sample by sample, without padding or packing.

It reads token ids and labels, not the layouts of the language model: encoder outputs go where placeholder ids stand.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from motet.assignment.sample import IGNORED_LABEL, Sample, Segment
from motet.attention.masks.custom_masks import OwnRule, mask_of_documents, rule_named
from motet.attention.masks.token_layout import Document
from motet.models.batch import Batch
from motet.models.reference.encoder import plain_encoder_output


def plain_loss(
    encoders: Mapping[str, Any],
    language_model: Any,
    batch: Batch,
    *,
    merge: str,
    placeholder_token_ids: Mapping[str, int],
    media_attention: str = "causal",
    language_model_name: str = "language_model",
) -> Tensor:
    """Mean loss over all tokens of the batch that have a label and a token before them, with its graph.

    Args:
        encoders: by name: has `module`, `projector` and the callbacks (or None).
        language_model: a plain `...ForCausalLM`.
        merge: "placeholder", "prepend" or "cross_attention".
        placeholder_token_ids: by encoder, for "placeholder".
        media_attention: as in a run file, but not "family", or a registered mask's name; anything but "causal" is given
            to the model as a matrix.
    """
    total: Any = 0.0
    num_tokens = 0
    for i, sample in enumerate(batch.samples):
        features = batch.features(language_model_name, i)
        ids, labels = features["input_ids"], features["labels"]
        tokens = {
            name: plain_encoder_output(encoder, batch.features(name, i), sample.layouts[name])
            for name, encoder in encoders.items()
            if sample.layouts.get(name)
        }
        embeddings, extra = _merged(
            language_model.get_input_embeddings()(ids), ids, tokens, merge, placeholder_token_ids
        )
        if media_attention != "causal":
            items = _items_of_tokens(sample, ids, merge, placeholder_token_ids)
            segments = tuple(sample.layouts[language_model_name])
            extra["attention_mask"] = _attention_masks(language_model.config, items, media_attention, segments)
        logits = language_model(inputs_embeds=embeddings[None], use_cache=False, **extra).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        total = total + cross_entropy(wide[:-1], labels[1:], ignore_index=IGNORED_LABEL, reduction="sum")
        num_tokens += int((labels[1:] != IGNORED_LABEL).sum())
    return total / num_tokens


def _merged(
    embeddings: Tensor, ids: Tensor, tokens: Mapping[str, Tensor], merge: str, placeholder_token_ids: Mapping[str, int]
) -> tuple[Tensor, dict[str, Any]]:
    """What the language model reads of a sample: [T, H], and further arguments. `tokens`: each encoder's outputs."""
    if merge == "placeholder":
        for name, outputs in tokens.items():
            here = (ids == placeholder_token_ids[name]).nonzero().squeeze(-1)
            embeddings = embeddings.index_put((here,), outputs.to(embeddings.dtype))
        return embeddings, {}
    if not tokens:
        return embeddings, {}
    media = torch.cat(list(tokens.values()))
    if merge == "prepend":
        return torch.cat([media.to(embeddings.dtype), embeddings[len(media) :]]), {}
    # Without a mask, transformers' attention would take the keys for a causal sequence.
    everything = media.new_zeros(1, 1, len(ids), len(media))
    return embeddings, {"cross_attention_states": media[None], "cross_attention_mask": everything}


def _items_of_tokens(
    sample: Sample, ids: Tensor, merge: str, placeholder_token_ids: Mapping[str, int]
) -> list[tuple[str, int] | None]:
    """Of each token: the encoder and item whose output stands there; None: it is text."""
    items: list[tuple[str, int] | None] = [None] * len(ids)
    front = 0
    for name in placeholder_token_ids:
        outputs = [(name, segment.item) for segment in sample.layouts.get(name, ()) for _ in range(segment.outputs)]
        if merge == "placeholder":
            places = (ids == placeholder_token_ids[name]).nonzero().squeeze(-1).tolist()
        else:
            places = list(range(front, front + len(outputs)))
            front += len(outputs)
        for place, item in zip(places, outputs, strict=True):
            items[place] = item
    return items


def _attention_masks(
    config: Any, items: list[tuple[str, int] | None], media_attention: str, segments: tuple[Segment, ...]
) -> Any:
    """What transformers takes: whether it sees, [1, 1, T, T]; by kind of layer where the model has several.

    A sliding window cuts what a text token and a token of `block_causal` or `prefix` media sees, as in transformers'
    Gemma3."""
    place = torch.arange(len(items))
    same_item = torch.tensor([[item is not None and other == item for other in items] for item in items])
    same_modality = torch.tensor([[bool(item and other and other[0] == item[0]) for other in items] for item in items])
    is_media = torch.tensor([item is not None for item in items])[:, None]
    last_media = max((place for place, item in enumerate(items) if item is not None), default=-1)

    def matrix(window: int | None) -> Tensor:
        rule = rule_named(media_attention, window)
        if isinstance(rule, OwnRule):
            return torch.from_numpy(mask_of_documents((Document(segments),), rule).dense())[None, None]
        sees = place[None] <= place[:, None]
        if media_attention == "block_causal":
            sees = sees | same_item
        if media_attention == "prefix":
            sees = sees | ((place[None] <= last_media) & (place[:, None] <= last_media))
        if window is not None:
            sees = sees & (place[:, None] - place[None] < window)
        if media_attention in ("own_item", "own_modality"):
            sees = torch.where(is_media, same_item if media_attention == "own_item" else same_modality, sees)
        return sees[None, None]

    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None):
        return {"full_attention": matrix(None), "sliding_attention": matrix(window)}
    return matrix(window)
