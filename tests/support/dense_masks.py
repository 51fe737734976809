"""Masks of T x T written down token by token, from the definition of each kind, without motet.attention's code."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from motet.attention.masks.token_layout import Document


@dataclass(frozen=True)
class Token:
    """One token, and where it belongs."""

    place: int
    document: int
    in_document: int
    source: str | None
    item: int
    run: int
    """Images, or frames, are numbered through."""
    answer: int
    """-1: what the answers share."""
    in_prefix: bool


def tokens_of(documents: list[Document]) -> list[Token]:
    tokens: list[Token] = []
    run = 0
    for number, document in enumerate(documents):
        length = sum(segment.num_tokens for segment in document.segments)
        ends = np.cumsum([length - sum(document.answers), *document.answers])
        inside = 0
        for segment in document.segments:
            frames = segment.grid[0] if segment.source is not None and len(segment.grid) == 3 else 1
            for offset in range(segment.num_tokens):
                if offset % (segment.num_tokens // frames) == 0:
                    run += 1
                answer = next((a for a, (first, last) in enumerate(pairwise(ends)) if first <= inside < last), -1)
                tokens.append(
                    Token(
                        len(tokens), number, inside, segment.source, segment.item, run, answer, inside < document.prefix
                    )
                )
                inside += 1
    return tokens


Sees = Callable[[Token, Token], bool]
"""Whether the query (first) sees the key, given that both are of one document."""


def dense(documents: list[Document], sees: Sees, num_tokens: int | None = None) -> np.ndarray:
    tokens = tokens_of(documents)
    mask = np.zeros((num_tokens or len(tokens),) * 2, bool)
    for q in tokens:
        for k in tokens:
            mask[q.place, k.place] = q.document == k.document and sees(q, k)
    return mask


def causal(q: Token, k: Token) -> bool:
    return k.place <= q.place


def full(q: Token, k: Token) -> bool:
    return True


def prefix(q: Token, k: Token) -> bool:
    return causal(q, k) or (q.in_prefix and k.in_prefix)


def sliding(window: int, sink: int = 0) -> Sees:
    return lambda q, k: causal(q, k) and (q.place - k.place < window or k.in_document < sink)


def media_see_their_item(q: Token, k: Token) -> bool:
    return causal(q, k) if q.source is None else (q.source, q.item) == (k.source, k.item)


def media_see_their_modality(q: Token, k: Token) -> bool:
    return causal(q, k) if q.source is None else q.source == k.source


def block_causal(q: Token, k: Token) -> bool:
    return causal(q, k) or (q.source is not None and q.run == k.run)


def media_prefix(documents: list[Document]) -> Sees:
    """All that stands before the last media token of a document sees all of that."""
    end: dict[int, int] = {}
    for token in tokens_of(documents):
        if token.source is not None:
            end[token.document] = token.place
    return lambda q, k: causal(q, k) or max(q.place, k.place) <= end.get(q.document, -1)


def block_causal_sliding(window: int) -> Sees:
    return lambda q, k: block_causal(q, k) and q.place - k.place < window


def answers(q: Token, k: Token) -> bool:
    return causal(q, k) and k.answer in (-1, q.answer)


def answers_own_item(q: Token, k: Token) -> bool:
    return k.answer in (-1, q.answer) and media_see_their_item(q, k)


def answers_block_causal(q: Token, k: Token) -> bool:
    # A run that crosses the end of the question is two: what comes after is another's.
    return k.answer in (-1, q.answer) and (
        causal(q, k) or (q.source is not None and (q.run, q.answer) == (k.run, k.answer))
    )


def tiles(mask: np.ndarray, block_size: int) -> np.ndarray:
    """[N, N]: 0 empty, 1 partial, 2 full."""
    starts = range(0, len(mask), block_size)
    parts = [[mask[q : q + block_size, k : k + block_size] for k in starts] for q in starts]
    return np.array([[2 if part.all() else int(part.any()) for part in row] for row in parts])
