"""What a plan would do: its schedule simulated with the problem's costs, and whether it fits into memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from motet.assignment.batch_assignment import BatchAssignment
from motet.balancing.policies import assign
from motet.costs.iteration import IterationCosts
from motet.costs.memory import RESERVE
from motet.errors import UserError
from motet.plan import LayerRange, Plan
from motet.planner.problem import PlanningProblem
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS, SPLIT_BACKWARDS
from motet.schedule.lower import Program, lower
from motet.schedule.program import make_schedule
from motet.schedule.routes import derive_routes
from motet.schedule.schedule import Schedule
from motet.shapes.module_shape import ModuleWorkload
from motet.simulator.lower_bound import lower_bound_s
from motet.simulator.replica_folding import Folding, copy_schedule, fold
from motet.simulator.simulate import SimulationResult, simulate


@dataclass(frozen=True)
class Overflow:
    """A rank that needs more memory than its device has."""

    rank: int
    needed_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        needed, limit = self.needed_bytes / 2**20, self.limit_bytes / 2**20
        return (
            f"rank {self.rank} needs {needed:.0f} MiB, {needed - limit:.0f} MiB more than the {limit:.0f} MiB "
            "that may be used; more stages or tensor parallelism, recompute, zero1 or smaller microbatches would help"
        )


@dataclass(frozen=True)
class Prepared:
    """The typical batch on a plan's ranks, with its costs: alike under every schedule."""

    costs: IterationCosts
    folding: Folding | None
    fewer: tuple[Folding, IterationCosts] | None
    """For one of those pipelines that differ only in how they lie on the nodes, if their schedules are the same."""


@dataclass(frozen=True)
class Evaluation:
    """One iteration of the plan on the problem's typical batch."""

    problem: PlanningProblem
    plan: Plan
    program: Program
    prepared: Prepared
    result: SimulationResult

    @property
    def costs(self) -> IterationCosts:
        return self.prepared.costs

    @property
    def iteration_time_s(self) -> float:
        return self.result.iteration_time_s + self.problem.program_s

    @property
    def num_actions(self) -> int:
        """That were simulated: pipelines that are alike count once."""
        return len(self.program.actions)

    @cached_property
    def overflows(self) -> tuple[Overflow, ...]:
        """The ranks that do not fit, the worst first."""
        limit = int(self.problem.cluster.device.memory_bytes * (1 - RESERVE))
        too_much = [
            Overflow(rank, peak, limit) for rank, peak in enumerate(self.result.peak_memory_bytes) if peak > limit
        ]
        return tuple(sorted(too_much, key=lambda overflow: -overflow.needed_bytes))

    @property
    def fits(self) -> bool:
        return not self.overflows

    @cached_property
    def lower_bound_s(self) -> float:
        splits = self.plan.schedule in SPLIT_BACKWARDS
        bound_s = lower_bound_s(self.program.dependencies.routes, self.costs, split_backward=splits)
        return bound_s + self.problem.program_s

    def mfu(self, dtype: str) -> float | None:
        """Model FLOPs over what the devices could do at their peak; None where the peak is not known."""
        peak = self.problem.cluster.device.peak_flops.get(dtype)
        if peak is None or self.problem.cluster.device.name == "cpu":
            return None
        return self._model_flops() / (self.iteration_time_s * self.plan.num_ranks * peak)

    def _model_flops(self) -> float:
        if self.result.folding is None:
            return self.costs.cells.model_flops()
        copies, routes = self.result.folding.copies, self.costs.routes
        weights = np.array([len(copies[stage.module, stage.replica]) for stage in routes.stages], dtype=float)
        return self.costs.cells.model_flops(weights[routes.cell_stage])


def evaluate(problem: PlanningProblem, plan: Plan, *, folded: bool = True) -> Evaluation:
    """`folded`: pipelines that are alike are simulated once (`motet.simulator.replica_folding`), where ranks share no
    cores.

    Raises `ValueError` if the plan is not one of this problem's model, or its schedule is not known."""
    check_same_model(problem, plan)
    if plan.schedule not in GENERATORS:
        raise UserError(f"plan: schedule {plan.schedule!r} is not known; known are {', '.join(GENERATORS)}")
    return _simulated(problem, plan, _prepare(problem, plan, folded=folded))


def under_schedule(evaluation: Evaluation, schedule: str) -> Evaluation:
    """The same plan under another schedule, which takes less than to evaluate it anew. Raises as `evaluate` does."""
    plan = replace(evaluation.plan, schedule=schedule)
    return _simulated(evaluation.problem, plan, evaluation.prepared)


def _simulated(problem: PlanningProblem, plan: Plan, prepared: Prepared) -> Evaluation:
    costs = prepared.costs
    program = lower(_schedule(plan.schedule, prepared), Dependencies(costs.routes), costs.compute_s)
    result = simulate(program, costs, num_cores=problem.num_cores, folding=prepared.folding)
    return Evaluation(problem, plan, program, prepared, result)


def _schedule(name: str, prepared: Prepared) -> Schedule:
    """Made for all pipelines that differ at all, or for fewer and copied to them."""
    folding, costs = prepared.fewer or (None, prepared.costs)
    schedule = make_schedule(name, costs.routes, costs.compute_s, memory=costs.memory_limit())
    if folding is None:
        return schedule
    return copy_schedule(schedule, Dependencies(costs.routes), Dependencies(prepared.costs.routes), folding)


def _workloads(problem: PlanningProblem) -> Mapping[str, ModuleWorkload]:
    return {name: module.workload for name, module in problem.modules.items()}


def _costs(problem: PlanningProblem, plan: Plan, assignment: BatchAssignment) -> IterationCosts:
    return IterationCosts(
        derive_routes(plan, assignment, problem.samples),
        problem.samples,
        workloads=_workloads(problem),
        table=problem.table,
        cluster=problem.cluster,
        memory=problem.memory,
        sample_kinds=problem.sample_kinds,
    )


def _prepare(problem: PlanningProblem, plan: Plan, *, folded: bool) -> Prepared:
    whole = assign(plan, problem.samples, workloads=_workloads(problem), table=problem.table)
    if not folded or problem.num_cores is not None:
        return Prepared(_costs(problem, plan, whole), None, None)
    folding = fold(plan, whole, problem.sample_kinds, problem.cluster.node)
    return Prepared(_costs(problem, plan, folding.assignment), folding, _fewer(problem, plan, whole, folding))


def _fewer(
    problem: PlanningProblem, plan: Plan, whole: BatchAssignment, folding: Folding
) -> tuple[Folding, IterationCosts] | None:
    """One of those pipelines that differ only in how they lie on the nodes; None if there are none, or if what actions
    take depends on it: where members of a group exchange keys, or towers are contrasted."""
    depends = plan.loss_module is not None or any(stage.cp_size > 1 for *_, stage in plan.stages())
    if depends or problem.cluster.num_nodes == 1:
        return None
    fewer = fold(plan, whole, problem.sample_kinds)
    return None if len(fewer.copies) == len(folding.copies) else (fewer, _costs(problem, plan, fewer.assignment))


def check_same_model(problem: PlanningProblem, plan: Plan) -> None:
    """Raises `ValueError` if the plan is one of another model."""
    for name, module in plan.modules.items():
        owner = module.data_module(name)
        if owner not in problem.modules:
            raise UserError(f"plan: modules.{name}: the model has no such module; it has {', '.join(problem.modules)}")
        num_layers = problem.modules[owner].workload.num_layers
        if module.num_layers != num_layers:
            raise UserError(f"plan: modules.{name}.num_layers: is {module.num_layers}, but the model has {num_layers}")
        trainable = problem.modules[owner].trainable
        if module.trainable != trainable:
            raise UserError(
                f"plan: modules.{name}.trainable: is {_listed(module.trainable)}, but in the model it is "
                f"{_listed(trainable)}; plan again"
            )
    missing = [name for name in problem.modules if name not in plan.modules]
    if missing:
        raise UserError(f"plan: has no module {', '.join(missing)}; the model has it")
    for edge in problem.edges:
        # Copies of a module may each feed a part of them.
        entered = {
            layer
            for e in plan.edges
            if (plan.modules[e.source].data_module(e.source), e.target) == (edge.source, edge.target)
            for layer in e.layers
        }
        if entered != set(edge.layers):
            raise UserError(
                f"plan: edges: {edge.source} must enter {edge.target} at layers {list(edge.layers)}, as in the model"
            )


def _listed(ranges: tuple[LayerRange, ...]) -> list[list[int]]:
    return [list(layers) for layers in ranges]
