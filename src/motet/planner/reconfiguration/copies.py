"""Plans the copies that move tensor slices between ranks, so that every rank has what its new stages need (thesis 2.5).

Pure. It serves the plans of `motet.planner.reconfiguration.shard_map`, where names are layers, and recoveries
(`motet.resilience.state_transfer`), where names are parameters and `held` is what survivors really hold, as a failure
may come while an earlier recovery is half done. Parts are ranges of a whole tensor, so source and target may differ in
tensor parallelism. What a rank has itself it never receives. A source in the target's own node is preferred: it needs
no network. Among the other sources, the rank that sends most sends as little as possible.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from motet.ragged_arrays import Floats


def balanced_sources(sizes: Sequence[float], holders: Sequence[Sequence[int]], *, num_ranks: int) -> list[int]:
    """Chooses the holder that sends each piece, so that the rank that sends most sends as little as possible.

    From the largest piece to the smallest it takes the least loaded holder; then pieces are passed on along chains of
    holders while that helps. Exact for pieces of equal size, as Harvey et al. 2003 show for semi-matchings."""
    load: Floats = np.zeros(num_ranks)
    source = [-1] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], len(holders[i]))):
        source[i] = min(holders[i], key=lambda rank: (load[rank], rank))
        load[source[i]] += sizes[i]
    sent: dict[int, set[int]] = defaultdict(set)
    for i, rank in enumerate(source):
        sent[rank].add(i)
    while sent:
        chain = _relieving_chain(max(sent, key=lambda rank: load[rank]), sizes, holders, source, sent, load)
        if chain is None:
            break
        for i, rank in chain:
            sent[source[i]].remove(i)
            load[source[i]] -= sizes[i]
            source[i] = rank
            sent[rank].add(i)
            load[rank] += sizes[i]
    return source


def _relieving_chain(
    fullest: int,
    sizes: Sequence[float],
    holders: Sequence[Sequence[int]],
    source: Sequence[int],
    sent: Mapping[int, set[int]],
    load: Floats,
) -> list[tuple[int, int]] | None:
    """Returns (piece, its new source) along a chain from the fullest rank, after which every rank of the chain sends
    less than the fullest did; None if there is none."""
    came_by: dict[int, tuple[int, int]] = {}
    """By rank reached: the piece that it would take, and the rank that sends it now."""
    queue, seen = [fullest], {fullest}
    while queue:
        rank = queue.pop(0)
        for i in sorted(sent.get(rank, ()), key=lambda i: sizes[i]):
            for other in holders[i]:
                if other in seen or sizes[i] <= 0:
                    continue
                # Along the chain, `other` takes piece i and may pass on one of its own.
                seen.add(other)
                came_by[other] = (i, rank)
                if load[other] + sizes[i] < load[fullest] * (1 - 1e-12):
                    return _chain(other, fullest, came_by, sizes, load)
                queue.append(other)
    return None


def _chain(
    end: int, fullest: int, came_by: Mapping[int, tuple[int, int]], sizes: Sequence[float], load: Floats
) -> list[tuple[int, int]] | None:
    chain: list[tuple[int, int]] = []
    given = 0.0
    rank = end
    while rank != fullest:
        i, before = came_by[rank]
        if load[rank] + sizes[i] - given >= load[fullest] * (1 - 1e-12):
            return None
        chain.append((i, rank))
        given, rank = sizes[i], before
    return chain


Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of the dimension along which a tensor is cut, in their order in the local part."""

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Copy(Generic[Name]):
    """One slice of a tensor, from one rank's local part to another's."""

    name: Name
    source: int
    target: int
    start: int
    """Along the dimension, in the whole tensor; the next two are in the local parts of source and target."""
    source_start: int
    target_start: int
    length: int
    num_bytes: float


@dataclass(frozen=True)
class _Piece(Generic[Name]):
    """A slice that one target lacks and that the same ranks hold."""

    name: Name
    target: int
    start: int
    target_start: int
    length: int
    holders: tuple[int, ...]


def plan_copies(
    held: Mapping[int, Mapping[Name, Ranges]],
    needed: Mapping[int, Mapping[Name, Ranges]],
    unit_bytes: Mapping[Name, float],
    *,
    devices_per_node: int,
) -> tuple[list[Copy[Name]], list[Name]]:
    """Returns all copies, including those within a rank, and the names of tensors of which no rank holds some part.

    Args:
        held, needed: by rank and name, the ranges of the local part.
        unit_bytes: bytes of each tensor per unit along the dimension.
        devices_per_node: node n has the ranks [n * devices_per_node, (n + 1) * devices_per_node)."""
    segments = _segments(held)
    within: list[Copy[Name]] = []
    pieces: list[_Piece[Name]] = []
    missing: dict[Name, None] = {}
    for target in sorted(needed):
        for name, wanted in needed[target].items():
            found, lacking = match_parts(local_parts(wanted), held.get(target, {}).get(name, ()))
            unit = unit_bytes[name]
            within += [Copy(name, target, target, start, s, t, length, unit * length) for start, s, t, length in found]
            for low, high, ranks in segments.get(name, ()):
                near = tuple(rank for rank in ranks if rank // devices_per_node == target // devices_per_node)
                found, lacking = match_parts(lacking, ((low, high),))
                pieces += [_Piece(name, target, start, t, length, near or ranks) for start, _, t, length in found]
            if lacking:
                missing[name] = None
    sources = balanced_sources(
        [unit_bytes[piece.name] * piece.length for piece in pieces],
        [piece.holders for piece in pieces],
        num_ranks=max(held, default=-1) + 1,
    )
    sent = [
        Copy(
            name=piece.name,
            source=source,
            target=piece.target,
            start=piece.start,
            source_start=next(
                place + piece.start - first
                for first, last, place in local_parts(held[source][piece.name])
                if first <= piece.start < last
            ),
            target_start=piece.target_start,
            length=piece.length,
            num_bytes=unit_bytes[piece.name] * piece.length,
        )
        for piece, source in zip(pieces, sources, strict=True)
    ]
    return [*within, *sent], list(missing)


_Segment = tuple[int, int, tuple[int, ...]]
"""(first, last, the ranks that hold all of it); no rank's range begins or ends inside of it."""


def _segments(held: Mapping[int, Mapping[Name, Ranges]]) -> dict[Name, list[_Segment]]:
    """Returns the segments of each tensor that some rank holds."""
    holders: dict[Name, list[tuple[int, Ranges]]] = defaultdict(list)
    for rank in sorted(held):
        for name, ranges in held[rank].items():
            holders[name].append((rank, ranges))
    result = {}
    for name, parts in holders.items():
        cuts = sorted({cut for _, ranges in parts for bounds in ranges for cut in bounds})
        segments = (
            (a, b, tuple(rank for rank, ranges in parts if any(first <= a < last for first, last in ranges)))
            for a, b in pairwise(cuts)
        )
        result[name] = [segment for segment in segments if segment[2]]
    return result


Part = tuple[int, int, int]
"""(first, last, place of `first` in the local part)."""


def local_parts(ranges: Ranges) -> list[Part]:
    """Returns the ranges of a local part with their places in it."""
    parts, place = [], 0
    for first, last in ranges:
        parts.append((first, last, place))
        place += last - first
    return parts


def match_parts(wanted: Sequence[Part], held: Ranges) -> tuple[list[tuple[int, int, int, int]], list[Part]]:
    """Returns what a holder has of `wanted`, as (start in the whole tensor, in its local part, in the wanted part,
    length), and the parts that it lacks."""
    found = []
    rest: list[Part] = []
    for first, last, place in wanted:
        open_parts = [(first, last)]
        for have_first, have_last, have_place in local_parts(held):
            still_open = []
            for a, b in open_parts:
                low, high = max(a, have_first), min(b, have_last)
                if low >= high:
                    still_open.append((a, b))
                    continue
                found.append((low, have_place + low - have_first, place + low - first, high - low))
                still_open += [(a, low)] * (a < low) + [(high, b)] * (high < b)
            open_parts = still_open
        rest += [(a, b, place + a - first) for a, b in open_parts]
    return found, rest


def num_moved_bytes(made: Iterable[Copy[Name]]) -> float:
    """Bytes that travel between different ranks."""
    return sum(copy.num_bytes for copy in made if copy.source != copy.target)
