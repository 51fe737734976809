"""Random documents for hypothesis: text, images that may lie in several parts, clips with frames, padding."""

from hypothesis import strategies as st

from motet.assignment.sample import Segment
from motet.attention.masks.token_layout import Document

SOURCES = ("vision", "audio")


@st.composite
def segments(draw: st.DrawFn, scattered: bool = True) -> tuple[Segment, ...]:
    drawn: list[Segment] = []
    for index in range(draw(st.integers(1, 7))):
        if draw(st.booleans()):
            drawn.append(Segment(draw(st.integers(1, 20))))
            continue
        item = draw(st.integers(0, 2)) if scattered else index
        frames, each = draw(st.integers(1, 3)), draw(st.integers(1, 9))
        drawn.append(Segment(frames * each, draw(st.sampled_from(SOURCES)), item, grid=(frames, 1, each)))
    return tuple(drawn)


@st.composite
def documents(draw: st.DrawFn, scattered: bool = True, prefixes: bool = False, answers: bool = False) -> list[Document]:
    drawn: list[Document] = []
    for _ in range(draw(st.integers(1, 3))):
        parts = draw(segments(scattered))
        length = sum(segment.num_tokens for segment in parts)
        replies: list[int] = []
        while answers and sum(replies) < length and draw(st.booleans()):
            replies.append(draw(st.integers(0, length - sum(replies))))
        prefix = draw(st.integers(0, length)) if prefixes else 0
        drawn.append(Document(parts, prefix, tuple(replies)))
    return drawn
