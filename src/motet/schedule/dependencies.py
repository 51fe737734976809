"""What each action reads and writes. Stated here once, for validator, communication pass, simulator and executor.

Dependencies are values, never pairs of actions: an action may start when all values that it reads have been written.
Values are dataclasses because named tuples with equal fields are equal whatever their class: an activation would pass
for the gradient that comes back on its route.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from motet.plan import Plan
from motet.schedule.action import Action, Compute, Kind, Reduce
from motet.schedule.routes import Cell, Routes


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
    """What a forward keeps for its backward (`half`: what the input half keeps for the weight half)."""

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
    """For every run of layers with a trainable one and the same holders: who sums its gradients.

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
        for first, last in pairwise(bounds):
            if module.is_trainable((first, last)):
                result[Reduce(name, first, last)] = tuple(
                    holder for layers, holder in stages if layers[0] <= first and last <= layers[1]
                )
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

    @cached_property
    def _cells_of_stage(self) -> dict[tuple[str, int, int], list[Cell]]:
        cells = defaultdict(list)
        for cell in self.routes.cells:
            cells[cell[:3]].append(cell)
        return cells

    def ranks(self, action: Action) -> tuple[int, ...]:
        """Who executes it, together."""
        if isinstance(action, Compute):
            return self.routes.stage(action.cell).ranks
        return tuple(dict.fromkeys(rank for holder in self.reductions[action] for rank in holder.ranks))

    def reads(self, action: Action) -> list[Value]:
        if isinstance(action, Reduce):
            return [
                WeightGradient(cell)
                for holder in self.reductions[action]
                for cell in self._cells_of_stage[holder.module, holder.replica, holder.stage]
                if cell in self.routes.with_weight_gradient
            ]
        kind, cell = action
        if kind is Kind.FORWARD:
            return [Activation(route.source, route.target) for route in self.routes.incoming[cell]]
        if kind is Kind.WEIGHT:
            return [SavedGraph(cell, half=True)]
        gradients: list[Value] = [
            Gradient(route.source, route.target) for route in self.routes.outgoing[cell] if route.carries_gradient
        ]
        return [*gradients, SavedGraph(cell)]

    def writes(self, action: Action) -> list[Value]:
        if isinstance(action, Reduce):
            return [ReducedGradient(action)]
        kind, cell = action
        values: list[Value] = []
        if kind is Kind.FORWARD:
            values += [Activation(route.source, route.target) for route in self.routes.outgoing[cell]]
            if cell in self.routes.with_backward:
                values.append(SavedGraph(cell))
        if kind in (Kind.BACKWARD, Kind.INPUT):
            values += [
                Gradient(route.source, route.target) for route in self.routes.incoming[cell] if route.carries_gradient
            ]
        if kind is Kind.INPUT:
            values.append(SavedGraph(cell, half=True))
        if kind in (Kind.BACKWARD, Kind.WEIGHT) and cell in self.routes.with_weight_gradient:
            values.append(WeightGradient(cell))
        return values

    def required(self) -> list[Compute]:
        """Every compute action of the iteration with an unsplit backward, in topological order of the forwards."""
        forwards = [Compute(Kind.FORWARD, cell) for cell in self.routes.cells]
        backwards = [
            Compute(Kind.BACKWARD, cell) for cell in reversed(self.routes.cells) if cell in self.routes.with_backward
        ]
        return forwards + backwards
