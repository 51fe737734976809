"""Runs a contrastive loss: its microbatch is a contrastive batch, its group all ranks that make features.

DistMM's batch-sync instruction (section 5.4): the forward puts the features of several microbatches together and
computes the loss, the backward hands the gradients back to their microbatches. What the group exchanges follows from
the routes alone, so every rank derives the same.
"""

from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor

from motet.models.stages.contrastive import ALONE, ContrastiveStage, RowExchange
from motet.runtime.stage_runner import Saved, StageRunner
from motet.schedule.batch_sync import samples_of_ranks, shares
from motet.schedule.routes import Cell, Route


class LossRunner(StageRunner):
    """The contrastive loss on this rank."""

    @property
    def _rank(self) -> int:
        return self.stage.ranks[(self._cp or ALONE).rank]

    def receives(self, route: Route) -> bool:
        """Routes from stages on other ranks end there."""
        return self._rank in self._routes.stage(route.source).ranks

    def forward(self, cell: Cell, inputs: Mapping[Route, Tensor], *, is_split: bool = False) -> None:
        """`inputs`: what the routes from this rank's own stages carry, whole."""
        keeps_graph = cell in self._routes.with_backward
        leaves = {
            route: self._own_embeddings(route, carried).requires_grad_(route.carries_gradient and keeps_graph)
            for route, carried in inputs.items()
        }
        with torch.set_grad_enabled(keeps_graph):
            output = cast(ContrastiveStage, self.module).loss(self._by_tower(cell, leaves), shares(self._routes, cell))
            self.loss_sum += output.detach()
            if keeps_graph:
                self._saved[cell] = Saved(leaves, output, output * self._loss_scale, None)

    def backward(self, cell: Cell, gradients: Mapping[Route, Tensor]) -> dict[Route, Tensor]:
        """Returns the gradients of what `forward` was given, whole on every rank of their stage."""
        saved = self._saved.pop(cell)
        assert saved.loss is not None
        assert saved.output is not None
        if saved.loss.requires_grad:  # Not on a rank that holds frozen towers, or no samples, of a frozen scale.
            torch.autograd.backward([saved.loss])
        exchange = RowExchange(self._cp or ALONE)
        result = {}
        for route in self._routes.incoming[cell]:
            if not route.carries_gradient:
                continue
            own = saved.inputs[route].grad if route in saved.inputs else None
            if own is None:
                own = saved.output.new_zeros(len(self._own_places(route)), self.module.hidden_size)
            by_rank = samples_of_ranks(self._routes, route)
            ends = np.cumsum([len(samples) for samples in by_rank.values()])
            places = [np.zeros(0, dtype=np.int64) for _ in self.stage.ranks]
            receivers = [self.stage.ranks.index(rank) for rank in by_rank]
            for member, end, samples in zip(receivers, ends, by_rank.values(), strict=True):
                places[member] = np.arange(end - len(samples), end)
            whole = exchange.gather(own, places, receivers)
            if whole is not None:
                result[route] = whole
        exchange.finish()
        return {route: self._carried_gradient(route, embeddings) for route, embeddings in result.items()}

    def backward_weight(self, cell: Cell) -> Iterator[Tensor]:
        """Nothing is left: scale and bias have their gradients with the features'."""
        return iter(())

    def parameters_left(self, cell: Cell) -> set[Tensor]:
        return set()

    def _own_places(self, route: Route) -> list[int]:
        """Where the samples that this rank puts in stand among the route's."""
        own = samples_of_ranks(self._routes, route).get(self._rank, ())
        first = route.samples.index(own[0]) if own else 0
        return list(range(first, first + len(own)))

    def _first_rows(self, route: Route) -> Tensor:
        """Of what a route carries: where each sample's embedding stands, the first of its outputs."""
        tower = self._data_module_of(route.source.module)
        counts = [self._batch.samples[i].num_outputs(tower) for i in route.samples]
        return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64))

    def _own_embeddings(self, route: Route, carried: Tensor) -> Tensor:
        rows = self._first_rows(route)[self._own_places(route)]
        return carried if len(rows) == len(carried) else carried.index_select(0, rows.to(carried.device))

    def _carried_gradient(self, route: Route, embeddings: Tensor) -> Tensor:
        """What else a tower hands on has no part in the loss."""
        tower = self._data_module_of(route.source.module)
        num_rows = sum(self._batch.samples[i].num_outputs(tower) for i in route.samples)
        if num_rows == len(embeddings):
            return embeddings
        whole = embeddings.new_zeros(num_rows, embeddings.shape[1])
        whole[self._first_rows(route).to(whole.device)] = embeddings
        return whole

    def _by_tower(self, cell: Cell, leaves: Mapping[Route, Tensor]) -> dict[str, Tensor]:
        """Each tower's embeddings in the order of the contrastive batch."""
        place = {sample: i for i, sample in enumerate(self._routes.samples(cell))}
        parts: dict[str, list[Route]] = {}
        for route in leaves:
            parts.setdefault(route.source.module, []).append(route)
        result = {}
        for tower, routes in parts.items():
            samples = [place[i] for route in routes for i in samples_of_ranks(self._routes, route)[self._rank]]
            rows = torch.cat([leaves[route] for route in routes])
            order = torch.from_numpy(np.argsort(np.array(samples, dtype=np.int64)))
            result[tower] = rows.index_select(0, order.to(rows.device))
        return result
