"""The masks of the papers' measurements of attention, drawn anew.

Cornstarch figure 11, thesis figure 3.5 and section 3.5.5 give neither lengths nor positions. From the thesis (3.5.1): a
sample is 1000 tokens of text, an image of 1280 x 720 and two minutes of sound, at random places. Assumed: 1196 tokens
of an image (Qwen2 vision: patches of 28), 1500 of the sound (Phi-4: 12.5 a second); one bit for each modality, so that
images see each other, as in Cornstarch's code; packed sequences of one to four samples.
"""

from collections.abc import Callable

import numpy as np

from motet.assignment.sample import Segment
from motet.attention.masks.interval_mask import IntervalMask, interval_mask
from motet.attention.masks.rules import AttentionRule, mask_of
from motet.attention.masks.token_layout import Document, layout_of_documents

TEXT_TOKENS, IMAGE_TOKENS, AUDIO_TOKENS = 1000, 1196, 1500
SAMPLE_TOKENS = TEXT_TOKENS + IMAGE_TOKENS + AUDIO_TOKENS
MOST_SAMPLES_IN_A_ROW = 4
ONE_BIT_PER_MODALITY = AttentionRule(media="own_modality")

SINK, WINDOW = 64, 4096
"""Lambda, in tokens."""
BLOCK = 256
"""Causal blockwise: each block sees the first one, the one before it and itself; the last one sees all."""
ANSWERS = 4
"""Shared question: as long as each of its answers."""


def prepended(num_tokens: int, random: np.random.Generator) -> IntervalMask:
    """EP: all media before all text."""
    media = _media(num_tokens // SAMPLE_TOKENS)
    text = Segment(num_tokens - sum(segment.num_tokens for segment in media))
    return _mask([Document((*media, text))])


def embedded(num_tokens: int, random: np.random.Generator) -> IntervalMask:
    """EE: media at random places in the text."""
    return _mask([_embedded(num_tokens, num_tokens // SAMPLE_TOKENS, random)])


def packed(num_tokens: int, random: np.random.Generator) -> IntervalMask:
    """MP: sequences with embedded media, one after the other."""
    documents: list[Document] = []
    left = num_tokens
    while left:
        samples = min(int(random.integers(1, MOST_SAMPLES_IN_A_ROW + 1)), left // SAMPLE_TOKENS)
        documents.append(_embedded(samples * SAMPLE_TOKENS or left, samples, random))
        left -= documents[-1].num_tokens
    return _mask(documents)


def causal(num_tokens: int, random: np.random.Generator) -> IntervalMask:
    return mask_of(layout_of_documents([Document((Segment(num_tokens),))]), AttentionRule())


def lambda_shaped(num_tokens: int, random: np.random.Generator) -> IntervalMask:
    layout = layout_of_documents([Document((Segment(num_tokens),))])
    return mask_of(layout, AttentionRule(window=WINDOW, sink=SINK))


def causal_blockwise(num_tokens: int, random: np.random.Generator) -> IntervalMask:
    place = np.arange(num_tokens)
    block = place // BLOCK
    start = np.where(block == block[-1], 0, np.maximum(block - 1, 0) * BLOCK)
    return interval_mask((np.zeros_like(place), np.minimum(BLOCK, place + 1)), (start, place + 1))


def shared_question(num_tokens: int, random: np.random.Generator) -> IntervalMask:
    answers = (num_tokens // (ANSWERS + 1),) * ANSWERS
    return mask_of(layout_of_documents([Document((Segment(num_tokens),), answers=answers)]), AttentionRule())


MULTIMODAL: dict[str, Callable[[int, np.random.Generator], IntervalMask]] = {
    "EP": prepended,
    "EE": embedded,
    "MP": packed,
}
"""Masks under their names in Cornstarch table 4: encoder outputs prepended, embedded, multimodal packing."""
FOUR_OF_DCP = {
    "Lambda": lambda_shaped,
    "Causal": causal,
    "Causal blockwise": causal_blockwise,
    "Shared questions": shared_question,
}
"""Masks under their names in thesis table 3.4."""


def _mask(documents: list[Document]) -> IntervalMask:
    return mask_of(layout_of_documents(documents), ONE_BIT_PER_MODALITY)


def _media(num_samples: int) -> list[Segment]:
    images = [Segment(IMAGE_TOKENS, "vision", item) for item in range(num_samples)]
    return [*images, *(Segment(AUDIO_TOKENS, "audio", item) for item in range(num_samples))]


def _embedded(num_tokens: int, num_samples: int, random: np.random.Generator) -> Document:
    media = _media(num_samples)
    text = num_tokens - sum(segment.num_tokens for segment in media)
    cuts = np.sort(random.integers(0, text + 1, len(media))).tolist()
    segments: list[Segment] = []
    for index, before, place in zip(random.permutation(len(media)).tolist(), [0, *cuts], cuts, strict=False):
        segments += [Segment(place - before), media[index]]
    return Document((*segments, Segment(text - (cuts[-1] if cuts else 0))))
