"""Runs a contrastive loss: its microbatch is a contrastive batch, its group all ranks that make features.

DistMM's batch-sync instruction (section 5.4): the forward puts the features of several microbatches together and
computes the loss, the backward hands the gradients back to their microbatches. What the group exchanges follows from
the routes alone, so every rank derives the same.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from motet.models.stages.contrastive import ALONE, RowExchange
from motet.runtime.stage_runner import StageRunner
from motet.schedule.batch_sync import Shares, samples_of_ranks, shares
from motet.schedule.routes import Cell, Route


class LossRunner(StageRunner):
    """The contrastive loss on this rank."""

    @property
    def _rank(self) -> int:
        return self.stage.ranks[(self._cp or ALONE).rank]

    def receives(self, route: Route) -> bool:
        """Routes from stages on other ranks end there."""
        return self._rank in self._routes.stage(route.source).ranks

    def _shares(self, cell: Cell) -> Shares:
        return shares(self._routes, cell)

    def _input_gradients(self, cell: Cell, leaves: Mapping[Route, Tensor]) -> dict[Route, Tensor]:
        """The gradients of what `forward` was given, whole on every rank of their stage. Collective."""
        exchange = RowExchange(self._cp or ALONE)
        result = {}
        for route in self._routes.incoming[cell]:
            if not route.carries_gradient:
                continue
            own = leaves[route].grad if route in leaves else None
            if own is None:
                shape = (len(self._own_places(route)), self.module.hidden_size)
                own = torch.zeros(shape, dtype=self.boundary_dtype, device=self.device)
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

    def _own_part(self, route: Route, carried: Tensor) -> Tensor:
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

    def _incoming(self, leaves: Mapping[Route, Tensor], members: Sequence[int]) -> dict[str, Tensor]:
        """Each tower's embeddings in the order of the contrastive batch."""
        place = {sample: i for i, sample in enumerate(members)}
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
