"""Timelines: the actions of each rank with their times, and the memory that it held. The simulator predicts a timeline,
the runtime measures one: one type, one plotter for both.

Limits: a rank computes one thing at a time, so its computing spans must not overlap; messages and reductions may.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # numpy takes a while, and the command line reads this file for its help.
    from motet.ragged_arrays import Floats, Ints

SPAN_KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "optimizer": "optimizer step",
    "reduce": "reduction",
    "gather": "all-gather of parameters",
    "message": "message",
    "wait": "wait",
}

BUSY_KINDS = frozenset({"F", "B", "I", "W", "optimizer"})
"""Span kinds that count as work; the rest of a rank's time is its bubble."""


@dataclass(frozen=True, slots=True)
class Span:
    rank: int
    """A message's: its sender."""
    name: str
    """The text of the action or message."""
    kind: str
    """A key of `SPAN_KINDS`; a compute action's is its own `Kind`."""
    start: float
    """Seconds since the iteration's begin."""
    end: float

    @property
    def module(self) -> str:
        """The module that the span belongs to, read off its name; of a message, the one that sends."""
        return self.name.partition("[")[0].removesuffix(".R").removesuffix(".G")


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """One rank's memory: `bytes_held[i]` from `times_s[i]` until `times_s[i + 1]`, at the end the last one.

    Times are ascending and different. What is freed and taken at the same moment is freed first."""

    times_s: "Floats"
    bytes_held: "Ints"

    @property
    def peak_bytes(self) -> int:
        return int(self.bytes_held.max())


SPAN_COLUMNS = [field.name for field in fields(Span)]


class SpanDifference(NamedTuple):
    rank: int
    name: str
    start_s: float
    """Delay of the span's begin in the other timeline, in seconds."""
    duration_s: float
    """Difference of its duration there, in seconds."""


@dataclass(frozen=True)
class TimelineDifference:
    """Difference of another timeline (measured, say) from this one (predicted, say)."""

    iteration_time_ratio: float
    """The other's iteration time over this one's."""
    spans: tuple[SpanDifference, ...]
    """Differences of the spans that stand in both, in this timeline's order."""
    only_here: tuple[Span, ...]
    only_there: tuple[Span, ...]


@dataclass(frozen=True)
class Timeline:
    spans: tuple[Span, ...]
    num_ranks: int = 0
    """Number of ranks: at least as many as the spans show; more if some rank has none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_ranks", max(self.num_ranks, 1 + max((s.rank for s in self.spans), default=-1)))

    @cached_property
    def start_s(self) -> float:
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def end_s(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def iteration_time_s(self) -> float:
        """Seconds from the first span's begin to the last span's end, over all ranks."""
        return self.end_s - self.start_s

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds for which each rank computes."""
        busy = [0.0] * self.num_ranks
        for span in self.spans:
            if span.kind in BUSY_KINDS:
                busy[span.rank] += span.end - span.start
        return tuple(busy)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute, 0 to 1."""
        available = self.num_ranks * self.iteration_time_s
        return 1.0 - sum(self.busy_s) / available if available else 0.0

    def of_rank(self, rank: int) -> list[Span]:
        """The rank's spans by their begin."""
        return sorted((span for span in self.spans if span.rank == rank), key=lambda span: (span.start, span.end))

    def diff(self, other: "Timeline") -> TimelineDifference:
        """Pairs the spans by rank and name; the times of each timeline count from its own begin.

        A name that a rank repeats (a wait) is paired in the order of its spans."""
        mine, theirs = _numbered(self.spans), _numbered(other.spans)
        shift = other.start_s - self.start_s
        return TimelineDifference(
            iteration_time_ratio=other.iteration_time_s / self.iteration_time_s if self.iteration_time_s else 1.0,
            spans=tuple(
                SpanDifference(
                    span.rank,
                    span.name,
                    theirs[key].start - span.start - shift,
                    (theirs[key].end - theirs[key].start) - (span.end - span.start),
                )
                for key, span in mine.items()
                if key in theirs
            ),
            only_here=tuple(span for key, span in mine.items() if key not in theirs),
            only_there=tuple(span for key, span in theirs.items() if key not in mine),
        )

    def to_json(self) -> str:
        """Columns named once, one row a span."""
        rows = ",\n  ".join(json.dumps(astuple(span)) for span in self.spans)
        header = f'{{"num_ranks": {self.num_ranks}, "columns": {json.dumps(SPAN_COLUMNS)}'
        return f'{header}, "spans": [\n  {rows}\n]}}\n' if self.spans else f'{header}, "spans": []}}\n'

    @staticmethod
    def from_json(text: str) -> "Timeline":
        """Raises `ValueError` if the text is not what `to_json` writes."""
        try:
            document = json.loads(text)
            columns, rows, num_ranks = document["columns"], document["spans"], int(document["num_ranks"])
            if columns != SPAN_COLUMNS:
                raise ValueError(f"its columns are {columns}; {SPAN_COLUMNS} are needed")
            spans = tuple(Span(*row) for row in rows)
            for span in spans:
                if span.kind not in SPAN_KINDS or not 0 <= span.rank < num_ranks:
                    raise ValueError(f"span {list(astuple(span))} has an unknown kind or rank")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"timeline: {error}") from error
        return Timeline(spans, num_ranks)


Lanes = Mapping[str, Sequence[Sequence[int]]]
"""Ranks that each lane of a picture stands for, by the timeline's title; the first rank is drawn."""


def lanes_by_title(timelines: Mapping[str, Timeline], lanes: Lanes | None) -> Lanes:
    """Lanes of every title; by default each rank has a lane."""
    return {t: [(rank,) for rank in range(timeline.num_ranks)] for t, timeline in timelines.items()} | dict(lanes or {})


def lane_name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} alike" if len(ranks) > 1 else "")


def _numbered(spans: Iterable[Span]) -> dict[tuple[int, str, int], Span]:
    """The spans by rank, name and how many of that name came before on the rank."""
    result: dict[tuple[int, str, int], Span] = {}
    count: dict[tuple[int, str], int] = {}
    for span in spans:
        key = (span.rank, span.name)
        count[key] = count.get(key, 0) + 1
        result[*key, count[key]] = span
    return result
