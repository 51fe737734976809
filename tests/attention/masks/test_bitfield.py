"""Words of 64 bits: what they say, and that lowering keeps it, sign bit included."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.attention.masks.bitfield import NO_MODALITY, BitfieldMask, bitfield_mask, lower
from motet.errors import UserError

CAUSAL = -(2**63)


def says(word: int, own_of_key: int, q: int, k: int) -> bool:
    """The definition, on Python's integers of any size."""
    word %= 2**64
    return own_of_key >= 0 and bool(word >> own_of_key & 1) and (k <= q or not word >> 63)


def test_the_papers_example() -> None:
    """Thesis figure 3.4: text, two tokens of encoder A, two of text: text sees what stands before, media themselves."""
    text, a = 0b111 + CAUSAL, 0b010
    mask = bitfield_mask(np.array([[text, a, a, text, text]]), num_modalities=3)
    assert mask.modality.tolist() == [[0, 1, 1, 0, 0]]
    assert mask.dense()[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


BITS = [0, 1, 2, 60, 61, 62]


@st.composite
def bitfields(draw: st.DrawFn) -> BitfieldMask:
    """Different words in each row of the batch, with bits 61 to 63, modalities of their own, padding."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 30))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = [
        sum(1 << bit for bit in BITS if random.random() < 0.5) - (2**63 if random.random() < 0.5 else 0)
        for _ in range(4)
    ]
    words = np.array([0, *kinds], np.int64)[random.integers(0, 5, (rows, length))]
    own = np.array([NO_MODALITY, *BITS], np.int8)[random.integers(0, 7, (rows, length))]
    return BitfieldMask(words, own)


@given(bitfields())
@examples(150)
def test_lowered_equals_the_definition(mask: BitfieldMask) -> None:
    lowered = lower(mask)
    assert len(lowered) == len(mask.words)
    for row, (words, own) in enumerate(zip(mask.words.tolist(), mask.modality.tolist(), strict=True)):
        places = range(len(words))
        expected = np.array([[says(words[q], own[k], q, k) for k in places] for q in places])
        np.testing.assert_array_equal(mask.dense()[row], expected)
        np.testing.assert_array_equal(lowered[row].dense(), expected)


def test_the_test_is_on_the_keys_own_bit() -> None:
    """`q & k != 0` would let the image see the text, which has all bits."""
    mask = bitfield_mask(np.array([[0b11 + CAUSAL, 0b10]]), num_modalities=2)
    assert not mask.dense()[0, 1, 0]


def test_unknown_bits() -> None:
    words = np.array([[0b11 + CAUSAL, 0b10], [0b01, 0b101]])
    with pytest.raises(UserError, match=r"token 1 of sequence 1 has bit 2 .* 2 modalities, bits 0 to 1, .* bit 63"):
        bitfield_mask(words, num_modalities=2)


def test_more_classes_than_fit() -> None:
    words = np.arange(1, 66)[None]
    with pytest.raises(UserError, match="65 different words; 64 fit"):
        lower(bitfield_mask(words))
    assert lower(bitfield_mask(words[:, :64]))[0].class_mask.shape == (64, 64)


@pytest.mark.parametrize(
    ("words", "modality", "message"),
    [
        (np.zeros(3, np.int64), np.zeros(3, np.int8), "int64 words"),
        (np.zeros((1, 3), np.int32), np.zeros((1, 3), np.int8), "int64 words"),
        (np.zeros((1, 3), np.int64), np.full((1, 3), 63, np.int8), "bits 0 to 62"),
    ],
)
def test_wrong_shapes(words: np.ndarray, modality: np.ndarray, message: str) -> None:
    with pytest.raises(UserError, match=message):
        BitfieldMask(words, modality)
