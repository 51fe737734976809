"""Values that each action reads and writes, stated once for validator, communication pass, simulator and executor.

Dependencies are values, never pairs of actions: an action may start when all values that it reads have been written.
Values are dataclasses because named tuples with equal fields are equal whatever their class: an activation would pass
for the gradient that comes back on its route.

Actions and values are numbered, and the rules stand as tables of numbers; `reads` and `writes` look them up. An action
reads and writes any number of values that routes carry, and at most one that stays where it is.

| number | action | | number | value |
|---|---|---|---|---|
| 0 .. | forward of each cell | | 0 .. | activation of each route |
| C .. | its backward | | R .. | gradient of each route |
| 2 C .. | the input half | | 2 R .. | saved graph of each cell |
| 3 C .. | the weight half | | 2 R + C .. | what the input half leaves of it |
| | | | 2 R + 2 C .. | weight gradient of each cell |
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from motet.plan import Plan
from motet.ragged_arrays import Ints, Rows, stacked
from motet.schedule.action import Action, Compute, Kind, Reduce
from motet.schedule.routes import Cell, Routes, StageCells

KINDS = tuple(Kind)
"""Kinds of actions, in the order in which actions are numbered."""
NOTHING = -1
"""Stands for the value that an action does not read or write."""


@dataclass(frozen=True, slots=True)
class Activation:
    """Tokens on the route from `source` to `target`."""

    source: Cell
    target: Cell


@dataclass(frozen=True, slots=True)
class Gradient:
    """Gradients of those tokens; they travel from `target` back to `source`."""

    source: Cell
    target: Cell


@dataclass(frozen=True, slots=True)
class SavedGraph:
    """The graph that a forward keeps for its backward (`half`: what the input half keeps for the weight half)."""

    cell: Cell
    half: bool = False


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """One microbatch's share of a stage's weight gradients."""

    cell: Cell


@dataclass(frozen=True, slots=True)
class ReducedGradient:
    reduce: Reduce


Value = Activation | Gradient | SavedGraph | WeightGradient | ReducedGradient


@dataclass(frozen=True)
class Holder:
    """A stage that holds a run of layers."""

    module: str
    replica: int
    stage: int
    ranks: tuple[int, ...]


def reductions(plan: Plan) -> dict[Reduce, tuple[Holder, ...]]:
    """Holders that sum gradients, for every run of layers that has a trainable layer and the same holders.

    Copies of a module (`copy_of`) hold its layers too. A parameter that two layers share is summed over the holders of
    either, after its layers' own run has left it out.
    """
    stages_of: dict[str, list[tuple[tuple[int, int], Holder]]] = defaultdict(list)
    for name, r, s, stage in plan.stages():
        owner = plan.modules[name].copy_of or name
        stages_of[owner].append((stage.layers, Holder(name, r, s, stage.ranks)))
    result = {}
    for name, stages in stages_of.items():
        module = plan.modules[name]
        bounds = sorted({bound for layers, _ in stages for bound in layers})
        place = {bound: i for i, bound in enumerate(bounds)}
        holders: list[list[Holder]] = [[] for _ in bounds]
        for (first, last), holder in stages:
            for i in range(place[first], place[last]):
                holders[i].append(holder)
        for i, (first, last) in enumerate(pairwise(bounds)):
            if module.is_trainable((first, last)):
                result[Reduce(name, first, last)] = tuple(holders[i])
        for a, b in module.tied:
            if module.is_trainable((a, a + 1)) or module.is_trainable((b, b + 1)):
                result[Reduce(name, a, b, tied=True)] = tuple(
                    holder for layers, holder in stages if layers[0] <= a < layers[1] or layers[0] <= b < layers[1]
                )
    return result


@dataclass(frozen=True)
class Dependencies:
    routes: Routes

    @cached_property
    def reductions(self) -> dict[Reduce, tuple[Holder, ...]]:
        return {} if self.routes.forward_only else reductions(self.routes.plan)

    @property
    def num_actions(self) -> int:
        """Upper bound of compute actions' numbers; a schedule uses some of them."""
        return len(KINDS) * self.routes.num_cells

    def number(self, action: Compute) -> int:
        """Raises `KeyError` if the iteration has no such cell."""
        return KINDS.index(action.kind) * self.routes.num_cells + self.routes.number_of_cell[action.cell]

    def actions(self, numbers: Ints) -> list[Compute]:
        cells, num_cells = self.routes.cells, self.routes.num_cells
        return [Compute(KINDS[number // num_cells], cells[number % num_cells]) for number in numbers.tolist()]

    def value(self, number: int) -> Value:
        num_routes, num_cells = self.routes.num_routes, self.routes.num_cells
        if number < 2 * num_routes:
            route = self.routes.routes[number % num_routes]
            return (Activation if number < num_routes else Gradient)(route.source, route.target)
        which, cell = divmod(number - 2 * num_routes, num_cells)
        if which == 2:
            return WeightGradient(self.routes.cells[cell])
        return SavedGraph(self.routes.cells[cell], half=which == 1)

    @cached_property
    def carried_reads(self) -> Rows:
        """Route values that each action reads."""
        gradients = self._gradients(self.routes.routes_out)
        return stacked([self.routes.routes_in, gradients, gradients, self._none])

    @cached_property
    def carried_writes(self) -> Rows:
        """Route values that each action writes."""
        gradients = self._gradients(self.routes.routes_in)
        return stacked([self.routes.routes_out, gradients, gradients, self._none])

    @cached_property
    def kept_read(self) -> Ints:
        """Local value that each action reads, or `NOTHING`."""
        saved, half, _ = self._kept
        return np.concatenate([np.full_like(saved, NOTHING), saved, saved, half])

    @cached_property
    def kept_write(self) -> Ints:
        """Local value that each action writes, or `NOTHING`."""
        saved, half, weight = self._kept
        saved = np.where(self.routes.cell_has_backward, saved, NOTHING)
        weight = np.where(self.routes.cell_has_weight_gradient, weight, NOTHING)
        return np.concatenate([saved, weight, half, weight])

    @cached_property
    def _kept(self) -> Ints:
        """The numbers of each cell's saved graph, the half of it, and its weight gradient."""
        return 2 * self.routes.num_routes + np.arange(3 * self.routes.num_cells).reshape(3, -1)

    @cached_property
    def _none(self) -> Rows:
        return Rows(np.zeros(self.routes.num_cells + 1, dtype=np.int64), np.zeros(0, dtype=np.int64))

    def _gradients(self, routes: Rows) -> Rows:
        carrying = routes.where(self.routes.route_has_gradient)
        return Rows(carrying.starts, carrying.values + self.routes.num_routes)

    @cached_property
    def stage_cells(self) -> dict[tuple[str, int, int], StageCells]:
        """Stages with cells, by module, replica and stage."""
        return {stage[:3]: stage for stage in self.routes.stages}

    def summed_cells(self, reduce: Reduce) -> Ints:
        """The cells whose weight gradients it reads."""
        stages = [self.stage_cells.get((h.module, h.replica, h.stage)) for h in self.reductions[reduce]]
        cells = [np.arange(stage.first, stage.last) for stage in stages if stage]
        every = np.concatenate(cells) if cells else np.zeros(0, dtype=np.int64)
        return every[self.routes.cell_has_weight_gradient[every]]

    def ranks(self, action: Action) -> tuple[int, ...]:
        """Ranks that execute the action together."""
        if isinstance(action, Compute):
            return self.routes.stage(action.cell).ranks
        return self._ranks_of_reductions[action]

    @cached_property
    def _ranks_of_reductions(self) -> dict[Reduce, tuple[int, ...]]:
        return {
            reduce: tuple(dict.fromkeys(rank for holder in holders for rank in holder.ranks))
            for reduce, holders in self.reductions.items()
        }

    def reads(self, action: Action) -> list[Value]:
        if isinstance(action, Reduce):
            return [WeightGradient(self.routes.cells[cell]) for cell in self.summed_cells(action).tolist()]
        return self._values(action, self._carried_read_lists, self._kept_read_list)

    def reads_on(self, action: Action, rank: int) -> list[Value]:
        """Returns the values of an action that one of its ranks must hold. A loss's member brings the features that it
        holds; those of the others it gets within the action."""
        values = self.reads(action)
        if isinstance(action, Compute) and self.routes.plan.modules[action.cell.module].kind == "loss":
            return [v for v in values if not isinstance(v, Activation) or rank in self.routes.stage(v.source).ranks]
        return values

    def writes(self, action: Action) -> list[Value]:
        if isinstance(action, Reduce):
            return [ReducedGradient(action)]
        return self._values(action, self._carried_write_lists, self._kept_write_list)

    def _values(self, action: Compute, carried: list[list[int]], kept: list[int]) -> list[Value]:
        number = self.number(action)
        values = [self.value(i) for i in carried[number]]
        return values if kept[number] == NOTHING else [*values, self.value(kept[number])]

    @cached_property
    def _carried_read_lists(self) -> list[list[int]]:
        return self.carried_reads.to_lists()

    @cached_property
    def _carried_write_lists(self) -> list[list[int]]:
        return self.carried_writes.to_lists()

    @cached_property
    def _kept_read_list(self) -> list[int]:
        return self.kept_read.tolist()

    @cached_property
    def _kept_write_list(self) -> list[int]:
        return self.kept_write.tolist()

    def required(self) -> list[Compute]:
        """Every compute action of the iteration with an unsplit backward, in topological order of the forwards."""
        forwards = [Compute(Kind.FORWARD, cell) for cell in self.routes.cells]
        backwards = [
            Compute(Kind.BACKWARD, cell) for cell in reversed(self.routes.cells) if cell in self.routes.with_backward
        ]
        return forwards + backwards
