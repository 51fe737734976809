"""Simulates a plan: iteration time, memory, lower bound, and changes that bring a plan within memory."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from motet.assignment.batch_assignment import BatchAssignment
from motet.assignment.next_batch import NO_RUN_AHEAD, RunAhead, check_run_ahead
from motet.balancing.policies import assign
from motet.costs.iteration import IterationCosts
from motet.costs.memory import usable_bytes
from motet.errors import UserError
from motet.plan import LayerRange, Plan
from motet.planner.problem import PlanningProblem
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS, SPLIT_BACKWARDS
from motet.schedule.lower import Program, lower
from motet.schedule.program import make_schedule
from motet.schedule.routes import derive_routes
from motet.simulator.lower_bound import lower_bound_s
from motet.simulator.replica_folding import Folding, copy_schedule, fold
from motet.simulator.simulate import SimulationResult, simulate

MAX_MICROBATCH_FACTOR = 8
"""Largest multiple of the number of microbatches that `memory_suggestions` tries."""


@dataclass(frozen=True)
class Overflow:
    """A rank that needs more memory than is usable on its device."""

    rank: int
    needed_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        needed, limit = self.needed_bytes / 2**20, self.limit_bytes / 2**20
        return (
            f"rank {self.rank} needs {needed:.0f} MiB, {needed - limit:.0f} MiB more than the {limit:.0f} MiB "
            "that may be used; use more stages or tensor parallelism, recompute, zero1 or smaller microbatches"
        )


@dataclass(frozen=True)
class Prepared:
    """The costs of the typical batch on a plan's ranks, which no schedule changes."""

    costs: IterationCosts
    folding: Folding | None
    fewer: tuple[Folding, IterationCosts] | None
    """A folding that ignores where pipelines lie on the nodes, and its costs; None if it folds no further."""


@dataclass(frozen=True)
class Evaluation:
    """One iteration of the plan on the problem's typical batch; with run-ahead one of many, between others like it."""

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
        """Simulated actions; pipelines that are folded into one count once."""
        return len(self.program.actions)

    @cached_property
    def overflows(self) -> tuple[Overflow, ...]:
        """The ranks that do not fit, the worst first."""
        limit = int(usable_bytes(self.problem.cluster))
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
        """Model FLOPs utilization: model FLOPs over the devices' peak; None where the peak is not known.

        By the usual convention (Chowdhery et al. 2022, appendix B) attention counts all pairs, also hidden ones, and a
        backward counts twice its forward."""
        return self._utilization(dtype, recomputed=False)

    def hfu(self, dtype: str) -> float | None:
        """Hardware FLOPs utilization: `mfu` with the forwards that backwards repeat."""
        return self._utilization(dtype, recomputed=True)

    def _utilization(self, dtype: str, *, recomputed: bool) -> float | None:
        peak = self.problem.cluster.device.peak_flops.get(dtype)
        if peak is None or self.problem.cluster.device.name == "cpu":
            return None
        weights = None
        if self.result.folding is not None:
            copies, routes = self.result.folding.copies, self.costs.routes
            of_stage = np.array([len(copies[stage.module, stage.replica]) for stage in routes.stages], dtype=float)
            weights = of_stage[routes.cell_stage]
        flops = self.costs.cells.model_flops(weights, recomputed=recomputed)
        return flops / (self.iteration_time_s * self.plan.num_ranks * peak)


def evaluate(problem: PlanningProblem, plan: Plan, *, folded: bool = True) -> Evaluation:
    """Simulates one iteration of the plan. `folded`: simulate identical pipelines once, where ranks share no cores
    (`motet.simulator.replica_folding`).

    Raises `UserError` if the plan belongs to another model, or its schedule is not known."""
    check_same_model(problem, plan)
    if plan.schedule not in GENERATORS:
        raise UserError(f"plan: schedule {plan.schedule!r} is not known; known are {', '.join(GENERATORS)}")
    check_run_ahead(plan)
    return _simulated(problem, plan, _prepare(problem, plan, folded=folded))


def under_schedule(evaluation: Evaluation, schedule: str) -> Evaluation:
    """The same plan under another schedule, faster than a new evaluation. Raises as `evaluate` does."""
    plan = replace(evaluation.plan, schedule=schedule)
    return _simulated(evaluation.problem, plan, evaluation.prepared)


def _simulated(problem: PlanningProblem, plan: Plan, prepared: Prepared) -> Evaluation:
    costs = prepared.costs
    folding, fewer_costs = prepared.fewer or (None, costs)
    routes, memory = fewer_costs.routes, fewer_costs.memory_limit()
    schedule = make_schedule(plan.schedule, routes, fewer_costs.compute_s, memory=memory)
    if folding is not None:
        schedule = copy_schedule(schedule, Dependencies(routes), Dependencies(costs.routes), folding)
    program = lower(schedule, Dependencies(costs.routes), costs.compute_s)
    result = simulate(program, costs, num_cores=problem.num_cores, folding=prepared.folding)
    return Evaluation(problem, plan, program, prepared, result)


def _prepare(problem: PlanningProblem, plan: Plan, *, folded: bool) -> Prepared:
    workloads = {name: module.workload for name, module in problem.all_modules.items()}

    num_batches = 2 if plan.run_ahead else 1

    def costs(assignment: BatchAssignment, folding: Folding | None = None) -> IterationCosts:
        ahead = RunAhead(True, assignment, problem.samples) if plan.run_ahead else NO_RUN_AHEAD
        return IterationCosts(
            derive_routes(plan, assignment, problem.samples, ahead=ahead),
            problem.samples * num_batches,
            workloads=workloads,
            table=problem.table,
            cluster=problem.cluster,
            memory=problem.memory,
            sample_kinds=problem.sample_kinds * num_batches,
            replica_of=None if folding is None else folding.replica_of,
        )

    whole = assign(plan, problem.samples, workloads=workloads, table=problem.table)
    if not folded or problem.num_cores is not None:
        return Prepared(costs(whole), None, None)
    folding = fold(plan, whole, problem.sample_kinds, problem.cluster.node)
    fewer = None
    # Where members of a group exchange keys or parameters, or contrastive towers exchange features, compute times
    # depend on the placement on nodes.
    depends_on_nodes = plan.loss_module is not None or any(stage.cp_size > 1 for *_, stage in plan.stages())
    depends_on_nodes = depends_on_nodes or any(module.shares_over_replicas for module in plan.modules.values())
    if not depends_on_nodes and problem.cluster.num_nodes > 1:
        fewer = fold(plan, whole, problem.sample_kinds)
    if fewer is None or len(fewer.copies) == len(folding.copies):
        return Prepared(costs(folding.assignment, folding), folding, None)
    return Prepared(costs(folding.assignment, folding), folding, (fewer, costs(fewer.assignment, fewer)))


class Simulations:
    """Simulates each plan once, whichever planner it is of. All problems that plans are given with must cost them
    alike."""

    def __init__(self) -> None:
        self._known: list[Evaluation] = []
        self.num_actions = 0
        """Actions of all plans together."""

    def evaluate(self, problem: PlanningProblem, plan: Plan) -> Evaluation:
        """As the function does."""
        return self._found(plan) or self.add(evaluate(problem, plan))

    def under_schedule(self, evaluation: Evaluation, schedule: str) -> Evaluation:
        """As the function does."""
        return self._found(replace(evaluation.plan, schedule=schedule)) or self.add(
            under_schedule(evaluation, schedule)
        )

    def add(self, evaluation: Evaluation) -> Evaluation:
        if self._found(evaluation.plan) is None:
            self._known.append(evaluation)
            self.num_actions += evaluation.num_actions
        return evaluation

    def _found(self, plan: Plan) -> Evaluation | None:
        found = next((each for each in self._known if differ_only_in(("planner",), each.plan, plan)), None)
        return found if found is None or found.plan == plan else replace(found, plan=plan)


def differ_only_in(names: Collection[str], plan: Plan, other: Plan) -> bool:
    """Whether two plans are equal but for these fields."""
    return all(
        getattr(plan, field.name) == getattr(other, field.name) for field in fields(Plan) if field.name not in names
    )


def check_same_model(problem: PlanningProblem, plan: Plan) -> None:
    """Raises `UserError` if the plan belongs to another model."""
    modules = problem.all_modules
    for name, module in plan.modules.items():
        owner = module.data_module(name)
        if owner not in modules:
            raise UserError(f"plan: modules.{name}: the model has no such module; it has {', '.join(modules)}")
        num_layers = modules[owner].workload.num_layers
        if module.num_layers != num_layers:
            raise UserError(f"plan: modules.{name}.num_layers: is {module.num_layers}, but the model has {num_layers}")
        workload, num_stages = modules[owner].workload, max(len(replica.stages) for replica in module.replicas)
        if workload.max_stages is not None and num_stages > workload.max_stages:
            raise UserError(
                f"plan: modules.{name}: has {num_stages} stages, but a {workload.family} can be cut into "
                f"{workload.max_stages} at most; plan again"
            )
        trainable = modules[owner].trainable
        if module.trainable != trainable:
            raise UserError(
                f"plan: modules.{name}.trainable: is {_listed(module.trainable)}, but in the model it is "
                f"{_listed(trainable)}; plan again"
            )
    missing = [name for name in modules if name not in plan.modules]
    if missing:
        raise UserError(f"plan: has no module {', '.join(missing)}; the model has it")
    for edge in problem.edges:
        # Each copy of a module may feed some of the layers.
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


def memory_suggestions(evaluation: Evaluation) -> list[str]:
    """Suggests changes that bring a plan within memory: one line for each that suffices in simulation on the same
    layout, the least intrusive first; else one line that says what does not suffice."""
    found = [
        f"{what} fits: peak {max(changed.result.peak_memory_bytes) / 2**30:.2f} GiB"
        for what, changed in _changes(evaluation)
        if changed.fits
    ]
    if found:
        return found
    worst = evaluation.overflows[0]
    factor = -(-worst.needed_bytes // max(1, worst.limit_bytes))
    return [
        "zero1, recompute and smaller microbatches do not suffice; "
        f"spread the layers of rank {worst.rank} over about {factor} times as many devices (more stages, or larger tp)"
    ]


def _changes(evaluation: Evaluation) -> Iterator[tuple[str, Evaluation]]:
    """Single changes, then combinations of them if no single change suffices."""
    problem, plan = evaluation.problem, evaluation.plan
    sharded = problem.with_options(memory=replace(problem.memory, zero1=True))
    recompute = tuple(name for name, module in plan.modules.items() if module.kind != "loss")
    owners = tuple(name for name in problem.modules if name != problem.loss_module)
    recomputing = problem.with_options(recompute=owners)
    tried = []
    if not problem.memory.zero1 and any(len(module.replicas) > 1 for module in plan.modules.values()):
        tried.append(("parallel.zero1: true", evaluate(sharded, plan)))
    if set(plan.recompute) != set(recompute):
        names = ", ".join(owners)
        tried.append((f"parallel.recompute: [{names}]", evaluate(recomputing, replace(plan, recompute=recompute))))
    if plan.loss_module is not None:
        tried += _recomputed_features(evaluation)
    for number in _more_microbatches(evaluation):
        smaller = evaluate(problem.with_options(num_microbatches=number), replace(plan, num_microbatches=number))
        tried.append((f"parallel.num_microbatches: {number}", smaller))
        if smaller.fits:
            break
    yield from tried
    if any(changed.fits for _, changed in tried):
        return
    both = recomputing.with_options(memory=replace(problem.memory, zero1=True))
    what = "parallel.zero1: true with parallel.recompute of all modules"
    together = evaluate(both, replace(plan, recompute=recompute))
    yield what, together
    for number in _more_microbatches(evaluation):
        if together.fits:
            return
        changed = replace(plan, recompute=recompute, num_microbatches=number)
        together = evaluate(both.with_options(num_microbatches=number), changed)
        yield f"{what} and parallel.num_microbatches: {number}", together


def _more_microbatches(evaluation: Evaluation) -> Iterator[int]:
    """Larger numbers of microbatches that the samples suffice for; none for towers, which hold whole contrastive
    batches."""
    problem, plan = evaluation.problem, evaluation.plan
    replicas = max(len(module.replicas) for module in plan.modules.values())
    factor = 2
    while plan.loss_module is None and factor <= MAX_MICROBATCH_FACTOR:
        if factor * plan.num_microbatches * replicas > len(problem.samples):
            return
        yield factor * plan.num_microbatches
        factor *= 2


def _recomputed_features(evaluation: Evaluation) -> Iterator[tuple[str, Evaluation]]:
    """Recomputed features with more microbatches: smaller microbatches alone do not help towers, which hold all
    microbatches between two batch-syncs."""
    problem, plan = evaluation.problem, evaluation.plan
    towers = tuple(name for name in problem.towers if plan.modules[name].trainable)
    if set(towers) <= set(plan.recompute_features):
        return
    for factor in (1, 2, 4, 8):
        cut = {
            name: replace(plan.modules[name], num_microbatches=factor * plan.num_microbatches_of(name))
            for name in towers
        }
        changed = evaluate(problem, replace(plan, modules={**plan.modules, **cut}, recompute_features=towers))
        more = f" with {factor} times as many microbatches" if factor > 1 else ""
        yield f"parallel.recompute_features: [{', '.join(towers)}]{more}", changed
        if changed.fits:
            return
