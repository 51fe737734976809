"""Who sends which part of which tensor to whom, so that every rank has what its new stages need.

Pure. It is derived from what survivors really hold (a failure may come while an earlier recovery is half done), and
parts are ranges of a whole tensor, so holder and receiver may differ in tensor parallelism. What a rank has itself it
never receives; of several holders the one that has sent the fewest bytes so far sends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of the dimension along which a tensor is cut, in the order in which they lie in the local part."""


@dataclass(frozen=True)
class Copy:
    name: str
    source: int
    target: int
    source_start: int
    """In the source's local part, along the dimension."""
    target_start: int
    length: int
    num_bytes: int


def copies(
    held: Mapping[int, Mapping[str, Ranges]],
    needed: Mapping[int, Mapping[str, Ranges]],
    unit_bytes: Mapping[str, int],
) -> tuple[list[Copy], list[str]]:
    """All copies, those within a rank included, and the names of tensors of which some part is held by nobody.

    Args:
        held, needed: by rank and name, the ranges of the local part.
        unit_bytes: of each tensor, per unit along the dimension."""
    holders: dict[str, list[int]] = {}
    for rank in sorted(held):
        for name in held[rank]:
            holders.setdefault(name, []).append(rank)
    sent = dict.fromkeys(held, 0)
    result: list[Copy] = []
    missing = []
    for target in sorted(needed):
        for name, wanted in needed[target].items():
            rest = wanted_parts(wanted)
            others = sorted((rank for rank in holders.get(name, ()) if rank != target), key=lambda rank: sent[rank])
            for source in [target] * (name in held.get(target, ())) + others:
                found, rest = take(rest, held[source][name])
                unit = unit_bytes[name]
                result += [Copy(name, source, target, s, t, length, unit * length) for s, t, length in found]
                if source != target:
                    sent[source] += unit * sum(length for *_, length in found)
            if rest:
                missing.append(name)
    return result, missing


Part = tuple[int, int, int]
"""(first, last, place of `first` in the local part)."""


def wanted_parts(ranges: Ranges) -> list[Part]:
    parts, place = [], 0
    for first, last in ranges:
        parts.append((first, last, place))
        place += last - first
    return parts


def take(wanted: Sequence[Part], held: Ranges) -> tuple[list[tuple[int, int, int]], list[Part]]:
    """What of `wanted` a holder has, as (start in its part, start in the wanted part, length), and what is left."""
    found = []
    rest: list[Part] = []
    for first, last, place in wanted:
        open_parts = [(first, last)]
        for have_first, have_last, have_place in wanted_parts(held):
            still_open = []
            for a, b in open_parts:
                low, high = max(a, have_first), min(b, have_last)
                if low >= high:
                    still_open.append((a, b))
                    continue
                found.append((have_place + low - have_first, place + low - first, high - low))
                still_open += [(a, low)] * (a < low) + [(high, b)] * (high < b)
            open_parts = still_open
        rest += [(a, b, place + a - first) for a, b in open_parts]
    return found, rest


def moved_bytes(made: Iterable[Copy]) -> int:
    """Between ranks."""
    return sum(copy.num_bytes for copy in made if copy.source != copy.target)
