"""The bitfield attention mask (BAM): one 64-bit word per token instead of a mask of T x T.

Sources: Cornstarch 4.3.1, thesis 3.4.2.

Bits 0 to 62 stand for modalities, 0 for text; bit 63, the sign of an int64, is the causal bit. Query q sees key k if
q's word has the bit of *k's own* modality and, where q's word has the causal bit, k <= q. A word of 0 is padding.
The key's own modality is the lowest bit of its word in the papers' words (text has all bits, media only their own);
words for which this does not hold, such as media that see text too, come with the modality of each token.

Deviations: the test is on the bit of the key's own modality. `q & k != 0`, as the papers write it, lets every token
see text, since text has all bits.

Limits: a bit per image, or per document, reaches no farther than 63 of them, and a window has no bit.
`motet.attention.masks.rules` makes the lowered mask of these straight from the layout; words are what a user's own
callback may bring.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.attention.masks.interval_mask import MAX_CLASSES, Bool, IntervalMask, interval_mask
from motet.errors import UserError

CAUSAL_BIT = 63
NUM_MODALITY_BITS = 63
NO_MODALITY = -1
Int8 = NDArray[np.int8]
Int64 = NDArray[np.int64]

_CAUSAL = np.uint64(1 << CAUSAL_BIT)


@dataclass(frozen=True, slots=True, eq=False)
class BitfieldMask:
    """The masks of B sequences of T tokens."""

    words: Int64
    """[B, T]."""
    modality: Int8
    """[B, T]: the bit of each token's own modality; -1: nothing sees it."""

    def __post_init__(self) -> None:
        if self.words.ndim != 2 or self.words.shape != self.modality.shape or self.words.dtype != np.int64:
            raise UserError("a bitfield mask is int64 words [B, T] and modalities of the same shape")
        if self.modality.size and not NO_MODALITY <= self.modality.min() <= self.modality.max() < NUM_MODALITY_BITS:
            raise UserError(f"modalities of a bitfield mask are bits 0 to {NUM_MODALITY_BITS - 1}, or {NO_MODALITY}")

    def dense(self) -> Bool:
        """[B, T, T], for short sequences and for looking at."""
        words = self.words.view(np.uint64)
        shift = np.maximum(self.modality, 0).astype(np.uint64)
        seen = (words[:, :, None] >> shift[:, None, :]) & np.uint64(1) == 1
        place = np.arange(self.words.shape[1])
        before = (place[None, :] <= place[:, None]) | (words & _CAUSAL == 0)[:, :, None]
        return seen & before & (self.modality != NO_MODALITY)[:, None, :]


def bitfield_mask(words: NDArray, *, num_modalities: int = NUM_MODALITY_BITS) -> BitfieldMask:
    """Converts words [B, T] as in the papers, where the lowest bit is the token's own.

    Raises `UserError` where a word has a bit that no modality has."""
    words = np.ascontiguousarray(words, np.int64)
    bits = words.view(np.uint64) & ~_CAUSAL
    unknown = bits >> np.uint64(num_modalities)
    if unknown.any():
        row, token = (int(index[0]) for index in np.nonzero(unknown))
        bit = num_modalities + int(unknown[row, token]).bit_length() - 1
        raise UserError(
            f"token {token} of sequence {row} has bit {bit} in its attention bitfield; there are {num_modalities} "
            f"modalities, bits 0 to {num_modalities - 1}, and the causal bit {CAUSAL_BIT}"
        )
    lowest = np.bitwise_count((bits & -bits) - np.uint64(1)).astype(np.int8)
    return BitfieldMask(words, np.where(bits == 0, NO_MODALITY, lowest).astype(np.int8))


def lower(bitfield: BitfieldMask) -> tuple[IntervalMask, ...]:
    """The lowered mask of each sequence: tokens of equal word and modality are a class.

    Raises `UserError` where a sequence has more than 64 of them."""
    return tuple(
        _lower(words, own) for words, own in zip(bitfield.words.view(np.uint64), bitfield.modality, strict=True)
    )


def _lower(words: NDArray[np.uint64], modality: Int8) -> IntervalMask:
    length = len(words)
    changes = np.flatnonzero((words[1:] != words[:-1]) | (modality[1:] != modality[:-1])) + 1
    starts = np.concatenate([[0], changes]) if length else changes
    kinds: dict[tuple[int, int], int] = {}
    of_run = [
        kinds.setdefault(pair, len(kinds))
        for pair in zip(words[starts].tolist(), modality[starts].tolist(), strict=True)
    ]
    if len(kinds) > MAX_CLASSES:
        raise UserError(f"the attention bitfield has {len(kinds)} different words; {MAX_CLASSES} fit into one sequence")
    token_class = np.repeat(np.array(of_run, np.int16), np.diff(starts, append=length))
    class_mask = np.array([[own >= 0 and word >> own & 1 for _, own in kinds] for word, _ in kinds], bool)
    place = np.arange(length, dtype=np.int32)
    hi = np.where(words & _CAUSAL != 0, place + 1, length)
    hi[words & ~_CAUSAL == 0] = 0
    return interval_mask(
        (np.zeros_like(place), hi), token_class=token_class, class_mask=class_mask.reshape(len(kinds), -1)
    )
