"""The lowered mask of every kind equals the dense one, written down from the kind's definition."""

import dense_masks
import numpy as np
import pytest
from dense_masks import Sees, dense
from drawn_documents import documents
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.assignment.sample import Segment
from motet.attention.masks.interval_mask import MAX_CLASSES, IntervalMask, interval_mask
from motet.attention.masks.rules import AttentionRule, mask_of, rule_of_family
from motet.attention.masks.token_layout import Document, layout_of_documents
from motet.errors import UserError

KINDS: dict[str, tuple[AttentionRule, Sees]] = {
    "causal": (AttentionRule(), dense_masks.causal),
    "full": (AttentionRule(text="full"), dense_masks.full),
    "sliding window": (AttentionRule(window=7), dense_masks.sliding(7)),
    "lambda": (AttentionRule(window=5, sink=3), dense_masks.sliding(5, 3)),
    "media see their item": (AttentionRule(media="own_item"), dense_masks.media_see_their_item),
    "media see their modality": (AttentionRule(media="own_modality"), dense_masks.media_see_their_modality),
    "block causal": (AttentionRule(media="block_causal"), dense_masks.block_causal),
    "block causal, sliding": (AttentionRule(media="block_causal", window=6), dense_masks.block_causal_sliding(6)),
}


@pytest.mark.parametrize("kind", KINDS)
@given(drawn=documents(), padding=st.integers(0, 9))
@examples(40)
def test_every_kind_packed_and_padded(kind: str, drawn: list[Document], padding: int) -> None:
    rule, sees = KINDS[kind]
    layout = layout_of_documents(drawn)
    total = layout.num_tokens + padding
    mask = mask_of(layout_of_documents(drawn, num_tokens=total), rule)
    expected = dense(drawn, sees, total)
    np.testing.assert_array_equal(mask.dense(), expected)
    np.testing.assert_array_equal(mask_of(layout, rule).padded(total).dense(), expected)


@given(drawn=documents(prefixes=True))
@examples(40)
def test_prefixes(drawn: list[Document]) -> None:
    mask = mask_of(layout_of_documents(drawn), AttentionRule())
    np.testing.assert_array_equal(mask.dense(), dense(drawn, dense_masks.prefix))


@given(drawn=documents(), window=st.none() | st.integers(1, 9))
@examples(60)
def test_media_and_what_stands_before_are_a_prefix(drawn: list[Document], window: int | None) -> None:
    mask = mask_of(layout_of_documents(drawn), AttentionRule(media="prefix", window=window))
    sees, reach = dense_masks.media_prefix(drawn), 10**6 if window is None else window
    np.testing.assert_array_equal(mask.dense(), dense(drawn, lambda q, k: sees(q, k) and q.place - k.place < reach))


@given(drawn=documents(answers=True, scattered=False))
@examples(40)
def test_answers_share_a_question(drawn: list[Document]) -> None:
    layout = layout_of_documents(drawn)
    for media, sees in (("causal", dense_masks.answers), ("block_causal", dense_masks.answers_block_causal)):
        mask = mask_of(layout, AttentionRule(media=media))  # type: ignore[arg-type]
        np.testing.assert_array_equal(mask.dense(), dense(drawn, sees))


@given(drawn=documents(answers=True))
@examples(60)
def test_answers_with_parts_of_one_item_do_not_see_one_another(drawn: list[Document]) -> None:
    mask = mask_of(layout_of_documents(drawn), AttentionRule(media="own_item"))
    np.testing.assert_array_equal(mask.dense(), dense(drawn, dense_masks.answers_own_item))


def test_two_answers_that_are_parts_of_one_image() -> None:
    image = Segment(2, "vision", 0)
    document = Document((Segment(2), image, image), answers=(2, 2))
    mask = mask_of(layout_of_documents([document]), AttentionRule(media="own_item")).dense()
    assert not mask[4:, 2:4].any()
    assert mask[2:4, 2:4].all()
    assert mask[4:, 4:].all()


@given(
    ends=st.lists(st.tuples(*[st.integers(0, 12)] * 4), min_size=12, max_size=12),
    classes=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    relation=st.lists(st.booleans(), min_size=9, max_size=9),
)
@examples(60)
def test_intervals_in_any_order(ends: list, classes: list[int], relation: list[bool]) -> None:
    a, b, c, d = np.array(ends, np.int32).T
    class_mask = np.array(relation).reshape(3, 3)
    mask = interval_mask((a, b), (c, d), token_class=np.array(classes), class_mask=class_mask)
    for q in range(12):
        for k in range(12):
            inside = a[q] <= k < b[q] or c[q] <= k < d[q]
            assert mask.dense()[q, k] == (inside and class_mask[classes[q], classes[k]])
    assert mask.token_class.dtype == np.int16
    assert mask.lo.dtype == mask.hi.dtype == np.int32


def test_each_family_has_its_rule() -> None:
    assert rule_of_family("llama") == AttentionRule()
    assert rule_of_family("gemma3_text", sliding_window=512) == AttentionRule(media="block_causal", window=512)


class TestWrongInput:
    def test_prefix_and_answers_too_long(self) -> None:
        with pytest.raises(UserError, match="document 0 has 10 tokens, but a prefix of 4 and answers of"):
            layout_of_documents([Document((Segment(10),), prefix=4, answers=(5, 2))])

    def test_sequence_too_short(self) -> None:
        with pytest.raises(UserError, match="10 tokens do not fit into a sequence of 9"):
            layout_of_documents([Document((Segment(10),))], num_tokens=9)

    def test_frames_do_not_divide(self) -> None:
        with pytest.raises(UserError, match="10 tokens of 'vision' do not divide into 3 frames"):
            layout_of_documents([Document((Segment(10, "vision", grid=(3, 2, 2)),))])

    def test_more_classes_than_fit(self) -> None:
        halves = [Segment(1, "vision", item) for item in range(MAX_CLASSES)]
        layout = layout_of_documents([Document((*halves, *halves))])
        with pytest.raises(UserError, match=r"65 classes of tokens .* 64 fit"):
            mask_of(layout, AttentionRule(media="own_item"))

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"window": 0}, "at least 1"),
            ({"sink": 2}, "needs a window"),
            ({"text": "full", "window": 3}, "cannot be combined"),
        ],
    )
    def test_rules_that_contradict_themselves(self, values: dict, message: str) -> None:
        with pytest.raises(UserError, match=message):
            AttentionRule(**values)

    def test_three_intervals(self) -> None:
        layout = layout_of_documents([Document((Segment(10),), answers=(3, 3))])
        with pytest.raises(UserError, match="answers that share a question cannot be combined with window"):
            mask_of(layout, AttentionRule(window=4))

    @pytest.mark.parametrize(
        ("lo", "hi", "message"),
        [
            ([[0, 0]], [[2, 0]], "leaves"),
            ([[1, 0]], [[1, 0]], "empty interval"),
            ([[0, 0]], [[0, 1]], "ascend"),
        ],
    )
    def test_intervals_out_of_form(self, lo: list, hi: list, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            IntervalMask(np.zeros(1, np.int16), np.array(lo, np.int32), np.array(hi, np.int32), np.ones((1, 1), bool))
