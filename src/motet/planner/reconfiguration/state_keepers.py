"""Who keeps the optimizer's state of which parameter: f + 1 holders, each in another pipeline (ZeRO-1 that survives).

Plain ZeRO-1 (Rajbhandari et al. 2020, "ZeRO", section 5.1) gives the state of a parameter to one of its replicas, which
a loss takes along. Here f + 1 pipelines have it. Pipelines have nodes of their own, so any f nodes that are lost leave
one of them whole, and with it all of the state.

Pure, and the same wherever it is computed. Who has a state already is preferred, so that little moves; what is left is
balanced in bytes, from the largest parameter to the smallest.

Limits: a parameter's state is not divided (but as tensor parallelism divides the parameter itself), so whoever keeps
that of a large embedding may have more than others.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLACK = 1.1
"""Holders may differ so much before a state moves for balance alone."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Ranks that hold one parameter together: a tensor-parallel group, or one rank that holds it whole."""

    ranks: tuple[int, ...]
    pipeline: int
    num_bytes: float
    """Of the state, on each rank."""
    lacking_bytes: float
    """What they would have to get from others, all together."""


Keepers = Mapping[str, Sequence[Holder]]
"""By parameter."""


def choose_keepers(holders: Mapping[str, Sequence[Holder]], number: int) -> Keepers:
    """`holders`: by parameter. `number`: f + 1; where there are fewer pipelines, all of them."""
    load: dict[int, float] = defaultdict(float)
    chosen: dict[str, list[Holder]] = {}
    for name in sorted(holders, key=lambda name: (-max(h.num_bytes for h in holders[name]), name)):
        rest = list(holders[name])
        chosen[name] = []
        while rest and len(chosen[name]) < number:
            best = min(rest, key=lambda h: (h.lacking_bytes, _fullest(load, h) + h.num_bytes, h.ranks))
            _add(load, best, +1)
            chosen[name].append(best)
            rest = [h for h in rest if h.pipeline != best.pipeline]
    _balance(chosen, holders, load)
    return chosen


def _balance(chosen: dict[str, list[Holder]], holders: Mapping[str, Sequence[Holder]], load: dict[int, float]) -> None:
    """Passes states on from those that keep most, as long as that helps."""
    kept: dict[int, set[str]] = defaultdict(set)
    for name, keepers in chosen.items():
        for keeper in keepers:
            for rank in keeper.ranks:
                kept[rank].add(name)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank in sorted(load, key=lambda rank: (-load[rank], rank)):
            while (move := _best_move(rank, kept[rank], chosen, holders, load)) is not None:
                name, old, new = move
                chosen[name][chosen[name].index(old)] = new
                for holder, sign in ((old, -1), (new, +1)):
                    _add(load, holder, sign)
                    for member in holder.ranks:
                        (kept[member].add if sign > 0 else kept[member].remove)(name)
                has_moved = True


def _best_move(
    rank: int,
    kept: set[str],
    chosen: Mapping[str, Sequence[Holder]],
    holders: Mapping[str, Sequence[Holder]],
    load: Mapping[int, float],
) -> tuple[str, Holder, Holder] | None:
    """A parameter that the rank keeps, with the keeper that it is, and the one that is to be it."""
    best = None
    for name in kept:
        old = next(keeper for keeper in chosen[name] if rank in keeper.ranks)
        taken = {keeper.pipeline for keeper in chosen[name] if keeper is not old}
        for new in holders[name]:
            after = _fullest(load, new) + new.num_bytes
            if new.pipeline in taken or rank in new.ranks or after * SLACK > load[rank]:
                continue
            # Nothing to move comes first; then few large ones.
            order = (new.lacking_bytes > 0, -new.num_bytes, after, name, new.ranks)
            if best is None or order < best[0]:
                best = order, (name, old, new)
    return None if best is None else best[1]


def _fullest(load: Mapping[int, float], holder: Holder) -> float:
    return max(load.get(rank, 0.0) for rank in holder.ranks)


def _add(load: dict[int, float], holder: Holder, sign: int) -> None:
    for rank in holder.ranks:
        load[rank] += sign * holder.num_bytes
