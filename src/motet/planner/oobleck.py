"""Oobleck: unlike pipelines of whole nodes from templates, so that training survives failures (thesis 2.4).

1. n0 is the smallest number of nodes on which the model fits (`motet.resilience.stage_mapping`, with memory).
2. Templates for n0 .. N - f n0 nodes, each the exact optimum of T1 + T2 + T3.
3. All combinations of at least f + 1 pipelines that use all nodes, with microbatches so that they end together
   (`motet.resilience.combinations`); the best few are simulated, and the fastest that fits is taken.

The global batch is cut into `num_microbatches` (f + 1) microbatches, whatever the pipelines: fewer pipelines compute
more of them each. It must have a sample for each.
Deviations: the templates' N_b is `num_microbatches`, what a pipeline gets where there are f + 1 of them (the thesis
plans with 4 S). Limits: a plan cannot say that a stage's parameters are sharded (FSDP), so devices of a stage share it
by tensor parallelism; context parallelism is not searched.
"""

from collections.abc import Mapping
from math import ceil

from motet.costs.memory import RESERVE
from motet.errors import UserError
from motet.plan import Plan, Replica, Stage
from motet.planner.bound_and_simulate import rank
from motet.planner.degrees import tp_sizes
from motet.planner.evaluate import evaluate
from motet.planner.explicit import Placement
from motet.planner.layer_bytes import saved_bytes_of_layers, static_bytes_of_layers
from motet.planner.problem import PlanningProblem
from motet.resilience.combinations import best_combinations, recommended_batch, template_sizes, uncovered
from motet.resilience.microbatches import min_max_counts
from motet.resilience.pipelines import Template, Templates, build_plan
from motet.resilience.stage_mapping import ChainCosts, MappingProblem, StageMapping, map_stages

MAX_SIMULATED = 6


def oobleck(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """The fastest combination of templates, by simulation.

    Raises `UserError` if the cluster cannot hold f + 1 pipelines, or the batch cannot be shared out among them."""
    if placement not in (None, "parallel"):
        raise UserError(f"parallel.placement: oobleck gives every module its own ranks; {placement} shares them")
    templates = make_templates(problem)
    total = total_microbatches(problem)
    plans = [
        plan_of(problem, templates, sizes)
        for sizes in best_combinations(
            templates.by_nodes, problem.cluster.num_nodes, problem.failures, total, most=MAX_SIMULATED
        )
    ]
    return min((evaluate(problem, plan) for plan in plans), key=rank).plan


def plan_of(problem: PlanningProblem, templates: Templates, sizes: tuple[int, ...]) -> Plan:
    """Pipelines on so many nodes each."""
    one = templates.by_nodes[sizes[0]]
    like = problem.plan(
        {name: problem.modules[name].planned((replica,)) for name, replica in one.replicas.items()}, planner="oobleck"
    )
    chosen = [templates.by_nodes[n] for n in sizes]
    return build_plan(like, templates, sizes, min_max_counts(chosen, total_microbatches(problem)))


def total_microbatches(problem: PlanningProblem) -> int:
    """Of all pipelines. Raises `UserError` if there are fewer samples."""
    total = problem.num_microbatches * (problem.failures + 1)
    if len(problem.samples) < total:
        raise UserError(
            f"train.global_batch_size: is {len(problem.samples)}, but {problem.failures + 1} pipelines with "
            f"parallel.num_microbatches {problem.num_microbatches} need {total}; "
            f"give {recommended_batch(len(problem.samples), total)}, or fewer microbatches"
        )
    return total


def make_templates(problem: PlanningProblem) -> Templates:
    """Those of the job's whole life. Raises `UserError` if the cluster cannot hold f + 1 pipelines."""
    cluster, failures = problem.cluster, problem.failures
    if cluster.num_nodes <= failures:
        raise UserError(
            f"cluster.num_nodes: is {cluster.num_nodes}, but to survive {failures} failures oobleck needs "
            f"{failures + 1} pipelines on nodes of their own; give at least {failures + 1}"
        )
    if cluster.num_devices % cluster.devices_per_node:
        raise UserError(
            f"cluster: {cluster.num_devices} devices do not fill {cluster.num_nodes} nodes of "
            f"{cluster.devices_per_node}; oobleck needs whole nodes"
        )
    mapping = _mapping_problem(problem)
    found: dict[int, StageMapping] = {}
    for n in range(_least_nodes(mapping), cluster.num_nodes // (failures + 1) + 1):
        best = map_stages(mapping, n)
        if best is not None:
            found[n] = best
            break
    if not found:
        raise UserError(
            f"parallel.planner: oobleck finds no pipeline of {' and '.join(problem.modules)} on up to "
            f"{cluster.num_nodes // (failures + 1)} of {cluster.num_nodes} nodes, which is what {failures + 1} "
            f"pipelines (to survive {failures} failures) leave for one; give more nodes, tp sizes, or fewer failures"
        )
    sizes = template_sizes(cluster.num_nodes, failures, next(iter(found)))
    for n in sizes[1:]:
        best = map_stages(mapping, n)
        if best is None:
            break
        found[n] = best
    check_cover(range(sizes[0], max(found) + 1), cluster.num_nodes, failures)
    by_nodes = {n: _template(problem, n, best) for n, best in found.items()}
    return Templates(failures=failures, devices_per_node=cluster.devices_per_node, by_nodes=by_nodes)


def _least_nodes(mapping: MappingProblem) -> int:
    """That have memory for parameters and the like."""
    static = [costs.static_bytes or {1: ()} for costs in mapping.modules.values()]
    needed = sum(min(size * sum(of_layers) for size, of_layers in each.items()) for each in static)
    return max(1, ceil(needed / (mapping.devices_per_node * mapping.device_bytes) * (1 - 1e-9)))


def check_cover(sizes: range, num_nodes: int, failures: int) -> None:
    """Raises `UserError` where templates of these sizes do not keep the guarantee: a model with few layers cannot use
    all devices of a large pipeline."""
    gaps = uncovered(sizes, num_nodes, failures)
    # What merging makes has at most 2 n0 - 1 nodes, and at most N - f n0.
    if gaps or sizes[-1] < min(2 * sizes[0] - 1, num_nodes - failures * sizes[0]):
        raise UserError(
            f"parallel.planner: oobleck has templates for {sizes[0]} to {sizes[-1]} nodes only (no more devices can "
            f"share the layers), which do not make {', '.join(map(str, gaps)) or 'merged pipelines'}"
            f"{' nodes' if gaps else ''}; allow larger tp sizes, or give fewer nodes"
        )


def _mapping_problem(problem: PlanningProblem) -> MappingProblem:
    if (
        problem.loss_module is not None
        or len(problem.sinks) != 1
        or any(edge.target != problem.sinks[0] for edge in problem.edges)
    ):
        raise UserError("parallel.planner: oobleck needs one language model that all encoders enter directly")
    return MappingProblem(
        modules={name: _chain_costs(problem, name) for name in (*problem.sources, *problem.sinks)},
        devices_per_node=problem.cluster.devices_per_node,
        num_microbatches=problem.num_microbatches,
        device_bytes=problem.cluster.device.memory_bytes * (1 - RESERVE),
    )


def _chain_costs(problem: PlanningProblem, name: str) -> ChainCosts:
    sizes = [size for size in tp_sizes(problem, name) if size <= problem.cluster.devices_per_node]
    if not sizes:
        raise UserError(f"parallel.limits: {name} has no tp size that fits into a node; allow 1")
    num_pipelines = problem.failures + 1
    load = problem.typical_load(name, num_pipelines)
    return ChainCosts(
        seconds={size: [t.total_s for t in problem.layer_times(name, size, num_pipelines)] for size in sizes},
        static_bytes={
            size: static_bytes_of_layers(problem, name, tp_size=size, num_holders=num_pipelines) for size in sizes
        },
        saved_bytes={size: saved_bytes_of_layers(problem, name, load, tp_size=size) for size in sizes},
    )


def _template(problem: PlanningProblem, num_nodes: int, mapping: StageMapping) -> Template:
    replicas: Mapping[str, Replica] = {
        name: Replica(
            stages=tuple(
                Stage(
                    layers=stage.layers,
                    ranks=tuple(range(stage.first_device, stage.first_device + stage.num_devices)),
                    tp_size=stage.num_devices,
                )
                for stage in mapping.stages
                if stage.module == name
            )
        )
        for name in problem.modules
    }
    return Template(num_nodes=num_nodes, replicas=replicas, first_s=mapping.fill_s, slowest_s=mapping.slowest_s)
