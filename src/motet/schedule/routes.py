"""Routes: which samples' tokens go from which producer to which consumer, derived from plan and assignment.

A route knows cells, not ranks: `motet.schedule.lower` splits it into messages between ranks. Whether a gradient comes
back, and whether a cell has a backward pass at all, is decided here, once, from the plan: never from what happens to
arrive at run time. It differs per microbatch (text-only ones bring no gradient to a frozen language model's start).

Cells and routes are numbered, and what is known of them is kept in arrays, so that programs of a million actions are
handled without a million objects. The objects (`cells`, `incoming`, ...) are views, made when they are asked for.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from motet.assignment.batch_assignment import BatchAssignment
from motet.assignment.next_batch import NO_RUN_AHEAD, RunAhead, joined_assignment, stages_ahead
from motet.assignment.sample import Sample
from motet.plan import ModulePlan, Plan, Stage, module_order
from motet.ragged_arrays import Bools, Ints, Rows, distinct, ranges, rows_of, starts_of


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


class StageCells(NamedTuple):
    """The cells of one stage of one replica: the run [first, last) of all cells, by microbatch."""

    module: str
    replica: int
    stage: int
    planned: Stage
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Routes:
    """All cells of one iteration and what flows between them."""

    plan: Plan
    assignment: BatchAssignment
    """With the microbatches of the next batch that run ahead (`motet.assignment.next_batch`)."""
    stages: tuple[StageCells, ...]
    """Stages with cells, in topological order; cells are numbered through all of them."""
    cell_stage: Ints
    """Stage of each cell, as an index into `stages`."""
    cell_microbatch: Ints
    route_source: Ints
    """Number of the cell that each route leaves."""
    route_target: Ints
    route_has_gradient: Bools
    route_samples: Callable[[int], tuple[int, ...]]
    """The route of this number."""
    cell_has_backward: Bools
    cell_has_weight_gradient: Bools
    cell_is_ahead: Bools
    """Cells of the next batch."""
    cell_ran_before: Bools
    """Cells whose forward ran in the iteration before: here its kept output is sent, and it takes no time."""
    num_microbatches: Mapping[tuple[str, int], int]
    """The batch's own microbatches of each (module, replica); those of the next batch stand behind them."""
    forward_only: bool = False
    """Evaluation: nothing has a backward pass and nothing is reduced."""

    @property
    def num_cells(self) -> int:
        return len(self.cell_stage)

    @property
    def num_routes(self) -> int:
        return len(self.route_source)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Returns the cells in topological order."""
        microbatches = self.cell_microbatch.tolist()
        return tuple(
            Cell(stage.module, stage.replica, stage.stage, microbatch)
            for stage in self.stages
            for microbatch in microbatches[stage.first : stage.last]
        )

    @cached_property
    def number_of_cell(self) -> Mapping[Cell, int]:
        return {cell: i for i, cell in enumerate(self.cells)}

    @cached_property
    def routes_in(self) -> Rows:
        """Numbers of the routes that enter each cell."""
        return rows_of(self.route_target, self.num_cells)

    @cached_property
    def routes_out(self) -> Rows:
        """Numbers of the routes that leave each cell."""
        return rows_of(self.route_source, self.num_cells)

    @cached_property
    def stage_pairs(self) -> tuple[Ints, Ints]:
        """The different pairs of stages that routes join, as source * number of stages + target, and for each route its
        place among them."""
        num_stages = len(self.stages)
        codes = self.cell_stage[self.route_source] * num_stages + self.cell_stage[self.route_target]
        return distinct(codes, num_stages**2)

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """Routes by number."""
        cells = self.cells
        ends = zip(
            self.route_source.tolist(), self.route_target.tolist(), self.route_has_gradient.tolist(), strict=True
        )
        return tuple(
            Route(cells[source], cells[target], self.route_samples(i), gradient)
            for i, (source, target, gradient) in enumerate(ends)
        )

    @cached_property
    def incoming(self) -> Mapping[Cell, tuple[Route, ...]]:
        return self._routes_of_cells(self.routes_in)

    @cached_property
    def outgoing(self) -> Mapping[Cell, tuple[Route, ...]]:
        return self._routes_of_cells(self.routes_out)

    def _routes_of_cells(self, rows: Rows) -> Mapping[Cell, tuple[Route, ...]]:
        routes = self.routes
        return {cell: tuple(routes[i] for i in row) for cell, row in zip(self.cells, rows.to_lists(), strict=True)}

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether the iteration shares forwards with the one before or the one after it."""
        return bool(self.cell_is_ahead.any() or self.cell_ran_before.any())

    @cached_property
    def cell_is_kept(self) -> Bools:
        """Cells whose output the next iteration hands on: those of the next batch that hand on nothing in this one."""
        return self.cell_is_ahead & (self.routes_out.lengths == 0)

    @cached_property
    def ahead(self) -> frozenset[Cell]:
        """Cells of the next batch."""
        return frozenset(self.cells[i] for i in np.flatnonzero(self.cell_is_ahead).tolist())

    @cached_property
    def kept(self) -> frozenset[Cell]:
        return frozenset(self.cells[i] for i in np.flatnonzero(self.cell_is_kept).tolist())

    @cached_property
    def ran_before(self) -> frozenset[Cell]:
        return frozenset(self.cells[i] for i in np.flatnonzero(self.cell_ran_before).tolist())

    def next_name(self, cell: Cell) -> Cell:
        """The name that a cell of the next batch has in the next iteration."""
        return cell._replace(microbatch=cell.microbatch - self.num_microbatches[cell.module, cell.replica])

    @cached_property
    def cell_has_input_gradient(self) -> Bools:
        """Whether a gradient goes back from the cell to one before it."""
        return np.bincount(self.route_target[self.route_has_gradient], minlength=self.num_cells) > 0

    @cached_property
    def with_backward(self) -> frozenset[Cell]:
        """Cells with a backward pass: something trainable at or before them, and a loss at or after them."""
        return frozenset(self.cells[i] for i in np.flatnonzero(self.cell_has_backward).tolist())

    @cached_property
    def with_weight_gradient(self) -> frozenset[Cell]:
        """Cells whose own layers receive a gradient."""
        return frozenset(self.cells[i] for i in np.flatnonzero(self.cell_has_weight_gradient).tolist())

    def stage(self, cell: Cell) -> Stage:
        return self.plan.modules[cell.module].replicas[cell.replica].stages[cell.stage]

    def samples(self, cell: Cell) -> tuple[int, ...]:
        return self.assignment.samples_of(cell.module, cell.replica, cell.microbatch)

    def selected(self, keep: Bools) -> "Routes":
        """The cells that are kept, and the routes between them."""
        starts = starts_of(keep).tolist()
        of_stages = [
            stage._replace(first=starts[stage.first], last=starts[stage.last])
            for stage in self.stages
            if starts[stage.first] < starts[stage.last]
        ]
        number = np.cumsum(keep) - 1
        routes = np.flatnonzero(keep[self.route_source] & keep[self.route_target])
        sizes = np.array([stage.last - stage.first for stage in of_stages], dtype=np.int64)
        return replace(
            self,
            stages=tuple(of_stages),
            cell_stage=np.repeat(np.arange(len(of_stages)), sizes),
            cell_microbatch=self.cell_microbatch[keep],
            route_source=number[self.route_source[routes]],
            route_target=number[self.route_target[routes]],
            route_has_gradient=self.route_has_gradient[routes],
            route_samples=lambda i: self.route_samples(int(routes[i])),
            cell_has_backward=self.cell_has_backward[keep],
            cell_has_weight_gradient=self.cell_has_weight_gradient[keep],
            cell_is_ahead=self.cell_is_ahead[keep],
            cell_ran_before=self.cell_ran_before[keep],
        )


def derive_routes(
    plan: Plan,
    assignment: BatchAssignment,
    samples: Sequence[Sample],
    *,
    forward_only: bool = False,
    ahead: RunAhead = NO_RUN_AHEAD,
) -> Routes:
    """Every route of the iteration, for every stage boundary, inside a module too.

    `forward_only`: evaluation; nothing has a backward pass. `ahead`: what is shared with the iterations before and
    after it; `samples` and `assignment` are of the batch alone.
    Raises `ValueError` if the assignment gives a sample's tokens to a consumer but to no producer, or to two.
    """
    own = {(name, r): len(cut) for name, replicas in assignment.microbatches.items() for r, cut in enumerate(replicas)}
    assignment, samples = (
        joined_assignment(plan, assignment, len(samples), ahead),
        [*samples, *ahead.next_samples] if ahead.next_samples else samples,
    )
    stages, microbatches, is_ahead, ran_before = _number_cells(plan, assignment, own, ahead)
    num_cells = len(microbatches)
    sizes = np.array([stage.last - stage.first for stage in stages], dtype=np.int64)
    cells_differ = bool(is_ahead.any() or ran_before.any())
    inside = _flows_between_unlike(stages, microbatches) if cells_differ else _flows_inside_modules(stages)
    between = _flows_between_modules(plan, assignment, samples, stages, microbatches)
    source = np.concatenate([inside[0], np.array([flow.source for flow in between], dtype=np.int64)])
    target = np.concatenate([inside[1], np.array([flow.target for flow in between], dtype=np.int64)])

    def samples_of_route(i: int) -> tuple[int, ...]:
        if i >= len(inside[0]):
            return between[i - len(inside[0])].samples
        cell = int(target[i])
        stage = stages[cell_stage[cell]]
        return assignment.samples_of(stage.module, stage.replica, int(microbatches[cell]))

    cell_stage = np.repeat(np.arange(len(stages)), sizes)
    produces_gradient, reaches_loss = _gradients_and_losses(plan, stages, between, num_cells)
    has_backward = produces_gradient & reaches_loss
    if forward_only:
        has_backward[:] = produces_gradient[:] = False
    assert not has_backward[is_ahead | ran_before].any(), "what runs ahead needs no backward"
    trainable = np.array([_is_trainable(plan, stage) for stage in stages], dtype=bool)
    return Routes(
        plan=plan,
        assignment=assignment,
        stages=tuple(stages),
        cell_stage=cell_stage,
        cell_microbatch=microbatches,
        route_source=source,
        route_target=target,
        route_has_gradient=produces_gradient[source] & reaches_loss[target],
        route_samples=samples_of_route,
        cell_has_backward=has_backward,
        cell_has_weight_gradient=has_backward & trainable[cell_stage],
        cell_is_ahead=is_ahead,
        cell_ran_before=ran_before,
        num_microbatches=own,
        forward_only=forward_only,
    )


def _number_cells(
    plan: Plan, assignment: BatchAssignment, own: Mapping[tuple[str, int], int], ahead: RunAhead
) -> tuple[list[StageCells], Ints, Bools, Bools]:
    """The stages that have cells, in topological order, each cell's microbatch, whether it is one of the next batch,
    and whether its forward ran in the iteration before. `own`: number of the batch's own microbatches."""
    stages: list[StageCells] = []
    microbatches: list[Ints] = []
    are_ahead: list[Bools] = []
    ran_before: list[Bools] = []
    first = 0
    num_ahead = stages_ahead(plan)
    for name in module_order(plan):
        replicas = plan.modules[name].replicas
        filled = [{i for i, m in enumerate(cut) if m} for cut in assignment.microbatches[name]]
        for together in replicas_together(plan.modules[name]):
            everyone = set[int]().union(*(filled[r] for r in together))
            for r in together:
                filled[r] = everyone
        numbers = [np.array(sorted(of_replica), dtype=np.int64) for of_replica in filled]
        for s in range(max(len(replica.stages) for replica in replicas)):
            for r, replica in enumerate(replicas):
                if s >= len(replica.stages):
                    continue
                here, last_ahead = numbers[r], num_ahead.get((name, r), 0) - 1
                is_next = np.zeros(len(here), dtype=bool)
                if last_ahead >= 0:
                    is_next = here >= own[name, r]
                    # Of what ran before, the last of these stages alone has cells.
                    is_here = np.where(is_next, s <= last_ahead, not (ahead.ran_before and s < last_ahead))
                    here, is_next = here[is_here], is_next[is_here]
                if len(here):
                    stages.append(StageCells(name, r, s, replica.stages[s], first, first + len(here)))
                    microbatches.append(here)
                    are_ahead.append(is_next)
                    ran_before.append(~is_next & (ahead.ran_before and s == last_ahead))
                    first += len(here)
    if not stages:
        return stages, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool), np.zeros(0, dtype=bool)
    return stages, np.concatenate(microbatches), np.concatenate(are_ahead), np.concatenate(ran_before)


def replicas_together(module: ModulePlan) -> list[range]:
    """The replicas that share experts, and so compute each microbatch together; none if each computes by itself."""
    number = module.replicas_sharing_experts
    return [range(r, r + number) for r in range(0, len(module.replicas), number)] if number > 1 else []


def _is_trainable(plan: Plan, stage: StageCells) -> bool:
    return plan.modules[stage.module].is_trainable(stage.planned.layers)


def _is_last(plan: Plan, stage: StageCells) -> bool:
    return stage.stage == len(plan.modules[stage.module].replicas[stage.replica].stages) - 1


def _flows_inside_modules(stages: Sequence[StageCells]) -> tuple[Ints, Ints]:
    """(source, target) cells: each microbatch goes on to the next stage."""
    first = {stage[:3]: stage.first for stage in stages}
    inner = [stage for stage in stages if stage.stage > 0]
    sizes = np.array([stage.last - stage.first for stage in inner], dtype=np.int64)
    before = np.array([first[stage.module, stage.replica, stage.stage - 1] for stage in inner], dtype=np.int64)
    return ranges(before, sizes), ranges(np.array([stage.first for stage in inner], dtype=np.int64), sizes)


def _flows_between_unlike(stages: Sequence[StageCells], microbatches: Ints) -> tuple[Ints, Ints]:
    """The same where a stage may have other microbatches than the one before it."""
    run = {stage[:3]: stage for stage in stages}
    sources, targets = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for stage in stages:
        before = run.get((stage.module, stage.replica, stage.stage - 1))
        if before is not None:
            _, source, target = np.intersect1d(
                microbatches[before.first : before.last],
                microbatches[stage.first : stage.last],
                assume_unique=True,
                return_indices=True,
            )
            sources.append(before.first + source)
            targets.append(stage.first + target)
    return np.concatenate(sources), np.concatenate(targets)


class _Flow(NamedTuple):
    source: int
    target: int
    samples: tuple[int, ...]


def _flows_between_modules(
    plan: Plan,
    assignment: BatchAssignment,
    samples: Sequence[Sample],
    stages: Sequence[StageCells],
    microbatches: Ints,
) -> list[_Flow]:
    producer_of: dict[str, dict[int, tuple[int, int, int, int]]] = defaultdict(dict)
    """Replica, stage, microbatch and number of the cell that hands a sample on, by module and sample."""
    sources = {edge.source for edge in plan.edges}
    for stage in stages:
        if stage.module in sources and _is_last(plan, stage):
            for cell in range(stage.first, stage.last):
                microbatch = int(microbatches[cell])
                for i in assignment.samples_of(stage.module, stage.replica, microbatch):
                    if i in producer_of[stage.module]:
                        raise ValueError(f"assignment: sample {i} is in two microbatches of {stage.module}")
                    producer_of[stage.module][i] = (stage.replica, stage.stage, microbatch, cell)

    flows: list[_Flow] = []
    for edge in plan.edges:
        source_data = plan.modules[edge.source].data_module(edge.source)
        for stage in stages:
            first, last = stage.planned.layers
            if stage.module != edge.target or not any(first <= layer < last for layer in edge.layers):
                continue
            for cell in range(stage.first, stage.last):
                members: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
                for i in assignment.samples_of(stage.module, stage.replica, int(microbatches[cell])):
                    if samples[i].has(source_data):
                        if i not in producer_of[edge.source]:
                            raise ValueError(
                                f"assignment: sample {i} of {stage.module} needs {edge.source}, "
                                f"but is in no microbatch of {edge.source}"
                            )
                        members[producer_of[edge.source][i]].append(i)
                flows += [_Flow(producer[-1], cell, tuple(group)) for producer, group in sorted(members.items())]
    return flows


def _gradients_and_losses(
    plan: Plan, stages: Sequence[StageCells], between: Sequence[_Flow], num_cells: int
) -> tuple[Bools, Bools]:
    """Two flags per cell: a gradient is computed at or before it; a loss is computed at or after it."""
    entering: dict[int, list[int]] = defaultdict(list)
    leaving: dict[int, list[int]] = defaultdict(list)
    for flow in between:
        entering[flow.target].append(flow.source)
        leaving[flow.source].append(flow.target)
    run = {stage[:3]: slice(stage.first, stage.last) for stage in stages}
    produces_gradient, reaches_loss = np.zeros(num_cells, dtype=bool), np.zeros(num_cells, dtype=bool)
    for stage in stages:
        here = run[stage[:3]]
        if _is_trainable(plan, stage):
            produces_gradient[here] = True
            continue
        before = run.get((stage.module, stage.replica, stage.stage - 1))
        # Otherwise the cells run ahead, and have no gradient.
        if before is not None and before.stop - before.start == here.stop - here.start:
            produces_gradient[here] = produces_gradient[before]
        for cell in range(stage.first, stage.last) if entering else ():
            if entering[cell]:
                produces_gradient[cell] |= produces_gradient[entering[cell]].any()
        for together in replicas_together(plan.modules[stage.module]):
            if stage.replica == together[-1]:  # Their tokens meet at experts: one's gradients need all of them.
                runs = [run[stage.module, r, stage.stage] for r in together]
                needed = any(produces_gradient[cells].any() for cells in runs)
                for cells in runs:
                    produces_gradient[cells] |= needed
    for stage in reversed(stages):
        here = run[stage[:3]]
        if not _is_last(plan, stage):
            after = run.get((stage.module, stage.replica, stage.stage + 1))
            if after is not None and after.stop - after.start == here.stop - here.start:
                reaches_loss[here] = reaches_loss[after]
        elif plan.modules[stage.module].loss_weight != 0:
            reaches_loss[here] = True
        for cell in range(stage.first, stage.last) if leaving else ():
            if leaving[cell]:
                reaches_loss[cell] |= reaches_loss[leaving[cell]].any()
    return produces_gradient, reaches_loss
