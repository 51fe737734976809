"""Who puts what into a contrastive loss: the rows of its similarity matrix as its group shares them.

The loss is one action of all ranks that make its features (DistMM section 5.4, batch-sync). Each of them puts in what
it has made itself: the ranks of a tower's last stage share the samples of a route evenly, so nothing is sent into the
loss. What the group exchanges within the action is up to `motet.models.contrastive_stage`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from motet.arrays import Ints
from motet.data.assignment import split_evenly
from motet.errors import UserError
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
    """Of one contrastive batch of `num_samples` samples, which count from 0 here."""

    num_samples: int
    places: Mapping[str, Sequence[Ints]]
    """For each tower and member of the group: the samples whose features it puts in, ascending."""
    with_gradient: frozenset[str]
    """The towers whose features get a gradient."""


def samples_of_ranks(routes: Routes, route: Route) -> dict[int, tuple[int, ...]]:
    """Of a route into a loss: the samples (indices into the global batch) that each rank of its source puts in."""
    ranks = routes.stage(route.source).ranks
    return dict(zip(ranks, split_evenly(route.samples, len(ranks)), strict=True))


def shares(routes: Routes, cell: Cell) -> Shares:
    """Of a loss's cell. Raises `UserError` if one of its samples lacks a tower: it would have nothing to be alike."""
    members = routes.samples(cell)
    place = {sample: i for i, sample in enumerate(members)}
    ranks = routes.stage(cell).ranks
    held: dict[str, list[list[int]]] = {
        edge.source: [[] for _ in ranks] for edge in routes.plan.edges if edge.target == cell.module
    }
    for route in routes.incoming[cell]:
        for rank, samples in samples_of_ranks(routes, route).items():
            held[route.source.module][ranks.index(rank)] += [place[i] for i in samples]
    for name, of_all in held.items():
        if sum(map(len, of_all)) < len(members):
            raise UserError(
                f"batch: of the {len(members)} samples of a contrastive batch {sum(map(len, of_all))} have something "
                f"for tower {name}; give every sample an item for every tower"
            )
    return Shares(
        num_samples=len(members),
        places={name: [np.array(sorted(own), dtype=np.int64) for own in of_all] for name, of_all in held.items()},
        with_gradient=frozenset(route.source.module for route in routes.incoming[cell] if route.carries_gradient),
    )


def whole(num_samples: int, towers: Sequence[str], with_gradient: frozenset[str]) -> Shares:
    """All in one process."""
    return Shares(num_samples, {name: [np.arange(num_samples)] for name in towers}, with_gradient)
