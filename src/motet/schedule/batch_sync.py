"""Shares of a contrastive loss: the rows of its similarity matrix that each member of its group contributes.

The loss is one action of all ranks that make its features (DistMM section 5.4, batch-sync). Each of them puts in what
it has made itself: the ranks of a tower's last stage share the samples of a route evenly, so nothing is sent into the
loss. What the group exchanges within the action is up to `motet.models.stages.contrastive`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from motet.assignment.batch_assignment import split_evenly
from motet.errors import UserError
from motet.ragged_arrays import Ints
from motet.schedule.routes import Cell, Route, Routes

Pair = tuple[str, str]


def pairs_of(towers: Sequence[str], anchor: str | None) -> tuple[Pair, ...]:
    """The pairs of towers that a loss compares: all, or those of the anchor with each other one."""
    if len(towers) < 2:
        raise UserError(f"towers: {', '.join(towers) or 'none'} given; a contrastive loss needs at least two")
    if anchor is None:
        return tuple(combinations(towers, 2))
    if anchor not in towers:
        raise UserError(f"anchor: there is no tower {anchor!r}; give {', '.join(towers)}")
    return tuple((anchor, other) for other in towers if other != anchor)


@dataclass(frozen=True, eq=False)
class Shares:
    """Shares of one contrastive batch; samples are numbered from 0 within it."""

    places: Mapping[str, Sequence[Ints]]
    """For each tower and member of the group: the samples whose features it puts in, ascending. Samples without an item
    for the tower are nobody's."""
    with_gradient: frozenset[str]
    """The towers whose features get a gradient."""


def samples_of_ranks(routes: Routes, route: Route) -> dict[int, tuple[int, ...]]:
    """Samples (indices into the global batch) that each source rank of a route into a loss contributes."""
    ranks = routes.stage(route.source).ranks
    return dict(zip(ranks, split_evenly(route.samples, len(ranks)), strict=True))


def num_comparisons(pairs: Sequence[Pair], towers: Collection[str]) -> int:
    """Number of pairs of towers in which a sample with items for these towers is compared: its weight in the loss."""
    return sum(first in towers and second in towers for first, second in pairs)


def shares(routes: Routes, cell: Cell) -> Shares:
    """Shares of a loss's cell."""
    members = routes.samples(cell)
    place = {sample: i for i, sample in enumerate(members)}
    ranks = routes.stage(cell).ranks
    held: dict[str, list[list[int]]] = {
        edge.source: [[] for _ in ranks] for edge in routes.plan.edges if edge.target == cell.module
    }
    for route in routes.incoming[cell]:
        for rank, samples in samples_of_ranks(routes, route).items():
            held[route.source.module][ranks.index(rank)] += [place[i] for i in samples]
    return Shares(
        places={name: [np.array(sorted(own), dtype=np.int64) for own in of_all] for name, of_all in held.items()},
        with_gradient=frozenset(route.source.module for route in routes.incoming[cell] if route.carries_gradient),
    )


def whole(places: Mapping[str, Sequence[int]], with_gradient: frozenset[str]) -> Shares:
    """All in one process. `places`: of each tower, the samples that have an item for it."""
    return Shares({name: [np.array(own, dtype=np.int64)] for name, own in places.items()}, with_gradient)
