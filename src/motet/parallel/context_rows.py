"""Rows of a route's tensors on the members of context-parallel groups: who holds which, and how they are exchanged.

Groups of equal size hold the same tokens, so each member sends its rows to one of the same place. Where the sizes of
neighbouring groups differ, the sending group gathers all rows, and each receiver takes its own; gradients are gathered
by the receiving group and go back whole. What enters another module is whole on every member of the sending group, and
each receiver takes the rows that stand among its tokens. All of it follows from the plan and the samples' layouts, so
senders and receivers derive the same.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from motet.assignment.sample import Sample
from motet.attention.masks.distribution import Rows, held_outputs
from motet.parallel.context_attention import ContextParallel, collect_rows
from motet.plan import ContextOptions
from motet.schedule.routes import Route, Routes

HeldTokens = Callable[[int, Sequence[Sample], ContextOptions, int], list[Rows] | None]
"""(layer, samples, options, cp_size) -> by member of a group of this size, the tokens that it holds of what enters the
layer; None: every member has all of them."""


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

    def received(self, route: Route) -> list[Rows] | None:
        """By member of the receiving group: which rows it gets of what the route carries. None: every member gets all,
        or what the sender of the same place holds."""
        if route not in self._received:
            self._received[route] = self._derive_received(route)
        return self._received[route]

    def _derive_received(self, route: Route) -> list[Rows] | None:
        plan = self._routes.plan
        target = plan.modules[route.target.module]
        cp_size = self._routes.stage(route.target).cp_size
        if cp_size == 1 or target.kind == "loss":
            return None
        if route.source.module == route.target.module:
            return self._held_inside(route, cp_size) if self.changes_size(route) else None
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

    def _held_inside(self, route: Route, cp_size: int) -> list[Rows] | None:
        """By member of a group of this size: which rows it holds of what goes from stage to stage of one module."""
        assert self._held_tokens is not None
        options = self._routes.plan.modules[route.target.module].context
        first_layer = self._routes.stage(route.target).layers[0]
        return self._held_tokens(first_layer, [self._samples[i] for i in route.samples], options, cp_size)

    def changes_size(self, route: Route) -> bool:
        """Whether the route leads to a stage of the same module whose group has another size."""
        source, target = self._routes.stage(route.source), self._routes.stage(route.target)
        return route.source.module == route.target.module and source.cp_size != target.cp_size

    def num_sent(self, route: Route) -> int | None:
        """How many rows a sender has for a route that changes the group's size; None: as many as its own output."""
        held = self._held_inside(route, 1) if self.changes_size(route) else None
        return None if held is None else len(held[0])

    def gather_output(self, route: Route, output: Tensor) -> Tensor | None:
        """The rows of all members of this stage's group, for a route that changes its size; None: `output` is what is
        sent. Collective over the group."""
        held = None if self._cp is None or not self.changes_size(route) else self._held_inside(route, self._cp.size)
        return None if held is None else self._gather(output, held)

    def for_member(self, output: Tensor, route: Route, member: int) -> Tensor:
        """The rows of `output` that a member of the receiving group gets. Within a module a member that holds no token
        gets one that stands in (`ContextSequence.num_rows`)."""
        held = self.received(route)
        if held is None:
            return output
        rows = torch.from_numpy(held[member]).to(output.device)
        if route.target.module != route.source.module:
            return output.index_select(0, rows)
        return output.index_select(-2, rows if len(rows) else rows.new_zeros(1))

    def gather_gradient(self, route: Route, gradient: Tensor) -> Tensor:
        """The gradient of all that the route brought, from the rows of each member. Collective over the group."""
        held = self.received(route)
        return gradient if held is None or self._cp is None else self._gather(gradient, held)

    def own_gradient(self, route: Route, gradient: Tensor, output: Tensor) -> Tensor:
        """This member's rows of the gradient that came back for `output`."""
        if not self.changes_size(route):
            return gradient
        source, target = self._routes.stage(route.source), self._routes.stage(route.target)
        held = self._held_inside(route, source.cp_size)
        if held is None:
            # Both groups compute alike on all members, whose gradients add up to the whole.
            return gradient * (target.cp_size / source.cp_size)
        if self._cp is None:
            return gradient
        own = torch.from_numpy(held[self._cp.rank]).to(gradient.device)
        # A token that stands in has no gradient.
        return gradient.index_select(-2, own) if len(own) else torch.zeros_like(output)

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

    def _gather(self, own: Tensor, held: Sequence[Rows]) -> Tensor:
        """[..., own rows, H] -> [..., T, H] of all members; a token that stands in is left out."""
        assert self._cp is not None
        rows = own.flatten(0, -2)[: len(held[self._cp.rank])]
        return collect_rows(rows, held, self._cp).unflatten(0, (*own.shape[:-2], -1))
