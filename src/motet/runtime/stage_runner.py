"""Runs forward and backward of one stage, one microbatch at a time, and keeps the graphs in between."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from motet.attention.masks.distribution import Rows, held_outputs
from motet.models.stages.encoder import EncoderStage
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import Batch, StageInput, StageModule, StageOutput
from motet.parallel.context_attention import ContextParallel, collect_rows
from motet.parallel.fully_sharded import FullySharded
from motet.parallel.split_backward import CastWeights, SplitBackward, make_splittable
from motet.plan import ModulePlan, Stage
from motet.runtime.messages import merge_order, rows_of
from motet.schedule.batch_sync import Shares
from motet.schedule.routes import Cell, Route, Routes


@dataclass
class Saved:
    """What a forward leaves for its backward and for the routes that carry its output on."""

    inputs: dict[Route, Tensor]
    output: StageOutput
    """The roots of the backward. Where the backward runs the forward again, it goes when the routes have taken it."""
    split: SplitBackward | None
    """None: the backward is whole."""
    whole: Tensor | None = None
    """The output of all members of the context-parallel group, where the next stage shares out the tokens otherwise;
    until the routes have taken it."""


class StageRunner:
    """One stage on this rank.

    `boundary_dtype`: dtype of activations and gradients between stages. `autocast`: context in which forwards run.
    `cp`: this rank's place in the stage's context-parallel group, if it has one. `sharded`: its parameters, if the
    group shares them.
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
        cp: ContextParallel | None = None,
        sharded: FullySharded | None = None,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.name = name
        self.data_module = module_plan.data_module(name)
        self.stage = stage
        self.module = module
        self.boundary_dtype = boundary_dtype
        self._cp = cp
        self._sharded = sharded
        self.device = device
        self._autocast = autocast
        make_splittable(cast(nn.Module, module))
        self._cast_weights = CastWeights()
        self._parameter_dtype = next((parameter.dtype for _, parameter in module.named_parameters()), boundary_dtype)
        self._loss_weight = module_plan.loss_weight if stage.layers[1] == module_plan.num_layers else 0.0
        self._saved: dict[Cell, Saved] = {}
        self._half_done: dict[Cell, SplitBackward] = {}
        """Of the cells whose input half has run."""
        self._held: dict[Route, list[Rows] | None] = {}
        """Of the routes of this iteration that were asked for."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        """Sum of the token losses of the iteration so far, unweighted."""

    def begin_iteration(self, routes: Routes, batch: Batch, loss_tokens: Mapping[str, int]) -> None:
        """`loss_tokens`: for each module with a loss, the loss tokens of the whole global batch."""
        self._routes, self._batch = routes, batch
        self._loss_scale = self._loss_weight / max(1, loss_tokens.get(self.data_module, 0))
        self._saved.clear()
        self._half_done.clear()
        self._held.clear()
        self._cast_weights.clear()
        self.loss_sum.zero_()

    def end_iteration(self) -> None:
        """Lets go of what the iteration's microbatches shared, before the optimizer takes its memory."""
        self._cast_weights.clear()

    def reports_loss(self, rank: int) -> bool:
        """Whether `rank` is the one of the stage's group whose `loss_sum` counts: all members have the same."""
        return self._loss_weight != 0 and rank == self.stage.ranks[0]

    def receives(self, route: Route) -> bool:
        """Whether what a route into this stage carries comes to this rank."""
        return True

    def input_shape(self, route: Route) -> tuple[int, ...]:
        """The shape of what a route brings to this stage (and of the gradient that goes back)."""
        samples = self._batch.samples
        if route.source.module == self.name:
            return self.module.input_shape([samples[i] for i in route.samples])
        held = self.held_rows(route)
        if held is not None:
            assert self._cp is not None
            return (len(held[self._cp.rank]), self.module.hidden_size)
        source = self._data_module_of(route.source.module)
        return (sum(samples[i].num_outputs(source) for i in route.samples), self.module.hidden_size)

    def held_rows(self, route: Route) -> list[Rows] | None:
        """Of a route to context-parallel ranks, from another module or a stage that shares out the tokens otherwise:
        the rows that each member of the group holds; None: ranks of the target get all that the route carries."""
        if route not in self._held:
            self._held[route] = self._derive_held_rows(route)
        return self._held[route]

    def _derive_held_rows(self, route: Route) -> list[Rows] | None:
        plan = self._routes.plan
        target = plan.modules[route.target.module]
        cp_size = self._routes.stage(route.target).cp_size
        if cp_size == 1 or target.kind == "loss":
            return None
        if route.source.module == route.target.module:
            return self._held_tokens(route, cp_size) if self._changes_shares(route) else None
        members, carried = self._routes.samples(route.target), set(route.samples)
        return held_outputs(
            [self._batch.samples[i] for i in members],
            [i in carried for i in members],
            target.data_module(route.target.module),
            self._data_module_of(route.source.module),
            target.context,
            cp_size,
        )

    def _changes_shares(self, route: Route) -> bool:
        """Whether a route leads to a stage of the same module whose group shares out the tokens otherwise: then all
        of them are gathered before they are sent, there as here."""
        source, target = self._routes.stage(route.source), self._routes.stage(route.target)
        return route.source.module == route.target.module and source.cp_size != target.cp_size

    def _held_tokens(self, route: Route, cp_size: int) -> list[Rows] | None:
        """Of a route between two stages of this module that share out tokens otherwise: the rows of each member of a
        group of this size; None: all members have all of them."""
        assert isinstance(self.module, LanguageModelStage | EncoderStage)
        border = self._routes.stage(route.target).layers[0]
        samples = [self._batch.samples[i] for i in route.samples]
        return self.module.held_tokens(border, samples, self._routes.plan.modules[self.name].context, cp_size)

    def for_member(self, output: Tensor, route: Route, member: int) -> Tensor:
        """Of the output that a route carries, what a member of the target's context-parallel group gets: its own
        tokens, and if it has none, one that stands in (`ContextSequence.num_rows`)."""
        held = self.held_rows(route)
        if held is None:
            return output
        rows = torch.from_numpy(held[member]).to(output.device)
        if route.target.module != self.name:
            return output.index_select(0, rows)
        return output.index_select(-2, rows if len(rows) else rows.new_zeros(1))

    def output_shape(self, route: Route) -> tuple[int, ...]:
        """The shape of what a route takes from this stage."""
        samples = self._batch.samples
        if route.target.module == self.name:
            shape = self.module.output_shape([samples[i] for i in route.samples])
            if self._changes_shares(route) and (held := self._held_tokens(route, 1)) is not None:
                return (*shape[:-2], len(held[0]), shape[-1])
            return shape
        return (sum(samples[i].num_outputs(self.data_module) for i in route.samples), self.module.output_size)

    def forward(self, cell: Cell, inputs: Mapping[Route, Tensor], *, is_split: bool = False) -> None:
        """`inputs`: what each incoming route brought. The output waits for `output` and `backward`.

        `is_split`: the backward will be split into its halves."""
        keeps_graph = cell in self._routes.with_backward
        leaves = {
            route: self._own_part(route, tensor).requires_grad_(route.carries_gradient and keeps_graph)
            for route, tensor in inputs.items()
        }
        split = SplitBackward() if is_split else None
        output = self._compute(cell, leaves, split, with_graph=keeps_graph and not self.runs_again(cell))
        if output.loss is not None and self._loss_weight:
            self.loss_sum += output.loss.detach()
        if keeps_graph or self._routes.outgoing[cell]:
            self._saved[cell] = Saved(leaves, output, split, self._gathered(cell, output.hidden))

    def _gathered(self, cell: Cell, output: Tensor | None) -> Tensor | None:
        """Of all tokens, where a stage comes next that shares them out otherwise."""
        route = next((route for route in self._routes.outgoing[cell] if self._changes_shares(route)), None)
        held = None if route is None or self._cp is None else self._held_tokens(route, self._cp.size)
        if held is None or self._cp is None:
            return None
        assert output is not None
        return _gather_tokens(output.detach(), held, self._cp)

    def _compute(
        self, cell: Cell, leaves: Mapping[Route, Tensor], split: SplitBackward | None, *, with_graph: bool
    ) -> StageOutput:
        members = self._routes.samples(cell)
        # Outside of autocast: processors may compute when they are asked.
        features = self._features(members)
        parameters = nullcontext() if self._sharded is None else self._sharded.forward()
        with parameters, torch.set_grad_enabled(with_graph), self._autocast(), self._casting(), split or nullcontext():
            output = self.module(
                StageInput(
                    samples=[self._batch.samples[i] for i in members],
                    features=features,
                    hidden=self._hidden(leaves),
                    incoming=self._incoming(leaves, members),
                    hands_on=bool(self._routes.outgoing[cell]),
                    shares=self._shares(cell),
                )
            )
        assert output.loss is not None or not self._loss_weight, f"{self.name} has a loss weight and no loss"
        return output

    def _own_part(self, route: Route, carried: Tensor) -> Tensor:
        """Of what a route brought, what this rank computes with."""
        return carried

    def _shares(self, cell: Cell) -> Shares | None:
        """Which rank puts what into a contrastive loss."""
        return None

    def _casting(self) -> AbstractContextManager[object]:
        return self._cast_weights if self._sharded is None else nullcontext()

    @property
    def is_sharded(self) -> bool:
        """Whether the stage's gradients are summed inside its group before they are final."""
        return self._sharded is not None

    def runs_again(self, cell: Cell) -> bool:
        """Whether the cell's backward begins with another forward."""
        is_named = self.name in self._routes.plan.recompute_features
        return is_named and cell in self._routes.with_backward

    def output(self, route: Route) -> Tensor:
        """The rows of `route.source`'s output that the route carries, without graph."""
        saved = self._saved[route.source]
        made = saved.output.hidden if saved.whole is None or not self._changes_shares(route) else saved.whole
        assert made is not None
        output = made.detach().to(self.boundary_dtype)
        rows = self._rows(route)
        carried = output if rows is None else output.index_select(0, rows.to(output.device))
        # A receiver takes whatever comes: a message of another size would go unnoticed.
        assert tuple(carried.shape) == self.output_shape(route), (route, tuple(carried.shape))
        return carried.contiguous()

    def forget_output(self, cell: Cell) -> None:
        """Called when all routes have taken what they carry from a cell."""
        if cell in self._saved:
            self._saved[cell].whole = None
        if cell not in self._routes.with_backward:
            self._saved.pop(cell, None)
        elif self.runs_again(cell):
            self._saved[cell].output = StageOutput()

    def backward(self, cell: Cell, gradients: Mapping[Route, Tensor]) -> dict[Route, Tensor]:
        """Accumulates into the parameters' `.grad`; returns the gradient of each input that carries one back.

        The roots are the hidden states that were handed on, with the gradients that came back for them, and the loss.
        Where the backward is split this is its input half, and `backward_weight` has to follow.
        `gradients`: for each outgoing route that carries a gradient, what came back."""
        saved = self._saved.pop(cell)
        hidden, loss = saved.output
        if self.runs_again(cell):
            hidden, loss = self._compute(cell, saved.inputs, saved.split, with_graph=True)
        roots: list[Tensor] = []
        root_gradients: list[Tensor] = []
        if gradients:
            assert hidden is not None
            roots.append(hidden)
            root_gradients.append(self._output_gradient(hidden, gradients))
        if loss is not None and self._loss_weight and loss.requires_grad:
            roots.append(loss)
            root_gradients.append(torch.full_like(loss, self._loss_scale))
        is_split = saved.split is not None
        # Blocks that are recomputed must meet the same weights as in the forward.
        with self._casting() if self._sharded is None else self._sharded.backward(is_split=is_split):
            if saved.split is None:
                torch.autograd.backward(roots, root_gradients)
            else:
                saved.split.input_half(roots, root_gradients)
                self._half_done[cell] = saved.split
        return self._input_gradients(cell, saved.inputs)

    def _input_gradients(self, cell: Cell, leaves: Mapping[Route, Tensor]) -> dict[Route, Tensor]:
        result = {}
        for route, leaf in leaves.items():
            if route.carries_gradient:
                # A sample whose tokens reach no loss token leaves no gradient behind: that is zero, not absent.
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
                result[route] = self._of_all_members(route, gradient)
        return result

    def _of_all_members(self, route: Route, gradient: Tensor) -> Tensor:
        """The gradient of all that the route carried, put together from what each member holds."""
        held = self.held_rows(route)
        if held is None or self._cp is None:
            return gradient
        return _gather_tokens(gradient, held, self._cp)

    def backward_weight(self, cell: Cell) -> Iterator[Tensor]:
        """The weight half: accumulates what the input half has left; yields each parameter that has got its share."""
        split = self._half_done.pop(cell)
        yield from split.weight_half() if self._sharded is None else self._sharded.weight_half(split)

    def parameters_left(self, cell: Cell) -> set[Tensor]:
        """Those that get a gradient in the cell's weight half."""
        return self._half_done[cell].parameters

    def _output_gradient(self, output: Tensor, gradients: Mapping[Route, Tensor]) -> Tensor:
        total: Tensor | None = None
        for route, gradient in gradients.items():
            rows = self._rows(route)
            gradient = gradient.to(output.dtype)
            if self._changes_shares(route):
                gradient = self._own_gradient(route, gradient, output)
            if rows is not None:
                gradient = torch.zeros_like(output).index_add_(0, rows.to(output.device), gradient)
            total = gradient if total is None else total + gradient
        assert total is not None
        return total

    def _own_gradient(self, route: Route, gradient: Tensor, output: Tensor) -> Tensor:
        """Of the whole gradient that a stage sends back which shares out the tokens otherwise."""
        held = self._held_tokens(route, self.stage.cp_size)
        if held is None:
            # Both groups compute alike on all members, whose gradients add up to the whole.
            return gradient * (self._routes.stage(route.target).cp_size / self.stage.cp_size)
        if self._cp is None:
            return gradient
        own = torch.from_numpy(held[self._cp.rank]).to(gradient.device)
        # A token that stands in has no gradient.
        return gradient.index_select(-2, own) if len(own) else torch.zeros_like(output)

    def _rows(self, route: Route) -> Tensor | None:
        if route.target.module == self.name:
            return None
        return rows_of(route.samples, self._routes.samples(route.source), self._batch.samples, self.data_module)

    def _hidden(self, leaves: Mapping[Route, Tensor]) -> Tensor | None:
        return next((leaf for route, leaf in leaves.items() if route.source.module == self.name), None)

    def _incoming(self, leaves: Mapping[Route, Tensor], members: Sequence[int]) -> dict[str, Tensor]:
        """For each source module, its tokens in the order of this microbatch's samples."""
        parts: dict[str, list[Route]] = {}
        for route in leaves:
            if route.source.module != self.name:
                parts.setdefault(self._data_module_of(route.source.module), []).append(route)
        incoming = {}
        for source, routes in parts.items():
            tokens = torch.cat([leaves[route] for route in routes])
            order = merge_order([route.samples for route in routes], members, self._batch.samples, source)
            if order is not None and self._cp is not None:
                order = self._order_of_held(order, routes)
            incoming[source] = tokens if order is None else tokens.index_select(0, order.to(tokens.device))
        return incoming

    def _order_of_held(self, order: Tensor, routes: Sequence[Route]) -> Tensor:
        """`order` sorts whole routes; the same for the rows of them that are held here."""
        assert self._cp is not None
        held, first = [], 0
        for route in routes:
            rows = self.held_rows(route)
            assert rows is not None
            held.append(torch.from_numpy(rows[self._cp.rank]) + first)
            first += sum(len(own) for own in rows)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        return torch.argsort(place[torch.cat(held)])

    def _features(self, members: Sequence[int]) -> list[dict[str, Tensor]]:
        if not self.module.needs_features:
            return [{} for _ in members]
        features = [self._batch.features(self.data_module, i) for i in members]
        return [{key: self._prepared(value) for key, value in sample.items()} for sample in features]

    def _prepared(self, feature: Tensor) -> Tensor:
        dtype = self._parameter_dtype if feature.is_floating_point() else feature.dtype
        return feature.to(self.device, dtype)

    def _data_module_of(self, module: str) -> str:
        return self._routes.plan.modules[module].data_module(module)


def _gather_tokens(own: Tensor, held: Sequence[Rows], cp: ContextParallel) -> Tensor:
    """[..., T, H] of all members of the group; a token that stands in where a member has none is left out."""
    rows = own.flatten(0, -2)[: len(held[cp.rank])]
    return collect_rows(rows, held, cp).unflatten(0, (*own.shape[:-2], -1))
