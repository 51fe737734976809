"""The lowered attention mask: for each token a class and at most two intervals of keys, and a mask over classes.

Query q sees key k if k lies in one of q's intervals [lo, hi) and `class_mask[class of q, class of k]`. This is exact
where the bits of a bitfield (motet.attention.masks.bitfield) cannot tell two images or two packed documents apart, and
takes 18 bytes a token instead of T.

Limits: 64 classes, so that a set of classes is one word; 2^31 - 1 tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from motet.errors import UserError

Int16 = NDArray[np.int16]
Int32 = NDArray[np.int32]
UInt64 = NDArray[np.uint64]
Bool = NDArray[np.bool_]

MAX_CLASSES = 64


@dataclass(frozen=True, eq=False)
class IntervalMask:
    """The mask of one sequence of T tokens. A token whose intervals are empty sees nothing (padding)."""

    token_class: Int16
    """[T], in 0 .. C-1."""
    lo: Int32
    """[T, 2]: where the intervals of keys begin, in ascending order. Where there is none, lo = hi = 0."""
    hi: Int32
    """[T, 2]: where they end (exclusive). The two neither overlap nor touch."""
    class_mask: Bool
    """[C, C]: whether a query of class a (row) may see a key of class b (column)."""

    def __post_init__(self) -> None:
        length, classes = len(self.token_class), len(self.class_mask)
        _check(self.lo.shape == self.hi.shape == (length, 2), "lo and hi must have the shape [T, 2]")
        _check(self.class_mask.shape == (classes, classes), "class_mask must be square")
        _check(classes <= MAX_CLASSES, f"{classes} classes of tokens; at most {MAX_CLASSES} fit")
        if length == 0:
            return
        _check(self.token_class.min() >= 0 and self.token_class.max() < classes, "a token's class is not in class_mask")
        _check(self.lo.min() >= 0 and self.hi.max() <= length, f"an interval leaves [0, {length})")
        empty = self.lo == self.hi
        _check(bool((self.lo <= self.hi).all()) and not self.lo[empty].any(), "an empty interval must be [0, 0)")
        ascending = ~empty[:, 0] & (self.hi[:, 0] < self.lo[:, 1])
        _check(bool((empty[:, 1] | ascending).all()), "intervals must ascend, apart from one another")

    @property
    def num_tokens(self) -> int:
        return len(self.token_class)

    @cached_property
    def visible_classes(self) -> UInt64:
        """[C]: bit b of word a says whether a query of class a may see keys of class b."""
        bits = np.left_shift(np.uint64(1), np.arange(len(self.class_mask), dtype=np.uint64))
        return np.bitwise_or.reduce(np.where(self.class_mask, bits, np.uint64(0)), axis=1)

    def dense(self) -> Bool:
        """[T, T], for short sequences and for looking at."""
        keys = np.arange(self.num_tokens)
        inside = ((self.lo[:, :, None] <= keys) & (keys < self.hi[:, :, None])).any(axis=1)
        return inside & self.class_mask[self.token_class][:, self.token_class]

    def padded(self, num_tokens: int) -> "IntervalMask":
        """Adds tokens at the end that see nothing and are not seen, so that rows of a batch have one length."""
        more = num_tokens - self.num_tokens
        if more < 0:
            raise ValueError(f"{self.num_tokens} tokens cannot be padded to {num_tokens}")
        lo, hi = (np.pad(ends, ((0, more), (0, 0))) for ends in (self.lo, self.hi))
        return IntervalMask(np.pad(self.token_class, (0, more)), lo, hi, self.class_mask)


def interval_mask(
    first: tuple[NDArray, NDArray],
    second: tuple[NDArray, NDArray] | None = None,
    *,
    token_class: NDArray | None = None,
    class_mask: NDArray | None = None,
) -> IntervalMask:
    """The mask of intervals (lo [T], hi [T]) that may be empty, out of order, overlap or touch.

    Without classes all tokens are of one."""
    length = len(first[0])
    # One column after the other in memory: what reads one of them reads it at full speed.
    lo, hi = np.zeros((2, length), np.int32).T, np.zeros((2, length), np.int32).T
    for column, ends in enumerate((first, second)):
        if ends is not None:
            lo[:, column], hi[:, column] = ends
            empty = lo[:, column] >= hi[:, column]
            lo[:, column][empty] = hi[:, column][empty] = 0
    if second is not None:
        _put_in_order(lo, hi)
    if token_class is None or class_mask is None:
        token_class, class_mask = np.zeros(length, np.int16), np.ones((1, 1), bool)
    return IntervalMask(token_class.astype(np.int16, copy=False), lo, hi, class_mask.astype(bool, copy=False))


def side_by_side(masks: Sequence[IntervalMask]) -> IntervalMask:
    """The mask of sequences one after the other that do not see each other.

    Raises `UserError` where that takes more than 64 classes."""
    first_class: dict[bytes, int] = {}
    relations: list[Bool] = []
    for mask in masks:
        if mask.class_mask.tobytes() not in first_class:
            first_class[mask.class_mask.tobytes()] = sum(map(len, relations))
            relations.append(mask.class_mask)
    num_classes = sum(map(len, relations))
    if num_classes > MAX_CLASSES:
        raise UserError(f"the masks of packed samples have {num_classes} classes of tokens; {MAX_CLASSES} fit")
    class_mask = np.ones((num_classes, num_classes), bool)  # Classes of different samples never meet.
    for relation, first in zip(relations, first_class.values(), strict=True):
        class_mask[first : first + len(relation), first : first + len(relation)] = relation
    length = sum(mask.num_tokens for mask in masks)
    token_class = np.zeros(length, np.int16)
    lo, hi = np.zeros((2, length), np.int32).T, np.zeros((2, length), np.int32).T
    start = 0
    for mask in masks:
        rows = slice(start, start + mask.num_tokens)
        token_class[rows] = mask.token_class + first_class[mask.class_mask.tobytes()]
        is_there = mask.hi > mask.lo
        lo[rows], hi[rows] = np.where(is_there, mask.lo + start, 0), np.where(is_there, mask.hi + start, 0)
        start += mask.num_tokens
    return IntervalMask(token_class, lo, hi, class_mask)


def _put_in_order(lo: Int32, hi: Int32) -> None:
    there = hi[:, 1] > 0
    swapped = there & ((hi[:, 0] == 0) | (lo[:, 1] < lo[:, 0]))
    if swapped.any():
        for ends in (lo, hi):
            ends[:, 0], ends[:, 1] = np.where(swapped, ends[:, ::-1].T, ends.T)
    joined = there & (hi[:, 1] > 0) & (lo[:, 1] <= hi[:, 0])
    if joined.any():
        np.maximum(hi[:, 0], hi[:, 1], out=hi[:, 0], where=joined)
        lo[:, 1][joined] = hi[:, 1][joined] = 0


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
