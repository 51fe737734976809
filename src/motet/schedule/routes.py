"""Which samples' tokens go from which producer to which consumer: derived from plan and assignment, never by hand.

A route knows cells, not ranks: `motet.schedule.lower` splits it into messages between ranks. Whether a gradient comes
back, and whether a cell has a backward pass at all, is decided here, once, from the plan: never from what happens to
arrive at run time. It differs per microbatch (text-only ones bring no gradient to a frozen language model's start).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from motet.data.assignment import BatchAssignment
from motet.data.sample import Sample
from motet.plan import Plan, Stage, module_order


class Cell(NamedTuple):
    """One microbatch on one stage: the unit of forward and backward."""

    module: str
    replica: int
    stage: int
    microbatch: int


class Route(NamedTuple):
    """The tokens of `samples` go from `source` to `target`; if `carries_gradient`, their gradients come back."""

    source: Cell
    target: Cell
    samples: tuple[int, ...]
    """Indices into the global batch, in the order of the target's microbatch."""
    carries_gradient: bool


@dataclass(frozen=True)
class Routes:
    """All cells of one iteration and what flows between them."""

    plan: Plan
    assignment: BatchAssignment
    cells: tuple[Cell, ...]
    """In topological order."""
    incoming: Mapping[Cell, tuple[Route, ...]]
    outgoing: Mapping[Cell, tuple[Route, ...]]
    with_backward: frozenset[Cell]
    """Cells with a backward pass: something trainable at or before them, and a loss at or after them."""
    with_weight_gradient: frozenset[Cell]
    """Cells whose own layers receive a gradient."""
    forward_only: bool = False
    """Evaluation: nothing has a backward pass and nothing is reduced."""

    def stage(self, cell: Cell) -> Stage:
        return self.plan.modules[cell.module].replicas[cell.replica].stages[cell.stage]

    def samples(self, cell: Cell) -> tuple[int, ...]:
        return self.assignment.samples_of(cell.module, cell.replica, cell.microbatch)

    def has_input_gradient(self, cell: Cell) -> bool:
        return any(route.carries_gradient for route in self.incoming[cell])


def derive_routes(
    plan: Plan, assignment: BatchAssignment, samples: Sequence[Sample], *, forward_only: bool = False
) -> Routes:
    """Every route of the iteration, for every stage boundary, inside a module too.

    `forward_only`: evaluation; nothing has a backward pass.
    Raises `ValueError` if the assignment gives a sample's tokens to a consumer but to no producer, or to two.
    """
    cells = [
        Cell(name, r, s, m)
        for name in module_order(plan)
        for r, replica in enumerate(plan.modules[name].replicas)
        for m, members in enumerate(assignment.microbatches[name][r])
        if members
        for s in range(len(replica.stages))
    ]
    cells.sort(key=lambda cell: cell.stage)
    order = {name: i for i, name in enumerate(module_order(plan))}
    cells.sort(key=lambda cell: order[cell.module])

    flows = [*_flows_inside_modules(plan, assignment, cells), *_flows_between_modules(plan, assignment, samples, cells)]
    sources, targets = defaultdict(list), defaultdict(list)
    for source, target, _ in flows:
        sources[target].append(source)
        targets[source].append(target)

    produces_gradient: dict[Cell, bool] = {}
    for cell in cells:
        layers = plan.modules[cell.module].replicas[cell.replica].stages[cell.stage].layers
        trainable = plan.modules[cell.module].is_trainable(layers)
        produces_gradient[cell] = not forward_only and (
            trainable or any(produces_gradient[source] for source in sources[cell])
        )
    reaches_loss: dict[Cell, bool] = {}
    for cell in reversed(cells):
        module = plan.modules[cell.module]
        is_last = cell.stage == len(module.replicas[cell.replica].stages) - 1
        reaches_loss[cell] = (is_last and module.loss_weight != 0) or any(reaches_loss[t] for t in targets[cell])

    incoming: dict[Cell, list[Route]] = {cell: [] for cell in cells}
    outgoing: dict[Cell, list[Route]] = {cell: [] for cell in cells}
    for source, target, members in flows:
        route = Route(source, target, members, produces_gradient[source] and reaches_loss[target])
        incoming[target].append(route)
        outgoing[source].append(route)
    with_backward = frozenset(cell for cell in cells if produces_gradient[cell] and reaches_loss[cell])
    return Routes(
        plan=plan,
        assignment=assignment,
        cells=tuple(cells),
        incoming={cell: tuple(routes) for cell, routes in incoming.items()},
        outgoing={cell: tuple(routes) for cell, routes in outgoing.items()},
        with_backward=with_backward,
        with_weight_gradient=frozenset(
            cell
            for cell in with_backward
            if plan.modules[cell.module].is_trainable(
                plan.modules[cell.module].replicas[cell.replica].stages[cell.stage].layers
            )
        ),
        forward_only=forward_only,
    )


Flow = tuple[Cell, Cell, tuple[int, ...]]


def _flows_inside_modules(plan: Plan, assignment: BatchAssignment, cells: Sequence[Cell]) -> list[Flow]:
    return [
        (cell._replace(stage=cell.stage - 1), cell, assignment.samples_of(cell.module, cell.replica, cell.microbatch))
        for cell in cells
        if cell.stage > 0
    ]


def _flows_between_modules(
    plan: Plan, assignment: BatchAssignment, samples: Sequence[Sample], cells: Sequence[Cell]
) -> list[Flow]:
    producer_of: dict[str, dict[int, Cell]] = defaultdict(dict)
    sources = {edge.source for edge in plan.edges}
    for cell in cells:
        if cell.module in sources and cell.stage == len(plan.modules[cell.module].replicas[cell.replica].stages) - 1:
            for i in assignment.samples_of(cell.module, cell.replica, cell.microbatch):
                if i in producer_of[cell.module]:
                    raise ValueError(f"assignment: sample {i} stands in two microbatches of {cell.module}")
                producer_of[cell.module][i] = cell

    flows: list[Flow] = []
    for edge in plan.edges:
        source_data = plan.modules[edge.source].data_module(edge.source)
        for cell in cells:
            if cell.module != edge.target:
                continue
            first, last = plan.modules[cell.module].replicas[cell.replica].stages[cell.stage].layers
            if not any(first <= layer < last for layer in edge.layers):
                continue
            members: dict[Cell, list[int]] = defaultdict(list)
            for i in assignment.samples_of(cell.module, cell.replica, cell.microbatch):
                if samples[i].has(source_data):
                    if i not in producer_of[edge.source]:
                        raise ValueError(
                            f"assignment: sample {i} of {cell.module} needs {edge.source}, "
                            f"but stands in no microbatch of {edge.source}"
                        )
                    members[producer_of[edge.source][i]].append(i)
            flows += [(producer, cell, tuple(group)) for producer, group in sorted(members.items())]
    return flows
