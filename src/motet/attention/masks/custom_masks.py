"""Rules by name: those of `motet.attention.masks.rules`, and masks that a user brings under a name of his own.

A mask of one's own is a function from the segments of one sample to an `IntervalMask` of its tokens. Whoever sends to
the language model calls it too, to know which rank holds which tokens; so it must depend on its arguments alone, and
has to be registered in every process. Plans hold its name, no code; run files name kinds that motet has.

    def answers_apart(segments, window):
        answers = tuple(segment.num_tokens for segment in segments[1:])
        return mask_of(layout_of_documents([Document(segments, answers=answers)]), AttentionRule())

    register_mask("answers_apart", answers_apart)
    model = MultimodalModule(encoders, language_model, media_attention="answers_apart")

Words of a bitfield become such a mask by `motet.attention.masks.bitfield.lower`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast, get_args

from motet.assignment.sample import Segment
from motet.attention.masks.interval_mask import IntervalMask, side_by_side
from motet.attention.masks.rules import AttentionRule, MediaAttention, mask_of
from motet.attention.masks.token_layout import Document, layout_of_documents
from motet.errors import UserError

MaskOfSample = Callable[[tuple[Segment, ...], int | None], IntervalMask]
"""(segments of a sample in the language model; sliding window of the layers that are asked for, None: they have none)
-> who sees whom among its tokens. Samples never see one another."""

_OWN: dict[str, MaskOfSample] = {}


@dataclass(frozen=True, slots=True)
class OwnRule:
    """What a registered function says for layers with this window."""

    name: str
    mask_of_sample: MaskOfSample
    window: int | None


Rule = AttentionRule | OwnRule


def register_mask(name: str, mask_of_sample: MaskOfSample) -> None:
    """From now on `name` may stand where a kind of media attention stands; call it in every process.

    Raises `UserError` for the name of a kind that motet has, or of another function."""
    if name in (*get_args(MediaAttention), "family"):
        raise UserError(f"register_mask: {name} is a kind of attention that motet has; give another name")
    if _OWN.get(name, mask_of_sample) is not mask_of_sample:
        raise UserError(f"register_mask: {name} is another function's name already; give another name")
    _OWN[name] = mask_of_sample


def rule_named(media_attention: str, window: int | None = None) -> Rule:
    """Raises `UserError` for a name that is not known."""
    if media_attention in get_args(MediaAttention):
        return AttentionRule(media=cast(MediaAttention, media_attention), window=window)
    if media_attention not in _OWN:
        known = ", ".join([*get_args(MediaAttention), *_OWN])
        raise UserError(
            f"media_attention: {media_attention!r} is not known; give one of {known}, or register_mask it before, in "
            "every process"
        )
    return OwnRule(media_attention, _OWN[media_attention], window)


@lru_cache(maxsize=8)
def mask_of_documents(documents: tuple[Document, ...], rule: Rule) -> IntervalMask:
    """Of documents one after the other.

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
