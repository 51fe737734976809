"""Oobleck: heterogeneous pipelines of whole nodes from templates, so that training survives failures (thesis 2.4).

1. n0 is the smallest number of nodes on which the model fits (`motet.planner.templates.stage_mapping`, with memory).
2. There is a template for each of n0 .. N - f n0 nodes, each the exact optimum of T1 + T2 + T3.
3. Of all combinations of at least f + 1 pipelines that use all nodes (`motet.planner.templates.pipelines`), the best
   few are simulated, and the fastest that fits is taken.

The global batch is cut into `num_microbatches` (f + 1) microbatches, whatever the pipelines, and must have a sample for
each of them.
Deviations: templates are planned with `num_microbatches`, the share of a pipeline where there are f + 1 of them (the
thesis plans with 4 S). Each stage may have its own context-parallel size (`parallel.limits.cp`; for encoders
`parallel.limits.modules`). FSDP inside a stage (thesis 2.6) is context parallelism with sharded parameters
(`parallel.limits.fully_sharded`), without tensor parallelism. As a module is fully sharded in all its replicas or in
none, templates are made for each set of modules that may be; those that need fewer nodes are taken, or else those whose
pipelines are faster. Limits: a template whose best mapping has more stages than the user allows is dropped, though
another mapping might have fewer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import ceil, inf

from motet.errors import UserError
from motet.plan import Plan, Replica, Stage
from motet.planner.evaluate import evaluate
from motet.planner.layouts.degrees import most_stages
from motet.planner.layouts.layout import Placement
from motet.planner.problem import PlanningProblem
from motet.planner.selection import rank
from motet.planner.templates.pipelines import (
    Template,
    Templates,
    best_combination,
    best_combinations,
    build_plan,
    combination_s,
    min_max_counts,
    recommended_batch,
    template_sizes,
    unreachable_totals,
)
from motet.planner.templates.stage_mapping import MappingProblem, StageMapping, map_stages
from motet.planner.templates.template_costs import mapping_problems

MAX_SIMULATED = 6


def oobleck(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """Plans the fastest combination of templates, by simulation.

    Raises `UserError` if the cluster cannot hold f + 1 pipelines, or the batch cannot be divided among them."""
    if placement not in (None, "parallel"):
        raise UserError(
            f"parallel.placement: oobleck gives every module its own ranks, but is {placement}; leave it out"
        )
    templates = make_templates(problem)
    total = total_microbatches(problem)
    plans = [
        plan_with_sizes(problem, templates, sizes)
        for sizes in best_combinations(
            templates.by_nodes, problem.cluster.num_nodes, problem.failures, total, most=MAX_SIMULATED
        )
    ]
    return min((evaluate(problem, plan) for plan in plans), key=rank).plan


def plan_with_sizes(problem: PlanningProblem, templates: Templates, sizes: tuple[int, ...]) -> Plan:
    """Plans one pipeline on each number of nodes in `sizes`."""
    one = templates.by_nodes[sizes[0]]
    modules = {
        name: problem.modules[name].planned(
            (replica,),
            context=problem.modules[name].context,
            fully_sharded=name in templates.fully_sharded,
        )
        for name, replica in one.replicas.items()
    }
    like = problem.plan(modules, planner="oobleck")
    chosen = [templates.by_nodes[n] for n in sizes]
    return build_plan(like, templates, sizes, min_max_counts(chosen, total_microbatches(problem)))


def total_microbatches(problem: PlanningProblem) -> int:
    """Returns the microbatches of all pipelines together. Raises `UserError` if there are fewer samples."""
    total = problem.num_microbatches * (problem.failures + 1)
    if len(problem.samples) < total:
        raise UserError(
            f"train.global_batch_size: is {len(problem.samples)}, but {problem.failures + 1} pipelines with "
            f"parallel.num_microbatches {problem.num_microbatches} need {total}; "
            f"give {recommended_batch(len(problem.samples), total)}, or fewer microbatches"
        )
    return total


def make_templates(problem: PlanningProblem) -> Templates:
    """Makes the templates of a training job. Raises `UserError` if the cluster cannot hold f + 1 pipelines."""
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
    sinks = problem.sinks
    if problem.loss_module is not None or len(sinks) != 1 or any(edge.target != sinks[0] for edge in problem.edges):
        raise UserError(
            "parallel.planner: oobleck needs one language model that all encoders enter directly and "
            "that nothing reads; give another planner"
        )
    shardable = [name for name, m in problem.modules.items() if m.may_be_sharded and max(m.cp_sizes) > 1]
    made: list[Templates] = []
    errors: list[UserError] = []
    for number in range(len(shardable) + 1):
        for fully_sharded in combinations(shardable, number):
            try:
                made.append(_templates(problem, fully_sharded=fully_sharded))
            except UserError as error:
                errors.append(error)
    if not made:
        raise errors[0]
    fewest = min(templates.min_nodes for templates in made)
    made = [templates for templates in made if templates.min_nodes == fewest]
    return made[0] if len(made) == 1 else min(made, key=lambda templates: _estimate_s(problem, templates))


def _templates(problem: PlanningProblem, *, fully_sharded: tuple[str, ...]) -> Templates:
    cluster, failures = problem.cluster, problem.failures
    choices = mapping_problems(problem, fully_sharded=fully_sharded)
    found: dict[int, Template] = {}
    for n in range(min(map(_least_nodes, choices)), cluster.num_nodes // (failures + 1) + 1):
        best = _best_template(problem, choices, n)
        if best is not None:
            found[n] = best
            break
    if not found:
        raise UserError(
            f"parallel.planner: oobleck finds no pipeline of {' and '.join(problem.modules)} on up to "
            f"{cluster.num_nodes // (failures + 1)} of {cluster.num_nodes} nodes, which is what {failures + 1} "
            f"pipelines (to survive {failures} failures) leave for one; give more nodes, tp sizes or stages "
            "(max_pp), or fewer failures"
        )
    sizes = template_sizes(cluster.num_nodes, failures, next(iter(found)))
    for n in sizes[1:]:
        best = _best_template(problem, choices, n)
        if best is None:
            break
        found[n] = best
    check_coverage(range(sizes[0], max(found) + 1), cluster.num_nodes, failures)
    return Templates(
        failures=failures,
        devices_per_node=cluster.devices_per_node,
        by_nodes=found,
        layer_bytes={name: problem.estimator.transferred_bytes(name) for name in problem.modules},
        state_bytes={name: problem.estimator.optimizer_state_bytes(name) for name in problem.modules}
        if problem.memory.zero1
        else None,
        state_copies=failures + 1,
        fully_sharded=fully_sharded,
    )


def _estimate_s(problem: PlanningProblem, templates: Templates) -> float:
    """Seconds of an iteration on all nodes."""
    total = problem.num_microbatches * (problem.failures + 1)
    sizes = best_combination(templates.by_nodes, problem.cluster.num_nodes, templates.failures, total)
    return inf if sizes is None else combination_s(templates.by_nodes, sizes, total)


def larger_templates(problem: PlanningProblem, templates: Templates) -> dict[int, Template]:
    """Extends the templates to pipelines on up to all nodes, for policies that do not keep f + 1 pipelines."""
    choices = mapping_problems(problem, fully_sharded=templates.fully_sharded)
    found = dict(templates.by_nodes)
    for n in range(templates.max_nodes + 1, problem.cluster.num_nodes + 1):
        best = _best_template(problem, choices, n)
        if best is None:
            break
        found[n] = best
    return found


def _best_template(problem: PlanningProblem, choices: Sequence[MappingProblem], num_nodes: int) -> Template | None:
    """Returns the fastest template; None if nothing fits, or all have more stages than the user allows."""

    def is_allowed(choice: MappingProblem, mapping: StageMapping) -> bool:
        counts = Counter(stage.module for stage in mapping.stages)
        if any(counts[name] > most_stages(problem, name) for name in problem.modules):
            return False
        # Costs with context parallelism in the language model are those of packed samples. If no stage uses it, samples
        # are padded, and the costs do not hold.
        last = list(choice.modules)[-1]
        is_packed = any(costs.cp_size > 1 for costs in choice.modules[last].all)
        return not is_packed or any(stage.cp_size > 1 for stage in mapping.stages if stage.module == last)

    mappings = [(choice, map_stages(choice, num_nodes)) for choice in choices]
    allowed = [mapping for choice, mapping in mappings if mapping is not None and is_allowed(choice, mapping)]
    best = min(allowed, key=lambda mapping: mapping.objective_s, default=None)
    return None if best is None else _template(problem, num_nodes, best)


def _least_nodes(mapping: MappingProblem) -> int:
    """Returns a lower bound on the nodes: those whose memory holds all static bytes."""
    static = [[each.static_bytes or {1: ()} for each in costs.all] for costs in mapping.modules.values()]
    needed = sum(
        min(size * sum(of_layers) for each in of_module for size, of_layers in each.items()) for of_module in static
    )
    return max(1, ceil(needed / (mapping.devices_per_node * mapping.device_bytes) * (1 - 1e-9)))


def check_coverage(sizes: range, num_nodes: int, failures: int) -> None:
    """Raises `UserError` where templates of these sizes do not keep the guarantee: a model with few layers cannot use
    all devices of a large pipeline."""
    gaps = unreachable_totals(sizes, num_nodes, failures)
    # Merged pipelines have at most 2 n0 - 1 nodes, and at most N - f n0.
    if gaps or sizes[-1] < min(2 * sizes[0] - 1, num_nodes - failures * sizes[0]):
        raise UserError(
            f"parallel.planner: oobleck has templates for {sizes[0]} to {sizes[-1]} nodes only (no more devices can "
            f"share the layers), which do not make {', '.join(map(str, gaps)) or 'merged pipelines'}"
            f"{' nodes' if gaps else ''}; allow larger tp sizes, or give fewer nodes"
        )


def _template(problem: PlanningProblem, num_nodes: int, mapping: StageMapping) -> Template:
    replicas: Mapping[str, Replica] = {
        name: Replica(
            stages=tuple(
                Stage(
                    layers=stage.layers,
                    ranks=tuple(range(stage.first_device, stage.first_device + stage.num_devices)),
                    tp_size=stage.num_devices // stage.cp_size,
                    cp_size=stage.cp_size,
                )
                for stage in mapping.stages
                if stage.module == name
            )
        )
        for name in problem.modules
    }
    return Template(num_nodes=num_nodes, replicas=replicas, fill_s=mapping.fill_s, slowest_s=mapping.slowest_s)
