"""Layout of a sequence as runs of tokens: documents, items of media, prefixes, answers, padding.

Masks depend on nothing else, so every rank derives them from the samples' metadata. A run is a stretch of one segment:
a text segment, an image, a frame of a clip. There are thousands of runs where there are a million tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from motet.assignment.sample import Segment
from motet.attention.masks.interval_mask import Bool
from motet.errors import UserError

TEXT = 0
"""The modality of a module's own tokens."""
PADDING = -1


@dataclass(frozen=True, slots=True)
class Document:
    """A sequence that sees nothing outside itself: one sample, or one of several packed together."""

    segments: tuple[Segment, ...]
    """Segments in order. A segment with `grid` (frames, rows, columns) makes one run per frame."""
    prefix: int = 0
    """So many leading tokens see one another in both directions (prefix-LM)."""
    answers: tuple[int, ...] = ()
    """Lengths of the answers that stand at the end and share what stands before them. They do not see one another."""

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)


class Run(NamedTuple):
    """Tokens [start, stop) and where they belong. All ends are positions in the sequence."""

    start: int
    stop: int
    modality: int
    """0: text; i: the i-th source of the sequence, counted from 1; -1: padding."""
    item: int
    """Numbers the (document, source, item) of media; -1: none."""
    document: int
    """Numbers the documents; padding counts as one of its own."""
    document_start: int
    document_stop: int
    prefix_stop: int
    """End of the document's prefix."""
    shared_stop: int
    """End of the part that the document's answers share; without answers the end of the document."""
    answer_start: int
    """Begin of the run's answer; -1 outside of answers."""


class TokenLayout:
    """A sequence of T tokens in R runs. Each column of the runs is an int32 array [R] with its name in `Run`."""

    def __init__(self, runs: Sequence[Run], sources: Sequence[str]) -> None:
        self.sources = tuple(sources)
        columns = np.array(runs, np.int32).reshape(-1, len(Run._fields)).T
        self.start, self.stop, self.modality, self.item, self.document = columns[:5]
        self.document_start, self.document_stop, self.prefix_stop, self.shared_stop, self.answer_start = columns[5:]

    @property
    def num_tokens(self) -> int:
        return int(self.stop[-1]) if len(self.stop) else 0

    @property
    def is_media(self) -> Bool:
        return self.modality > TEXT


def layout_of_documents(documents: Iterable[Document], *, num_tokens: int | None = None) -> TokenLayout:
    """Documents one after the other, padded at the end to `num_tokens`.

    Raises `UserError` where prefix and answers are longer than their document, or `num_tokens` too small."""
    runs: list[Run] = []
    sources: dict[str, int] = {}
    items: dict[tuple[int, int, int], int] = {}
    begin = number = 0
    for number, document in enumerate(documents):
        runs += _runs_of(document, number, begin, sources, items)
        begin += document.num_tokens
    total = begin if num_tokens is None else num_tokens
    if total < begin:
        raise UserError(f"{begin} tokens do not fit into a sequence of {total}")
    if total > begin:
        runs.append(Run(begin, total, PADDING, -1, number + 1, begin, total, begin, total, -1))
    return TokenLayout(runs, list(sources))


def _runs_of(
    document: Document, number: int, begin: int, sources: dict[str, int], items: dict[tuple[int, int, int], int]
) -> Iterable[Run]:
    """Numbers of sources and items that are not yet known are added."""
    end = begin + document.num_tokens
    shared_stop = end - sum(document.answers)
    if begin + document.prefix > shared_stop or min((document.prefix, *document.answers)) < 0:
        raise UserError(
            f"document {number} has {document.num_tokens} tokens, but a prefix of {document.prefix} and answers of "
            f"{list(document.answers)}; they must not be negative, and together no longer than the document"
        )
    answers = list(pairwise(np.cumsum([shared_stop, *document.answers]).tolist()))
    position = begin
    for segment in document.segments:
        modality, item = TEXT, -1
        if segment.source is not None:
            modality = sources.setdefault(segment.source, len(sources) + 1)
            item = items.setdefault((number, modality, segment.item), len(items))
        for length in _run_lengths(segment):
            for start, stop, answer_start in _pieces(position, position + length, answers):
                extent = (begin, end, begin + document.prefix, shared_stop, answer_start)
                yield Run(start, stop, modality, item, number, *extent)
            position += length


def _run_lengths(segment: Segment) -> list[int]:
    """Runs of each frame, if the grid counts frames."""
    if segment.num_tokens == 0:
        return []
    if segment.source is None or len(segment.grid) != 3:
        return [segment.num_tokens]
    frames = segment.grid[0]
    if frames < 1 or segment.num_tokens % frames:
        raise UserError(f"{segment.num_tokens} tokens of {segment.source!r} do not divide into {frames} frames")
    return [segment.num_tokens // frames] * frames


def _pieces(start: int, stop: int, answers: list[tuple[int, int]]) -> Iterable[tuple[int, int, int]]:
    """[start, stop) cut where answers begin, each piece with the start of its answer."""
    cuts = [begin for begin, _ in answers if start < begin < stop]
    for first, last in pairwise([start, *cuts, stop]):
        yield first, last, next((begin for begin, end in answers if begin <= first < end), -1)
