"""Masks under a name: of documents one after the other, from functions that users register."""

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples
from test_attention_blocks import any_masks

from motet.assignment.sample import Segment
from motet.attention.masks import rules as own_masks
from motet.attention.masks.bitfield import bitfield_mask, lower
from motet.attention.masks.interval_mask import MAX_CLASSES, IntervalMask, interval_mask, side_by_side
from motet.attention.masks.rules import AttentionRule, mask_of_documents, register_mask, rule_named
from motet.attention.masks.token_layout import Document
from motet.errors import UserError


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    with patch.dict(own_masks._OWN):
        yield


@given(masks=st.lists(any_masks(), max_size=4))
@examples(100)
def test_side_by_side(masks: list[IntervalMask]) -> None:
    total = sum(mask.num_tokens for mask in masks)
    expected = np.zeros((total, total), bool)
    start = 0
    for mask in masks:
        expected[start : start + mask.num_tokens, start : start + mask.num_tokens] = mask.dense()
        start += mask.num_tokens
    np.testing.assert_array_equal(side_by_side(masks).dense(), expected)


def test_equal_relations_share_their_classes() -> None:
    classes = np.arange(MAX_CLASSES)
    one = interval_mask((classes * 0, classes + 1), token_class=classes, class_mask=np.eye(MAX_CLASSES, dtype=bool))
    other = interval_mask((classes * 0, classes + 1))
    assert len(side_by_side([one, one]).class_mask) == MAX_CLASSES
    with pytest.raises(UserError, match=r"packed samples have 65 classes of tokens; 64 fit"):
        side_by_side([one, other])


def test_a_bitfield_of_ones_own() -> None:
    """Sounds see text and sounds, images only images, text all before it."""
    words = {None: 0b111 | 1 << 63, "vision": 0b010, "audio": 0b101}

    def by_words(segments: tuple[Segment, ...], window: int | None) -> IntervalMask:
        assert window is None
        of_tokens = [words[segment.source] for segment in segments for _ in range(segment.num_tokens)]
        return lower(bitfield_mask(np.array([of_tokens], np.uint64).view(np.int64)))[0]

    register_mask("by_words", by_words)
    segments = (Segment(2), Segment(3, "vision"), Segment(1), Segment(2, "vision", 1), Segment(2))
    mask = mask_of_documents((Document(segments), Document(segments[:2])), rule_named("by_words")).dense()
    sources = [None] * 2 + ["vision"] * 3 + [None] + ["vision"] * 2 + [None] * 2
    for q in range(10):
        for k in range(10):
            assert mask[q, k] == (k <= q if sources[q] is None else sources[k] == "vision")
    assert not mask[:10, 10:].any()
    assert not mask[10:, :10].any()
    np.testing.assert_array_equal(mask[10:, 10:], mask[:5, :5])


def test_the_function_is_told_the_window() -> None:
    windows = []

    def causal(segments: tuple[Segment, ...], window: int | None) -> IntervalMask:
        windows.append(window)
        return mask_of_documents((Document(segments),), AttentionRule(window=window))

    register_mask("mine", causal)
    for window in (None, 3):
        mask = mask_of_documents((Document((Segment(9),)),), rule_named("mine", window))
        assert mask.dense().sum() == (45 if window is None else 24)
    assert windows == [None, 3]


class TestWrongInput:
    def test_unknown_names(self) -> None:
        with pytest.raises(UserError, match=r"media_attention: 'mine' is not known; give one of causal, own_item, .*"):
            rule_named("mine")

    @pytest.mark.parametrize("name", ["causal", "family"])
    def test_names_of_kinds(self, name: str) -> None:
        with pytest.raises(UserError, match=f"{name} is a kind of attention that motet has; give another name"):
            register_mask(name, lambda segments, window: interval_mask((np.zeros(1), np.ones(1))))

    def test_another_functions_name(self) -> None:
        def mine(segments: tuple[Segment, ...], window: int | None) -> IntervalMask:
            raise NotImplementedError

        register_mask("mine", mine)
        register_mask("mine", mine)
        with pytest.raises(UserError, match="mine is another function's name already; give another name"):
            register_mask("mine", lambda segments, window: interval_mask((np.zeros(1), np.ones(1))))

    @pytest.mark.parametrize(("returned", "message"), [(5, "that is a int"), (2, "of 2 tokens")])
    def test_masks_of_something_else(self, returned: int, message: str) -> None:
        mask = returned if returned == 5 else interval_mask((np.zeros(2, np.int32), np.ones(2, np.int32)))
        register_mask("mine", lambda segments, window: mask)  # type: ignore[arg-type, return-value]
        with pytest.raises(UserError, match=f"mine returned a mask {message} for a sample of 3 tokens"):
            mask_of_documents((Document((Segment(3),)),), rule_named("mine"))
