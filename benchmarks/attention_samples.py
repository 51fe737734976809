"""Sequences for the benchmarks of attention, drawn with a seed."""

import numpy as np

from motet.assignment.sample import Segment
from motet.attention.masks.token_layout import Document

IMAGE_TOKENS = 256


def text_and_images(num_tokens: int, random: np.random.Generator) -> list[Document]:
    """One sample: 32 to 800 tokens of text, an image, text again."""
    segments: list[Segment] = []
    left = num_tokens
    while left:
        text = min(int(random.integers(32, 801)), left)
        segments.append(Segment(text))
        left -= text
        if left >= IMAGE_TOKENS:
            segments.append(Segment(IMAGE_TOKENS, "vision", len(segments)))
            left -= IMAGE_TOKENS
    return [Document(tuple(segments))]


def packed_documents(num_tokens: int, random: np.random.Generator) -> list[Document]:
    """Texts of log-normal lengths."""
    documents: list[Document] = []
    while num_tokens:
        length = min(int(random.lognormal(7, 1)) + 1, num_tokens)
        documents.append(Document((Segment(length),)))
        num_tokens -= length
    return documents
