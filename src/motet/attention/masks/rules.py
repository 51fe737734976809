"""Rules of attention: from a token layout to an interval mask.

The rule says how tokens of a document see one another; documents never do. What the kinds of masks are called:

| kind | rule | from |
|---|---|---|
| causal | `AttentionRule()` | most language models, media tokens included |
| sliding window; Lambda (sink and window) | `window=`, `sink=` | Mistral; StreamingLLM, DCP |
| prefix-LM | `media="prefix"`; of any length: `Document.prefix` | PaliGemma; Cornstarch's "encoder outputs prepended" |
| chunked | `chunk=` | Llama 4 |
| media see only themselves | `media="own_item"` | Cornstarch's "encoder outputs embedded" |
| one bit for a whole modality | `media="own_modality"` | what a bitfield with a bit per modality says |
| causal, media runs see themselves whole | `media="block_causal"` | Gemma3; video, frame by frame |
| shared question, several answers | `Document.answers` | reward models, DPO; DCP |
| full | `text="full"` | encoders |
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from motet.assignment.sample import Segment
from motet.attention.masks.interval_mask import (
    MAX_CLASSES,
    Bool,
    Int16,
    Int32,
    IntervalMask,
    interval_mask,
    side_by_side,
)
from motet.attention.masks.token_layout import PADDING, TEXT, Document, TokenLayout, layout_of_documents
from motet.errors import UserError

MediaAttention = Literal["causal", "own_item", "own_modality", "block_causal", "prefix"]

MEDIA_ATTENTION: dict[str, MediaAttention] = {"gemma3_text": "block_causal"}
"""Media attention by `model_type` of the language model, where media tokens are not simply causal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """Rule by which the tokens of one document see one another."""

    text: Literal["causal", "full"] = "causal"
    """Whether a text token sees what stands before it and itself, or its whole document."""
    media: MediaAttention = "causal"
    """A media token sees: what a text token would; its own item only; all of its modality in the document; what a text
    token would and its own run (image, frame) whole; or, as all tokens before it do, everything up to the document's
    last media token."""
    window: int | None = None
    """So many last tokens are seen, the token itself included. With "block_causal" and "prefix" it cuts what stands
    before, in the token's own run too (as transformers' Gemma3 does); with "own_item" and "own_modality" it is for
    text only."""
    sink: int = 0
    """So many first tokens of the document are seen beside the window."""
    chunk: int | None = None
    """Documents are cut into chunks of so many tokens, and nothing is seen of earlier chunks (Llama 4)."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UserError(f"window must be at least 1 token, not {self.window}")
        if self.sink < 0 or (self.sink and self.window is None):
            raise UserError(f"sink is {self.sink}; it must be positive and needs a window")
        if self.chunk is not None and (self.chunk < 1 or self.window or self.text == "full" or self.media != "causal"):
            raise UserError(
                f"chunk is {self.chunk}; it must be at least 1 token, and needs causal attention without a window"
            )
        if self.text == "full" and (self.media != "causal" or self.window is not None):
            raise UserError(
                'text="full" lets all tokens see all; it cannot be combined with a window or a rule for media'
            )


def rule_of_family(model_type: str, *, sliding_window: int | None = None) -> AttentionRule:
    """Rule of a language model's layer; `sliding_window` where the layer has one."""
    return AttentionRule(media=MEDIA_ATTENTION.get(model_type, "causal"), window=sliding_window)


def mask_of(layout: TokenLayout, rule: AttentionRule) -> IntervalMask:
    """Interval mask of the layout under the rule.

    A token sees all keys from its run's floor, or where its window begins, up to itself or its run's ceiling, whichever
    is later. A second interval is for the sink, or for the question that answers share.

    Raises `UserError` where more than two intervals or more than 64 classes would be needed."""
    answers = layout.answer_start >= 0
    reaches_back = rule.window is None and rule.chunk is None
    if answers.any() and (not reaches_back or rule.text == "full" or rule.media in ("own_modality", "prefix")):
        raise UserError(
            "answers that share a question cannot be combined with window, chunk, full, own_modality or prefix"
        )
    lengths = layout.stop - layout.start

    def of_tokens(of_runs: NDArray) -> NDArray:
        return np.repeat(of_runs, lengths)

    position = np.arange(layout.num_tokens, dtype=np.int32)
    floor, ceiling = _extents(layout, rule)
    lo, hi = of_tokens(floor), np.maximum(position + 1, of_tokens(ceiling))
    windowed = ~(layout.is_media & (rule.media in ("own_item", "own_modality")))
    second = None
    if rule.chunk is not None:
        start = of_tokens(layout.document_start)
        lo = np.maximum(lo, start + (position - start) // rule.chunk * rule.chunk)
    if rule.window is not None:
        reach = np.where(windowed, rule.window, layout.num_tokens).astype(np.int32)
        lo = np.maximum(lo, position + 1 - of_tokens(reach))
        if rule.sink:
            sink_stop = np.minimum(layout.document_start + rule.sink, layout.document_stop)
            second_stop = of_tokens(np.where(windowed, sink_stop, 0))
            second = (of_tokens(layout.document_start), np.minimum(second_stop, position + 1))
    elif answers.any():
        start, stop = layout.document_start, np.where(answers & windowed, layout.shared_stop, 0)
        if rule.media == "own_item" and layout.is_media.any():
            parts = _item_parts(layout)
            of_answers = answers & layout.is_media
            start = np.where(of_answers, parts.shared_start[parts.of_run], start)
            stop = np.where(of_answers, parts.shared_stop[parts.of_run], stop)
        second = (of_tokens(start), of_tokens(stop))
    for run in np.flatnonzero(layout.modality == PADDING):
        for ends in (lo, hi) if second is None else (lo, hi, *second):
            ends[layout.start[run] : layout.stop[run]] = 0
    classes = _classes(layout, rule)
    first, second = ((lo, hi), None) if second is None else (second, (lo, hi))  # The nearer interval is the later one.
    if classes is None:
        return interval_mask(first, second)
    return interval_mask(first, second, token_class=of_tokens(classes[0]), class_mask=classes[1])


def _extents(layout: TokenLayout, rule: AttentionRule) -> tuple[Int32, Int32]:
    """[R] each: tokens of a run see nothing before the first, but for what is shared, and at least up to the second."""
    floor = np.where(layout.answer_start >= 0, layout.answer_start, layout.document_start)
    if rule.text == "full":
        return floor, layout.document_stop
    ceiling = layout.prefix_stop
    media = layout.is_media
    if rule.media == "block_causal":
        ceiling = np.where(media, np.maximum(ceiling, layout.stop), ceiling)
    elif rule.media == "own_item":
        parts = _item_parts(layout)
        floor[media], ceiling = parts.start[parts.of_run[media]], ceiling.copy()
        ceiling[media] = parts.stop[parts.of_run[media]]
    elif rule.media == "own_modality":
        ceiling = np.where(media, layout.document_stop, ceiling)
    elif rule.media == "prefix":
        last = _last_media(layout)
        ceiling = np.where(layout.start < last, np.maximum(ceiling, last), ceiling)
    return floor, ceiling


def _last_media(layout: TokenLayout) -> Int32:
    """[R]: where the last media token of the run's document ends; 0 where it has none."""
    media = layout.is_media
    stop = np.zeros(int(layout.document.max(initial=-1)) + 1, np.int32)
    np.maximum.at(stop, layout.document[media], layout.stop[media])
    return stop[layout.document]


def _classes(layout: TokenLayout, rule: AttentionRule) -> tuple[Int16, Bool] | None:
    """Classes of runs [R] and the mask over classes; None where intervals suffice."""
    if rule.media == "own_modality":
        token_class = np.maximum(layout.modality, TEXT).astype(np.int16)
        return token_class, _text_and_closed_classes(len(layout.sources))
    if rule.media != "own_item":
        return None
    parts = _item_parts(layout)
    media = layout.is_media
    num_tokens = np.bincount(parts.of_run[media], (layout.stop - layout.start)[media], minlength=len(parts.item))
    # Something else stands within these parts of items.
    apart = np.unique(parts.item[num_tokens < parts.stop - parts.start])
    if not len(apart):
        return None
    start, stop = _item_extents(layout)
    of_item = np.zeros(len(start), np.int16)
    of_item[apart] = _distinct_where_they_overlap(start[apart], stop[apart])
    return np.where(media, of_item[layout.item], 0).astype(np.int16), _text_and_closed_classes(int(of_item.max()))


def _text_and_closed_classes(num_closed: int) -> Bool:
    """Class 0 may see all classes, each other one only itself."""
    if num_closed >= MAX_CLASSES:
        raise UserError(f"{num_closed + 1} classes of tokens would be needed to tell media apart; {MAX_CLASSES} fit")
    class_mask = np.eye(num_closed + 1, dtype=bool)
    class_mask[0] = True
    return class_mask


def _distinct_where_they_overlap(start: Int32, stop: Int32) -> list[int]:
    """Numbers from 1, as few as possible, such that intervals that overlap have different ones."""
    numbers = [0] * len(start)
    taken: list[tuple[int, int]] = []  # A heap of (stop, number).
    free: list[int] = []
    for index in np.argsort(start, kind="stable").tolist():
        while taken and taken[0][0] <= start[index]:
            heapq.heappush(free, heapq.heappop(taken)[1])
        numbers[index] = heapq.heappop(free) if free else len(taken) + 1
        heapq.heappush(taken, (int(stop[index]), numbers[index]))
    return numbers


def _item_extents(layout: TokenLayout) -> tuple[Int32, Int32]:
    """[number of items] each: where the item's first run begins and its last one ends."""
    media = layout.is_media
    count = int(layout.item.max(initial=-1)) + 1
    start, stop = np.full(count, np.iinfo(np.int32).max, np.int32), np.zeros(count, np.int32)
    np.minimum.at(start, layout.item[media], layout.start[media])
    np.maximum.at(stop, layout.item[media], layout.stop[media])
    return start, stop


@dataclass(frozen=True)
class _Parts:
    """Parts of items: what of each stands before the answers, and in each of them, which do not see one another."""

    of_run: Int32
    """[R]: the part; 0 for text."""
    item: Int32
    """[P], as are the others: the item that it is of."""
    start: Int32
    stop: Int32
    shared_start: Int32
    """Where the item's part before the answers begins and ends; both 0 if it has none."""
    shared_stop: Int32


def _item_parts(layout: TokenLayout) -> _Parts:
    media = layout.is_media
    keys = np.stack([layout.item[media], layout.answer_start[media]], axis=1)
    found, of_media = np.unique(keys, axis=0, return_inverse=True)
    of_run = np.zeros(len(layout.start), np.int32)
    of_run[media] = of_media.reshape(-1)
    start, stop = np.full(len(found), np.iinfo(np.int32).max, np.int32), np.zeros(len(found), np.int32)
    np.minimum.at(start, of_run[media], layout.start[media])
    np.maximum.at(stop, of_run[media], layout.stop[media])
    item, answer_start = found.reshape(-1, 2).T
    shared = {int(item[part]): part for part in np.flatnonzero(answer_start < 0).tolist()}
    place = [shared.get(each) for each in item.tolist()]
    shared_start = np.array([0 if part is None else start[part] for part in place], np.int32)
    shared_stop = np.array([0 if part is None else stop[part] for part in place], np.int32)
    return _Parts(of_run, item, start, stop, shared_start, shared_stop)


MaskOfSample = Callable[[tuple[Segment, ...], int | None], IntervalMask]
"""Function (segments of a sample in the language model, sliding window of the layers or None) -> mask of the sample's
tokens. Samples never see one another."""

_OWN: dict[str, MaskOfSample] = {}


@dataclass(frozen=True, slots=True)
class OwnRule:
    """Mask that a registered function makes for layers with this window."""

    name: str
    mask_of_sample: MaskOfSample
    window: int | None


Rule = AttentionRule | OwnRule


def register_mask(name: str, mask_of_sample: MaskOfSample) -> None:
    """Registers a mask function under `name`, which may then be given as media attention. Call it in every process.

    Ranks that send to the language model call the function too, to know which rank owns which tokens, so it must depend
    on its arguments alone. Plans hold the name; run files name only the kinds that motet has. Example:

        def answers_apart(segments, window):
            answers = tuple(segment.num_tokens for segment in segments[1:])
            return mask_of(layout_of_documents([Document(segments, answers=answers)]), AttentionRule())

        register_mask("answers_apart", answers_apart)
        model = MultimodalModule(encoders, language_model, media_attention="answers_apart")

    The words of a bitfield become such a mask by `motet.attention.masks.bitfield.lower`.
    Raises `UserError` for the name of a kind that motet has, or of another function."""
    if name in (*get_args(MediaAttention), "family"):
        raise UserError(f"register_mask: {name} is a kind of attention that motet has; give another name")
    if _OWN.get(name, mask_of_sample) is not mask_of_sample:
        raise UserError(f"register_mask: {name} is another function's name already; give another name")
    _OWN[name] = mask_of_sample


def rule_named(media_attention: str, window: int | None = None, chunk: int | None = None) -> Rule:
    """Raises `UserError` for a name that is not known, and for chunks with other than causal attention."""
    if media_attention in get_args(MediaAttention):
        return AttentionRule(media=cast(MediaAttention, media_attention), window=window, chunk=chunk)
    if chunk is not None:
        raise UserError(f"media_attention: {media_attention} does not support chunks of {chunk} tokens; give causal")
    if media_attention not in _OWN:
        known = ", ".join([*get_args(MediaAttention), *_OWN])
        raise UserError(
            f"media_attention: {media_attention!r} is not known; give one of {known}, or call register_mask before, in "
            "every process"
        )
    return OwnRule(media_attention, _OWN[media_attention], window)


@lru_cache(maxsize=8)
def mask_of_documents(documents: tuple[Document, ...], rule: Rule) -> IntervalMask:
    """Mask of documents one after the other.

    Raises `UserError` where a function returns a mask that is not of its sample's tokens."""
    if isinstance(rule, AttentionRule):
        return mask_of(layout_of_documents(documents), rule)
    return side_by_side([_own_mask(document, rule) for document in documents])


def _own_mask(document: Document, rule: OwnRule) -> IntervalMask:
    mask = rule.mask_of_sample(document.segments, rule.window)
    if not isinstance(mask, IntervalMask) or mask.num_tokens != document.num_tokens:
        got = f"of {mask.num_tokens} tokens" if isinstance(mask, IntervalMask) else f"that is a {type(mask).__name__}"
        raise UserError(
            f"media_attention: {rule.name} returned a mask {got} for a sample of {document.num_tokens} tokens; "
            "return an IntervalMask with a row for each"
        )
    return mask
