"""Counts and the block map against the dense mask, for every kind and for the issue's own figures."""

import dense_masks
import numpy as np
import pytest
from dense_masks import Sees, dense
from drawn_documents import documents
from hypothesis import given
from hypothesis import strategies as st
from masks import segments_from_spans
from sampling import examples

from motet.assignment.sample import Segment
from motet.attention.masks import tile_counts as blocks
from motet.attention.masks.interval_mask import IntervalMask, interval_mask
from motet.attention.masks.rules import AttentionRule, mask_of
from motet.attention.masks.tile_counts import (
    BLOCK_SIZE,
    EMPTY,
    FULL,
    PARTIAL,
    block_map,
    blocks_seen,
    num_blocks,
    row_pairs,
    tile_counts,
)
from motet.attention.masks.token_layout import Document, layout_of_documents

T = 1000
TEXT = (Segment(T),)
IMAGES = segments_from_spans(T, [(100, 356, "vision", 0), (500, 756, "vision", 1)])
PACKED = [Document((Segment(length),)) for length in (200, 1, 449, 350)]

FIGURES: list[tuple[str, list[Document], AttentionRule, Sees, int, tuple[int, int, int]]] = [
    ("causal", [Document(TEXT)], AttentionRule(), dense_masks.causal, 500500, (28, 8, 28)),
    ("prefix 300", [Document(TEXT, prefix=300)], AttentionRule(), dense_masks.prefix, 545350, (31, 8, 25)),
    (
        "images see only themselves",
        [Document(IMAGES)],
        AttentionRule(media="own_item"),
        dense_masks.media_see_their_item,
        412180,
        (17, 22, 25),
    ),
    (
        "one shared modality bit",
        [Document(IMAGES)],
        AttentionRule(media="own_modality"),
        dense_masks.media_see_their_modality,
        543252,
        (21, 30, 13),
    ),
    ("packed documents", PACKED, AttentionRule(), dense_masks.causal, 182551, (4, 18, 42)),
]


def check_against_dense(mask: IntervalMask, expected: np.ndarray, block_size: int) -> None:
    tiles = dense_masks.tiles(expected, block_size)
    counts = tile_counts(mask, block_size)
    np.testing.assert_array_equal(row_pairs(mask), expected.sum(axis=1))
    np.testing.assert_array_equal(counts.full, (tiles == FULL).sum(axis=1))
    np.testing.assert_array_equal(counts.partial, (tiles == PARTIAL).sum(axis=1))
    np.testing.assert_array_equal(counts.empty, (tiles == EMPTY).sum(axis=1))
    starts = range(0, len(expected), block_size)
    np.testing.assert_array_equal(counts.pairs, [expected[start : start + block_size].sum() for start in starts])
    np.testing.assert_array_equal(block_map(mask, block_size=block_size), tiles)


@pytest.mark.parametrize(("name", "drawn", "rule", "sees", "pairs", "tiles"), FIGURES, ids=[f[0] for f in FIGURES])
def test_the_figures(
    name: str, drawn: list[Document], rule: AttentionRule, sees: Sees, pairs: int, tiles: tuple[int, int, int]
) -> None:
    mask = mask_of(layout_of_documents(drawn), rule)
    counts = tile_counts(mask)
    assert int(counts.pairs.sum()) == pairs
    assert (int(counts.full.sum()), int(counts.partial.sum()), int(counts.empty.sum())) == tiles
    assert num_blocks(T) == 8
    check_against_dense(mask, dense(drawn, sees), BLOCK_SIZE)


RULES = [
    AttentionRule(),
    AttentionRule(text="full"),
    AttentionRule(window=6, sink=2),
    AttentionRule(media="own_item"),
    AttentionRule(media="own_modality"),
    AttentionRule(media="block_causal", window=9),
]


@given(drawn=documents(), rule=st.sampled_from(RULES), block_size=st.integers(1, 12), padding=st.integers(0, 9))
@examples(150)
def test_rules_against_dense(drawn: list[Document], rule: AttentionRule, block_size: int, padding: int) -> None:
    layout = layout_of_documents(drawn)
    mask = mask_of(layout_of_documents(drawn, num_tokens=layout.num_tokens + padding), rule)
    check_against_dense(mask, mask.dense(), block_size)


@st.composite
def any_masks(draw: st.DrawFn) -> IntervalMask:
    """No rule behind them: every query has its own intervals and class."""
    length, classes = draw(st.integers(0, 24)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    first, second = random.integers(0, length + 1, (2, 2, length)).astype(np.int32)
    class_mask = random.random((classes, classes)) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    runs = np.sort(random.integers(0, classes, length)) if draw(st.booleans()) else random.integers(0, classes, length)
    return interval_mask(tuple(first), tuple(second), token_class=runs, class_mask=class_mask)


@given(mask=any_masks(), block_size=st.integers(1, 10))
@examples(300)
def test_any_mask_against_dense(mask: IntervalMask, block_size: int) -> None:
    if mask.num_tokens:
        check_against_dense(mask, mask.dense(), block_size)
    else:
        assert tile_counts(mask, block_size).full.size == block_map(mask, block_size=block_size).size == 0


@given(mask=any_masks(), block_size=st.integers(1, 10))
@examples(60)
def test_few_keys_are_searched_for(mask: IntervalMask, block_size: int) -> None:
    if mask.num_tokens:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(blocks, "_FEW", 0)  # All sets of keys are few.
            check_against_dense(mask, mask.dense(), block_size)


def test_bit_63_is_a_class_like_any_other() -> None:
    """64 classes, each of which sees only itself: the last one's bit is a word's sign."""
    token_class = np.arange(130) % 64
    everywhere = (np.zeros(130, np.int32), np.full(130, 130, np.int32))
    mask = interval_mask(everywhere, token_class=token_class, class_mask=np.eye(64, dtype=bool))
    check_against_dense(mask, token_class[:, None] == token_class[None], 8)


@given(mask=any_masks(), block_size=st.integers(1, 6), num_groups=st.integers(1, 4), seed=st.integers(0, 1000))
@examples(200)
def test_blocks_that_groups_of_queries_see(mask: IntervalMask, block_size: int, num_groups: int, seed: int) -> None:
    columns = num_blocks(mask.num_tokens, block_size)
    group_of_block = np.random.default_rng(seed).integers(0, num_groups, columns)
    place, dense = np.arange(mask.num_tokens) // block_size, mask.dense()
    expected = np.zeros((num_groups, columns), bool)
    for query, key in zip(*np.nonzero(dense), strict=True):
        expected[group_of_block[place[query]], place[key]] = True
    np.testing.assert_array_equal(blocks_seen(mask, group_of_block, num_groups, block_size), expected)


@given(mask=any_masks(), block_size=st.integers(1, 6), seed=st.integers(0, 1000))
@examples(60)
def test_rows_of_the_map_in_any_order(mask: IntervalMask, block_size: int, seed: int) -> None:
    rows = np.random.default_rng(seed).permutation(num_blocks(mask.num_tokens, block_size))[::2]
    np.testing.assert_array_equal(
        block_map(mask, rows, block_size), block_map(mask, block_size=block_size)[rows], strict=True
    )


def test_more_rows_than_are_written_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of(layout_of_documents([Document(IMAGES)]), AttentionRule(media="own_item"))
    at_once = block_map(mask)
    monkeypatch.setattr(blocks, "_ROWS_AT_A_TIME", 3)
    np.testing.assert_array_equal(block_map(mask), at_once)


def test_memory_and_work_grow_with_tokens_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest array that the sweep makes has as many elements as the mask has ends of intervals, at most."""
    largest = 0
    argsort = np.argsort

    def counted(array: np.ndarray, **options: str) -> np.ndarray:
        nonlocal largest
        largest = max(largest, array.size)
        return argsort(array, **options)

    monkeypatch.setattr(np, "argsort", counted)
    sizes = []
    for length in (1 << 14, 1 << 16):
        spans = [(start, start + 256, "vision", start) for start in range(100, length - 256, 1000)]
        layout = layout_of_documents([Document(segments_from_spans(length, spans))])
        largest = 0
        tile_counts(mask_of(layout, AttentionRule(media="own_item")))
        sizes.append(largest)
    assert 0 < sizes[1] < 5 * sizes[0]
