"""A small mask of every kind, and attention in float64 written independently of the kernels."""

import math

import numpy as np
import torch
from torch import Tensor

from motet.assignment.sample import Segment
from motet.attention.masks.distribution import distribute
from motet.attention.masks.interval_mask import IntervalMask
from motet.attention.masks.rules import AttentionRule, mask_of
from motet.attention.masks.tile_counts import tile_counts
from motet.attention.masks.token_layout import Document, layout_of_documents


def segments_from_spans(num_tokens: int, spans: list[tuple[int, int, str, int]]) -> tuple[Segment, ...]:
    """Segments of a sequence in which media stand at the given (start, stop, source, item); the rest is text."""
    segments: list[Segment] = []
    position = 0
    for start, stop, source, item in sorted(spans):
        assert position <= start < stop <= num_tokens
        segments += [Segment(start - position)] * (start > position)
        segments.append(Segment(stop - start, source, item))
        position = stop
    return (*segments, *[Segment(num_tokens - position)] * (position < num_tokens))


NUM_TOKENS, BLOCK = 150, 64
MEDIA = segments_from_spans(NUM_TOKENS, [(10, 50, "vision", 0), (75, 95, "vision", 1), (95, 120, "audio", 0)])
TEXT = (Segment(NUM_TOKENS),)


def _one(rule: AttentionRule, segments: tuple[Segment, ...] = MEDIA, **document: object) -> IntervalMask:
    return mask_of(layout_of_documents([Document(segments, **document)], num_tokens=NUM_TOKENS), rule)  # type: ignore[arg-type]


def _packed() -> IntervalMask:
    documents = [Document((Segment(length),)) for length in (40, 1, 64, 45)]
    return mask_of(layout_of_documents(documents), AttentionRule())


def _clip() -> IntervalMask:
    frames = (Segment(20), Segment(90, "vision", 0, grid=(3, 5, 6)), Segment(40))
    return _one(AttentionRule(media="block_causal"), frames)


MASKS = {
    "causal": _one(AttentionRule()),
    "lambda": _one(AttentionRule(window=30, sink=4)),
    "prefix": _one(AttentionRule(), TEXT, prefix=60),
    "own_item": _one(AttentionRule(media="own_item")),
    "own_modality": _one(AttentionRule(media="own_modality")),
    "gemma_window": _one(AttentionRule(media="block_causal", window=25)),
    "packed": _packed(),
    "block_causal_video": _clip(),
    "answers": _one(AttentionRule(), TEXT, answers=(30, 41)),
    "padding": _one(AttentionRule(), (Segment(101),)),
    "full": _one(AttentionRule(text="full"), TEXT),
}
"""Of 150 tokens: no multiple of a block, and rows of tokens that see nothing."""


def attention_in_float64(query: Tensor, key: Tensor, value: Tensor, allowed: np.ndarray) -> Tensor:
    """[B, heads, Q, dim] from float64 tensors; `allowed` [B, Q, K]. Queries without keys give 0."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(query.shape[-1])
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * torch.from_numpy(allowed)[:, None]
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bhqk,bhkd->bhqd", weights / torch.where(total > 0, total, torch.ones(())), value)


def order_of_blocks(order: str, mask: IntervalMask) -> list[int]:
    """`lpt`: those of one rank after those of the other, as they come together in context parallelism."""
    num_blocks = mask.num_tokens // BLOCK
    if order == "lpt":
        shares = distribute(tile_counts(mask, BLOCK).pairs, 2, num_tokens=mask.num_tokens, block_size=BLOCK)
        return np.concatenate([shares.blocks_of(rank) for rank in range(2)]).tolist()
    return list(range(num_blocks))[:: -1 if order == "reversed" else 1]
