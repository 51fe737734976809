"""Arrays of rows of unequal length, and of runs of consecutive numbers, where lists of objects would be too slow."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Rows:
    """Row i is `values[starts[i] : starts[i + 1]]`."""

    starts: Ints
    values: Ints

    def __getitem__(self, i: int) -> Ints:
        return self.values[self.starts[i] : self.starts[i + 1]]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Ints:
        return np.diff(self.starts)

    def to_lists(self) -> list[list[int]]:
        values, starts = self.values.tolist(), self.starts.tolist()
        return [values[begin:end] for begin, end in pairwise(starts)]

    def only(self, *, none: int, many: int) -> Ints:
        """Single value of each row: `none` for empty rows, `many` for rows with several values."""
        result = np.full(len(self), none)
        result[self.lengths > 1] = many
        single = self.lengths == 1
        result[single] = self.values[self.starts[:-1][single]]
        return result

    def where(self, keep: Bools) -> "Rows":
        """The rows without the values that are not kept; `keep` is by value."""
        kept = keep[self.values]
        return Rows(starts_of(kept)[self.starts], self.values[kept])

    def joined(self, other: "Rows") -> "Rows":
        """Each row followed by the other table's row."""
        starts = self.starts + other.starts
        values = np.empty(starts[-1], dtype=np.int64)
        values[ranges(starts[:-1], self.lengths)] = self.values
        values[ranges(starts[:-1] + self.lengths, other.lengths)] = other.values
        return Rows(starts, values)

    def selected(self, rows: Ints) -> "Rows":
        """Returns these rows, in this order."""
        lengths = self.lengths[rows]
        return Rows(starts_of(lengths), self.values[ranges(self.starts[rows], lengths)])


def stacked(tables: Sequence[Rows]) -> Rows:
    """The rows of all tables, one table after the other."""
    return Rows(
        starts_of(np.concatenate([table.lengths for table in tables])), np.concatenate([t.values for t in tables])
    )


def starts_of(lengths: Ints | Bools) -> Ints:
    """Start of each run if they follow each other, and the end of the last one."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def ranges(first: Ints, lengths: Ints) -> Ints:
    """first[0], first[0] + 1, ... (lengths[0] of them), first[1], ..."""
    starts = starts_of(lengths)
    return np.repeat(first - starts[:-1], lengths) + np.arange(starts[-1])


def rows_of(owner: Ints, num_rows: int) -> Rows:
    """Row i lists, in ascending order, the positions at which `owner` is i."""
    return Rows(starts_of(np.bincount(owner, minlength=num_rows)), np.argsort(owner, kind="stable"))


def distinct(codes: Ints, num_codes: int) -> tuple[Ints, Ints]:
    """The distinct codes, ascending, and the place of each code among them. All codes are below `num_codes`."""
    if num_codes > 4 * len(codes) + 2**16:
        values, places = np.unique(codes, return_inverse=True)
        return values, places
    seen = np.zeros(num_codes, dtype=bool)
    seen[codes] = True
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[codes]
