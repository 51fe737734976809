"""Rows of a route's tensors on the members of context-parallel groups: which member holds which rows, and how they are
exchanged.

Groups of equal size hold the same tokens, so each member sends its rows to one of the same place. Between stages of one
module whose groups have unequal sizes, each place sends a piece to each place: the rows that both hold. What enters
another module is whole on every member of the sending group, and each receiver takes the rows that stand among its
tokens. All of it follows from the plan and the samples' layouts, so senders and receivers derive the same.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from motet.assignment.sample import Sample, members_of_cell
from motet.attention.masks.distribution import Rows, held_outputs, member_of
from motet.parallel.context.context_attention import ContextParallel, collect_rows
from motet.plan import ContextOptions
from motet.schedule.lower import is_resharded
from motet.schedule.routes import Route, Routes

HeldTokens = Callable[[int, Sequence[Sample], ContextOptions, int], list[Rows] | None]
"""(layer, samples, options, cp_size) -> for each member of a group of this size, the tokens that it holds of the
layer's input; None: every member holds all of them."""

NO_ROWS = np.zeros(0, dtype=np.int64)


class Piece(NamedTuple):
    """Rows that one rank sends to another."""

    sent: Rows
    """Their positions among the sender's rows."""
    kept: Rows
    """Their positions among the receiver's rows."""


class ContextRows:
    """The rows that one stage and its neighbours hold of what routes carry, in one iteration.

    Args:
        cp: this rank's place in the stage's context-parallel group; None: the stage has none.
        held_tokens: of the stage's module.
    """

    def __init__(
        self, routes: Routes, samples: Sequence[Sample], cp: ContextParallel | None, held_tokens: HeldTokens | None
    ) -> None:
        self._routes, self._samples, self._cp, self._held_tokens = routes, samples, cp, held_tokens
        self._received: dict[Route, list[Rows] | None] = {}
        self._pieces: dict[tuple[Route, int, int], Piece | None] = {}

    def received(self, route: Route) -> list[Rows] | None:
        """Returns the rows that each member of the receiving group gets of a route from another module. None: every
        member gets all, or the route stays inside a module."""
        if route not in self._received:
            self._received[route] = self._derive_received(route)
        return self._received[route]

    def _derive_received(self, route: Route) -> list[Rows] | None:
        plan = self._routes.plan
        target = plan.modules[route.target.module]
        cp_size = self._routes.stage(route.target).cp_size
        if cp_size == 1 or target.kind == "loss" or route.source.module == route.target.module:
            return None
        members, carried = self._routes.samples(route.target), set(route.samples)
        source = plan.modules[route.source.module]
        return held_outputs(
            [self._samples[i] for i in members],
            [i in carried for i in members],
            target.data_module(route.target.module),
            source.data_module(route.source.module),
            target.context,
            cp_size,
        )

    def is_resharded(self, route: Route) -> bool:
        """Whether the route leads to a stage of the same module whose group has another size."""
        source, target = self._routes.stage(route.source), self._routes.stage(route.target)
        return route.source.module == route.target.module and is_resharded(source, target)

    def is_whole(self, route: Route, *, gradient: bool) -> bool:
        """Whether every rank that a route, or its gradient, comes to gets all rows that the sender has, for any batch:
        `piece` is None."""
        if self.is_resharded(route):
            return False
        is_shared = self._routes.stage(route.target).cp_size > 1 and route.source.module != route.target.module
        return gradient or not is_shared or self._routes.plan.modules[route.target.module].kind == "loss"

    def piece(self, route: Route, sender: int, receiver: int, *, gradient: bool) -> Piece | None:
        """The rows that one rank sends another (or itself keeps) of what a route carries, or of the gradient that comes
        back. None: all rows that the sender has."""
        source, target = self._routes.stage(route.source), self._routes.stage(route.target)
        begin, end = (receiver, sender) if gradient else (sender, receiver)
        if self.is_resharded(route):
            piece = self._resharded(route, member_of(source, begin), member_of(target, end))
            return Piece(piece.kept, piece.sent) if piece is not None and gradient else piece
        held = None if gradient else self.received(route)
        if held is None:
            return None
        rows = held[member_of(target, end)]
        return Piece(rows, np.arange(len(rows)))

    def _resharded(self, route: Route, source_member: int, target_member: int) -> Piece | None:
        """Returns the rows that two members of groups of unequal size both hold, as they are sent forward."""
        key = (route, source_member, target_member)
        if key not in self._pieces:
            cp_size = self._routes.stage(route.source).cp_size
            sent, kept = (
                self._held_inside(route, cp_size),
                self._held_inside(route, self._routes.stage(route.target).cp_size),
            )
            if sent is None or kept is None:  # Every member has all rows. They take turns to send them.
                in_turn = source_member == target_member % cp_size
                self._pieces[key] = None if in_turn else Piece(NO_ROWS, NO_ROWS)
            else:
                own = sent[source_member], kept[target_member]
                _, *places = np.intersect1d(*own, assume_unique=True, return_indices=True)
                self._pieces[key] = Piece(*places)
        return self._pieces[key]

    def _held_inside(self, route: Route, cp_size: int) -> list[Rows] | None:
        """Returns the rows that each member of a group of this size holds of a route inside a module."""
        assert self._held_tokens is not None
        options = self._routes.plan.modules[route.target.module].context
        first_layer = self._routes.stage(route.target).layers[0]
        members = members_of_cell(self._samples, route.samples, route.target.module)
        return self._held_tokens(first_layer, members, options, cp_size)

    def gather_gradient(self, route: Route, gradient: Tensor) -> Tensor:
        """The gradient of the whole input that a route from another module brought, from the rows of each member.
        Collective over the group."""
        if self._cp is None or (held := self.received(route)) is None:
            return gradient
        return collect_rows(gradient[: len(held[self._cp.rank])], held, self._cp)

    def order_of_received(self, order: Tensor | None, routes: Sequence[Route]) -> Tensor | None:
        """`order` sorts the rows of whole routes, one route after the other; the result sorts those received here."""
        if order is None or self._cp is None:
            return order
        held, first = [], 0
        for route in routes:
            rows = self.received(route)
            assert rows is not None
            held.append(torch.from_numpy(rows[self._cp.rank]) + first)
            first += sum(map(len, rows))
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        return torch.argsort(place[torch.cat(held)])
