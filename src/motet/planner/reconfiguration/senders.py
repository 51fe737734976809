"""Which holder sends each piece, so that the rank that sends most sends as little as possible (thesis 2.5).

Pure. From the largest piece to the smallest the least loaded holder, then pieces are passed on along chains of holders
while that helps: exact for pieces of equal size, as Harvey et al. 2003 show for semi-matchings.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from motet.ragged_arrays import Floats


def balanced_sources(sizes: Sequence[float], holders: Sequence[Sequence[int]], *, num_ranks: int) -> list[int]:
    """For each piece, which of its holders sends it."""
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
    """Pieces to pass on, each to the next holder, after which every rank concerned sends less than the fullest did."""
    came_by: dict[int, tuple[int, int]] = {}
    """For each rank reached: the piece that it would take, and its size before."""
    queue, seen = [fullest], {fullest}
    while queue:
        rank = queue.pop(0)
        for i in sorted(sent.get(rank, ()), key=lambda i: sizes[i]):
            for other in holders[i]:
                if other in seen or sizes[i] <= 0:
                    continue
                # Passed on along the chain, `other` takes piece i and may give one of its own.
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
