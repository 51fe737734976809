"""Runs forward and backward of one stage, one microbatch at a time, and keeps the graphs in between."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from motet.assignment.sample import IGNORED_LABEL, members_of_cell
from motet.devices import to_device
from motet.models.stages.contrastive import ALONE, RowExchange
from motet.models.stages.stage import Batch, StageInput, StageModule, StageOutput
from motet.parallel.context.context_attention import ContextParallel
from motet.parallel.context.context_rows import ContextRows
from motet.parallel.fully_sharded import FullySharded
from motet.parallel.main_gradients import HALF_DTYPES
from motet.parallel.saved_tensors import save_less
from motet.parallel.split_backward import SplitBackward, make_splittable
from motet.parallel.tensor.tensor_collectives import TensorParallel, all_gather_sequence, shard_length
from motet.plan import ModulePlan, Stage
from motet.runtime.communication.messages import merge_order, rows_of
from motet.schedule.batch_sync import Shares, samples_of_ranks, shares
from motet.schedule.lower import row_shares
from motet.schedule.routes import Cell, Route, Routes

CPU = torch.device("cpu")


@dataclass(slots=True)
class Saved:
    """State that a forward leaves for its backward and for the routes that carry its output."""

    inputs: dict[Route, Tensor]
    output: StageOutput
    """The roots of the backward. Where the backward runs the forward again, dropped when the routes have taken it."""
    split: SplitBackward | None
    """The split backward; None if the backward is whole."""


class StageRunner:
    """One stage on this rank.

    Args:
        boundary_dtype: dtype of activations and gradients between stages.
        tp: this rank's place in the stage's tensor-parallel group; None: it is alone.
        kept_shares: the layers at the stage's ends whose input is this rank's share of the rows.
        cp: this rank's place in the stage's context-parallel group; None: there is none.
        sharded: the stage's parameters, if its group shares them.
    """

    def __init__(
        self,
        name: str,
        module_plan: ModulePlan,
        stage: Stage,
        module: StageModule,
        *,
        boundary_dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel | None = None,
        kept_shares: Set[int] = frozenset(),
        cp: ContextParallel | None = None,
        sharded: FullySharded | None = None,
    ) -> None:
        self.name = name
        self.data_module = module_plan.data_module(name)
        self.stage = stage
        self.module = module
        self.boundary_dtype = boundary_dtype
        self.device = device
        self._tp, self._kept_shares = tp, kept_shares
        self._cp = cp
        self._sharded = sharded
        self._is_splittable = False
        self._wide_dtype = torch.promote_types(boundary_dtype, torch.float32)
        """Dtype of what a message brought while the stage computes with it, if the stage has no parameters."""
        self._parameter_dtype = next((parameter.dtype for _, parameter in module.named_parameters()), self._wide_dtype)
        # Asked once: a module that has no such attribute takes long to say so.
        self.reads_on_host = bool(getattr(module, "features_on_host", False))
        self.integers_on_host = self.reads_on_host or bool(getattr(module, "integers_on_host", False))
        self._crosses_alone: Callable[[int], bool] | None = getattr(module, "crosses_alone", None)
        self._shapes: dict[tuple[Route, bool], tuple[int, ...]] = {}
        """Of this iteration's routes, by whether they enter the stage."""
        self._computes_plainly = sharded is None and self._parameter_dtype not in HALF_DTYPES
        """Whether a forward needs no contexts but that of autograd."""
        self._floats_at = CPU if self.reads_on_host else device
        self._integers_at = CPU if self.integers_on_host else device
        """Where features are read."""
        has_loss = stage.layers[1] == module_plan.num_layers or getattr(module, "computes_loss", False)
        self._loss_weight = module_plan.loss_weight if has_loss else 0.0
        self._saved: dict[Cell, Saved] = {}
        self._half_done: dict[Cell, SplitBackward] = {}
        """Cells awaiting their weight-gradient pass."""
        self._kept: dict[Cell, Tensor] = {}
        """Outputs of the next batch's cells, by the names that they have in the next iteration."""
        self._kept_before: dict[Cell, Tensor] = {}
        """Outputs that the iteration before has kept for this one."""
        self._losses: list[Tensor] = []
        """Of the microbatches so far, unweighted."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        """Sum of the stage's losses in the last iteration, unweighted."""

    def begin_iteration(
        self,
        routes: Routes,
        batch: Batch,
        loss_tokens: Mapping[str, int],
        draw_key: tuple[int, ...] | None = None,
        *,
        next_draw_key: tuple[int, ...] | None = None,
        by_block: bool = True,
    ) -> None:
        """Args:
        loss_tokens: for each module with a loss, the loss tokens of the whole global batch.
        draw_key: as that of `StageInput`.
        next_draw_key: that of the next batch's cells.
        by_block: whether a fully sharded stage gathers its parameters block by block; otherwise once, now.
        """
        self._routes, self._batch, self._draw_key, self._next_draw_key = routes, batch, draw_key, next_draw_key
        self._recomputes = self.name in routes.plan.recompute_features
        if not routes.forward_only:
            self._kept_before, self._kept = self._kept, {}
        self._loss_scale = self._loss_weight / max(1, loss_tokens.get(self.data_module, 0))
        self._saved.clear()
        self._half_done.clear()
        self._shapes.clear()
        self.rows = ContextRows(routes, batch.samples, self._cp, getattr(self.module, "held_tokens", None))
        self._losses.clear()
        if self._sharded is not None:
            self._sharded.begin_step(by_block=by_block)

    def end_iteration(self) -> None:
        """Collective where replicas share parameters."""
        self.loss_sum = (
            torch.stack(self._losses).sum(dtype=torch.float64) if self._losses else torch.zeros_like(self.loss_sum)
        )
        if not self._routes.forward_only:
            self._kept_before.clear()
        if self._sharded is not None:
            self._sharded.end_step(with_gradients=not self._routes.forward_only)

    def reports_loss(self, rank: int) -> bool:
        """Whether `rank` is the one of the stage's group whose `loss_sum` counts: all members have the same."""
        return self._loss_weight != 0 and rank == self.stage.ranks[0]

    @property
    def is_sharded(self) -> bool:
        """Whether the stage's gradients are summed inside its group before they are final."""
        return self._sharded is not None

    def runs_again(self, cell: Cell) -> bool:
        """Whether the cell's backward begins with another forward."""
        return self._recomputes and cell in self._routes.with_backward

    def receives(self, route: Route) -> bool:
        """Whether what a route into this stage carries comes to this rank."""
        return True

    def num_row_shares(self, route: Route, *, gradient: bool) -> int:
        """Number of shares in which the rows of what a route carries, or of its gradient, go to the members of the
        receiving tensor-parallel group, which puts them together (`whole_rows`)."""
        source, target = self._routes.stage(route.source), self._routes.stage(route.target)
        same_module = route.source.module == route.target.module
        if same_module and source.layers[1] in self._kept_shares:
            return 1
        return row_shares(source, target, gradient=gradient, same_module=same_module)

    def whole_rows(self, share: Tensor, num_rows: int) -> Tensor:
        """Puts the members' shares together. Collective over the tensor-parallel group."""
        assert self._tp is not None
        return all_gather_sequence(share, num_rows, self._tp) if num_rows else share

    def message_dtype(self, route: Route) -> torch.dtype:
        """The dtype in which what a route carries, and its gradient, travel. Beside hidden states may stand numbers of
        tokens, which are whole in float32 alone."""
        if (
            self._crosses_alone is not None
            and route.source.module == route.target.module
            and not self._crosses_alone(self._routes.stage(route.target).layers[0])
        ):
            return self._wide_dtype
        return self.boundary_dtype

    def _own_shape(self, shape: tuple[int, ...], layer: int) -> tuple[int, ...]:
        """The shape of a layer's input on this rank."""
        if layer not in self._kept_shares:
            return shape
        assert self._tp is not None
        return (*shape[:-2], shard_length(shape[-2], self._tp), shape[-1])

    def input_shape(self, route: Route) -> tuple[int, ...]:
        """The shape of what a route brings to this stage (and of the gradient that goes back)."""
        shape = self._shapes.get((route, True))
        if shape is None:
            shape = self._shapes[route, True] = self._derive_input_shape(route)
        return shape

    def output_shape(self, route: Route) -> tuple[int, ...]:
        """The shape of what a route takes from this stage."""
        shape = self._shapes.get((route, False))
        if shape is None:
            shape = self._shapes[route, False] = self._derive_output_shape(route)
        return shape

    def _derive_input_shape(self, route: Route) -> tuple[int, ...]:
        samples = members_of_cell(self._batch.samples, route.samples, self.data_module)
        if route.source.module == self.name:
            return self._own_shape(self.module.input_shape(samples), self.stage.layers[0])
        if (held := self.rows.received(route)) is not None:
            assert self._cp is not None
            return (len(held[self._cp.rank]), self.module.hidden_size)
        source = self._data_module_of(route.source.module)
        # Outputs that enter at several layers come side by side.
        incoming_size = getattr(self.module, "incoming_size", lambda source: self.module.hidden_size)
        return (sum(sample.num_outputs(source, self.data_module) for sample in samples), incoming_size(source))

    def _derive_output_shape(self, route: Route) -> tuple[int, ...]:
        samples = members_of_cell(self._batch.samples, route.samples, self.data_module)
        if route.target.module != self.name:
            target = self._data_module_of(route.target.module)
            return (sum(sample.num_outputs(self.data_module, target) for sample in samples), self.module.output_size)
        return self._own_shape(self.module.output_shape(samples), self.stage.layers[1])

    def forward(self, cell: Cell, inputs: Mapping[Route, Tensor], *, is_split: bool = False) -> None:
        """Keeps the output for `output` and `backward`.

        Args:
            inputs: what each incoming route brought.
            is_split: whether the backward will be split into its halves.
        """
        keeps_graph = cell in self._routes.with_backward
        leaves = {
            route: _as(self._own_part(route, tensor), self._parameter_dtype).requires_grad_(
                route.carries_gradient and keeps_graph
            )
            for route, tensor in inputs.items()
        }
        split = self._split_backward() if is_split else None
        stage_input = self._stage_input(cell, leaves)
        with_graph = keeps_graph and not self._recomputes
        if split is None and self._computes_plainly and with_graph == torch.is_grad_enabled():
            output = self.module(stage_input)
        else:
            with self._computing(split, with_graph=with_graph):
                output = self.module(stage_input)
        if self._loss_weight:
            assert output.loss is not None, f"{self.name} has a loss weight, but the stage computes no loss"
            self._losses.append(output.loss.detach())
        if keeps_graph or self._hands_on(cell):
            self._saved[cell] = Saved(leaves, output, split)

    def _split_backward(self) -> SplitBackward:
        if not self._is_splittable:
            make_splittable(cast(nn.Module, self.module))
            self._is_splittable = True
        return SplitBackward()

    def hand_on(self, cell: Cell) -> None:
        """In place of `forward`, for a cell that ran in the iteration before: its output is what was kept."""
        self._saved[cell] = Saved({}, StageOutput(self._kept_before.pop(cell)), None)

    def _hands_on(self, cell: Cell) -> bool:
        """Whether a cell's output is needed beyond its own backward."""
        return bool(self._routes.outgoing[cell]) or cell in self._routes.kept

    def _stage_input(self, cell: Cell, leaves: Mapping[Route, Tensor]) -> StageInput:
        members = self._routes.samples(cell)
        samples = members_of_cell(self._batch.samples, members, self.data_module)
        if not self.module.needs_features:
            features: list[dict[str, Tensor]] = [{} for _ in samples]
        elif members:
            features = [self._features(i) for i in members]
        else:
            ids = torch.zeros(1, dtype=torch.long, device=self._integers_at)
            features = [{"input_ids": ids, "labels": torch.full_like(ids, IGNORED_LABEL)}]
        return StageInput(
            samples=samples,
            features=features,
            hidden=next((leaf for route, leaf in leaves.items() if route.source.module == self.name), None),
            incoming=self._incoming(leaves, members),
            hands_on=self._hands_on(cell),
            draw_key=self._next_draw_key if cell in self._routes.ahead else self._draw_key,
            shares=self._shares(cell),
        )

    def _features(self, sample: int) -> dict[str, Tensor]:
        """A sample's features, where and in the dtype in which the stage reads them."""
        features = {}
        for key, tensor in self._batch.features(self.data_module, sample).items():
            is_float = tensor.is_floating_point()
            where = self._floats_at if is_float else self._integers_at
            if tensor.device != where:
                tensor = to_device(tensor, where)
            features[key] = _as(tensor, self._parameter_dtype) if is_float else tensor
        return features

    @contextmanager
    def _computing(self, split: SplitBackward | None, *, with_graph: bool) -> Iterator[None]:
        """The contexts in which the stage's forward runs."""
        parameters = nullcontext() if self._sharded is None else self._sharded.forward()
        saving = save_less(self._parameter_dtype)
        with parameters, torch.set_grad_enabled(with_graph), split or nullcontext(), saving:
            yield

    def _own_part(self, route: Route, carried: Tensor) -> Tensor:
        """The part of what a route brought that this rank computes with."""
        return carried

    def _shares(self, cell: Cell) -> Shares | None:
        """Returns the rows that each rank contributes to a contrastive loss."""
        return None

    def output(self, route: Route) -> Tensor:
        """The rows of `route.source`'s output that the route carries, without graph."""
        made = self._saved[route.source].output.hidden
        assert made is not None
        output = _as(made.detach(), self.message_dtype(route))
        rows = None if route.target.module == self.name else self._carried_rows(route)
        carried = output if rows is None else output.index_select(0, to_device(rows, output.device))
        # A receiver takes whatever comes: a message of another size would go unnoticed.
        assert carried.shape == self.output_shape(route), (route, tuple(carried.shape))
        return carried.contiguous()

    def forget_output(self, cell: Cell) -> None:
        """Called when all routes have taken what they carry from a cell."""
        if cell in self._routes.kept:
            made = self._saved[cell].output.hidden
            assert made is not None
            self._kept[self._routes.next_name(cell)] = made
        if cell not in self._routes.with_backward:
            self._saved.pop(cell, None)
            return
        if self.runs_again(cell):
            self._saved[cell].output = StageOutput()

    def backward(self, cell: Cell, gradients: Mapping[Route, Tensor]) -> dict[Route, Tensor]:
        """Accumulates into the parameters' `.grad`; returns the gradient of each input that carries one back.

        The roots are the hidden states that were output, with the gradients received for them, and the loss.
        Where the backward is split this is its input half, and `backward_weight` has to follow.

        Args:
            gradients: for each outgoing route that carries a gradient, what came back.
        """
        saved = self._saved.pop(cell)
        hidden, loss = saved.output
        if self.runs_again(cell):
            stage_input = self._stage_input(cell, saved.inputs)
            with self._computing(saved.split, with_graph=True):
                hidden, loss = self.module(stage_input)
        roots: list[Tensor] = []
        root_gradients: list[Tensor] = []
        if gradients:
            assert hidden is not None
            roots.append(hidden)
            root_gradients.append(self._output_gradient(hidden, gradients))
        # The contrastive loss of a rank that has only frozen towers, or no samples, may need no gradient.
        if loss is not None and self._loss_weight and loss.requires_grad:
            roots.append(loss)
            root_gradients.append(torch.full_like(loss, self._loss_scale))
        is_split = saved.split is not None
        with nullcontext() if self._sharded is None else self._sharded.backward(is_split=is_split):
            if roots and saved.split is None:
                torch.autograd.backward(roots, root_gradients)
            elif roots and saved.split is not None:
                saved.split.input_half(roots, root_gradients)
        if saved.split is not None:
            self._half_done[cell] = saved.split
        return self._input_gradients(cell, saved.inputs)

    def _output_gradient(self, output: Tensor, gradients: Mapping[Route, Tensor]) -> Tensor:
        total: Tensor | None = None
        for route, gradient in gradients.items():
            gradient = _as(gradient, output.dtype)
            rows = self._carried_rows(route)
            if rows is not None:
                gradient = torch.zeros_like(output).index_add_(0, to_device(rows, output.device), gradient)
            total = gradient if total is None else total + gradient
        assert total is not None
        return total

    def _input_gradients(self, cell: Cell, leaves: Mapping[Route, Tensor]) -> dict[Route, Tensor]:
        result = {}
        for route, leaf in leaves.items():
            if route.carries_gradient:
                # A sample whose tokens reach no loss token leaves no gradient behind: that is zero, not absent.
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
                result[route] = self.rows.gather_gradient(route, _as(gradient, self.message_dtype(route)))
        return result

    def backward_weight(self, cell: Cell) -> Iterator[Tensor]:
        """The weight half: accumulates what the input half has left; yields each parameter that has got its share."""
        split = self._half_done.pop(cell)
        yield from split.weight_half() if self._sharded is None else self._sharded.weight_half(split)

    def parameters_left(self, cell: Cell) -> set[Tensor]:
        """Parameters that get a gradient in the cell's weight half."""
        return self._half_done[cell].parameters

    def _carried_rows(self, route: Route) -> Tensor | None:
        """The rows of the stage's output that a route to another module carries; None: all of them."""
        if route.target.module == self.name:
            return None
        target = self._data_module_of(route.target.module)
        present = self._routes.samples(route.source)
        return rows_of(route.samples, present, self._batch.samples, self.data_module, target)

    def _incoming(self, leaves: Mapping[Route, Tensor], members: Sequence[int]) -> dict[str, Tensor]:
        """Returns the rows of each source module, in the order of this microbatch's samples."""
        parts: dict[str, list[Route]] = {}
        for route in leaves:
            if route.source.module != self.name:
                parts.setdefault(self._data_module_of(route.source.module), []).append(route)
        incoming = {}
        for source, routes in parts.items():
            tokens = torch.cat([leaves[route] for route in routes])
            brought = [route.samples for route in routes]
            order = merge_order(brought, members, self._batch.samples, source, self.data_module)
            order = self.rows.order_of_received(order, routes)
            incoming[source] = tokens if order is None else tokens.index_select(0, to_device(order, tokens.device))
        return incoming

    def _data_module_of(self, module: str) -> str:
        return self._routes.plan.modules[module].data_module(module)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which takes its time where there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


class LossRunner(StageRunner):
    """A contrastive loss on this rank: its microbatch is a contrastive batch, its group all ranks that make features.

    DistMM's batch-sync instruction (section 5.4): the forward puts the features of several microbatches together and
    computes the loss, the backward hands the gradients back to their microbatches. What the group exchanges follows
    from the routes alone, so every rank derives the same.
    """

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
                own = torch.zeros(shape, dtype=self._parameter_dtype, device=self.device)
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
        return {
            route: self._carried_gradient(route, embeddings).to(self.message_dtype(route))
            for route, embeddings in result.items()
        }

    def _own_places(self, route: Route) -> list[int]:
        """Positions, among the route's samples, of those whose embeddings this rank contributes."""
        own = samples_of_ranks(self._routes, route).get(self._rank, ())
        first = route.samples.index(own[0]) if own else 0
        return list(range(first, first + len(own)))

    def _first_rows(self, route: Route) -> Tensor:
        """The row of each sample's embedding in what a route carries: the first of its outputs."""
        tower = self._data_module_of(route.source.module)
        counts = [self._batch.samples[i].num_outputs(tower) for i in route.samples]
        return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64))

    def _own_part(self, route: Route, carried: Tensor) -> Tensor:
        rows = self._first_rows(route)[self._own_places(route)]
        return carried if len(rows) == len(carried) else carried.index_select(0, to_device(rows, carried.device))

    def _carried_gradient(self, route: Route, embeddings: Tensor) -> Tensor:
        """The gradient of all rows that a route carries: rows other than the embeddings have no part in the loss."""
        tower = self._data_module_of(route.source.module)
        num_rows = sum(self._batch.samples[i].num_outputs(tower) for i in route.samples)
        if num_rows == len(embeddings):
            return embeddings
        whole = embeddings.new_zeros(num_rows, embeddings.shape[1])
        whole[to_device(self._first_rows(route), whole.device)] = embeddings
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
            result[tower] = rows.index_select(0, to_device(order, rows.device))
        return result
