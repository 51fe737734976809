"""The thesis' configuration (section 4.7.1) on one of four data sets: plans of a batch, and one replica simulated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.uneven_data import draw
from motet.assignment.batch_assignment import BatchAssignment
from motet.balancing.sample_work import SampleWork, sample_work
from motet.costs.iteration import IterationCosts
from motet.plan import Plan, Replica
from motet.planner.layouts.layout import build_plan
from motet.planner.problem import Degrees, PlanningProblem
from motet.schedule.generators import SPLIT_BACKWARDS
from motet.schedule.program import make_program
from motet.schedule.routes import derive_routes
from motet.shapes.module_shape import ModuleWorkload
from motet.simulator.lower_bound import lower_bound_s
from motet.simulator.simulate import simulate
from papers.entrain.problems import VISION, problem

Works = dict[str, SampleWork]
NUM_SAMPLES, NUM_REPLICAS, NUM_STAGES, TP, NUM_MICROBATCHES = 512, 4, 8, 2, 32


@dataclass(frozen=True)
class Batch:
    """One global batch and the plans that compute it."""

    problem: PlanningProblem
    apart: Plan
    colocated: Plan

    @property
    def workloads(self) -> Mapping[str, ModuleWorkload]:
        return {name: module.workload for name, module in self.problem.modules.items()}

    def work(self, plan: Plan) -> Works:
        problem = self.problem
        return sample_work(plan, problem.samples, workloads=self.workloads, table=problem.table)


def planned(
    model: str, data_set: str, batch: int, *, num_samples: int = NUM_SAMPLES, num_replicas: int = NUM_REPLICAS
) -> Batch:
    one = problem(model, num_devices=num_replicas * NUM_STAGES * TP, num_samples=1)
    modules = {
        name: replace(module, workload=replace(module.workload, arrangement="separate"))
        for name, module in one.modules.items()
    }
    samples = draw(data_set, num_samples, batch=batch, vision=VISION)
    whole = replace(one, modules=modules, samples=samples, num_microbatches=NUM_MICROBATCHES, recompute=tuple(modules))

    def layout(encoder_pp: int, llm_pp: int) -> Plan:
        stages = {"vision": encoder_pp, "language_model": llm_pp}
        return build_plan(
            whole.with_num_devices(sum(stages.values()) * TP * num_replicas),
            {name: Degrees(tp=TP, pp=pp, dp=num_replicas) for name, pp in stages.items()},
        )

    def slowest(plan: Plan) -> float:
        works = Batch(whole, plan, plan).work(plan).values()
        return max(float((work.forward_s + work.backward_s).sum(axis=0).max()) for work in works)

    apart = min((layout(e, NUM_STAGES - e) for e in range(1, NUM_STAGES)), key=slowest)
    return Batch(whole, apart, _on_the_same_ranks(layout(NUM_STAGES, NUM_STAGES)))


def _on_the_same_ranks(plan: Plan) -> Plan:
    """Each encoder stage beside the language model's of the same number."""
    llm = plan.modules["language_model"]
    number = {rank: i for i, rank in enumerate(sorted(r for x in llm.replicas for s in x.stages for r in s.ranks))}
    groups = [[tuple(number[r] for r in stage.ranks) for stage in replica.stages] for replica in llm.replicas]
    return replace(
        plan,
        modules={
            name: replace(
                module,
                replicas=tuple(
                    Replica(stages=tuple(replace(s, ranks=own) for s, own in zip(x.stages, row, strict=True)))
                    for x, row in zip(module.replicas, groups, strict=True)
                ),
            )
            for name, module in plan.modules.items()
        },
    )


def simulated(batch: Batch, plan: Plan, assignment: BatchAssignment, replica: int) -> tuple[float, float, int]:
    """One replica's seconds without the sums of gradients, its assignment's bound, and its devices' peak memory."""
    alone = _replica_alone(plan, replica)
    own = BatchAssignment({name: (cuts[replica],) for name, cuts in assignment.microbatches.items()})
    samples = batch.problem.samples
    routes = derive_routes(alone, own, samples)
    costs = IterationCosts(
        routes,
        samples,
        workloads=batch.workloads,
        table=batch.problem.table,
        cluster=batch.problem.cluster,
        memory=batch.problem.memory,
    )
    result = simulate(make_program(plan.schedule, routes, costs.compute_s, memory=costs.memory_limit()), costs)
    bound_s = lower_bound_s(routes, costs, split_backward=plan.schedule in SPLIT_BACKWARDS)
    return result.iteration_time_s, bound_s, max(result.peak_memory_bytes)


def _replica_alone(plan: Plan, replica: int) -> Plan:
    ranks = sorted({rank for _, r, _, stage in plan.stages() if r == replica for rank in stage.ranks})
    number = {rank: i for i, rank in enumerate(ranks)}
    return replace(
        plan,
        modules={
            name: replace(
                module,
                replicas=(
                    Replica(
                        stages=tuple(
                            replace(stage, ranks=tuple(number[rank] for rank in stage.ranks))
                            for stage in module.replicas[replica].stages
                        )
                    ),
                ),
            )
            for name, module in plan.modules.items()
        },
    )
