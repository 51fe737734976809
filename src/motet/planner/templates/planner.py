"""Oobleck: unlike pipelines of whole nodes from templates, so that training survives failures (thesis 2.4).

1. n0 is the smallest number of nodes on which the model fits (`motet.planner.templates.stage_mapping`, with memory).
2. Templates for n0 .. N - f n0 nodes, each the exact optimum of T1 + T2 + T3.
3. All combinations of at least f + 1 pipelines that use all nodes, with microbatches so that they end together
   (`motet.planner.templates.combinations`); the best few are simulated, and the fastest that fits is taken.

The global batch is cut into `num_microbatches` (f + 1) microbatches, whatever the pipelines: fewer pipelines compute
more of them each. It must have a sample for each.
Deviations: the templates' N_b is `num_microbatches`, what a pipeline gets where there are f + 1 of them (the thesis
plans with 4 S). Each stage may have context parallelism, too, of its own size (`parallel.limits.cp`; of encoders
`parallel.limits.modules`). FSDP inside a stage (thesis 2.6) is context parallelism with shared parameters
(`parallel.limits.fully_sharded`), without tensor parallelism; as a module is fully sharded in all its replicas or in
none, all templates are made for each set of modules that may be, and those that need fewer nodes are taken, or else
those whose pipelines are faster. Limits: a template whose best mapping has more stages than the user allows counts as
none, though another might have fewer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import ceil, inf

from motet.errors import UserError
from motet.plan import Plan, Replica, Stage
from motet.planner.degrees import most_stages
from motet.planner.evaluate import evaluate
from motet.planner.layout import Placement
from motet.planner.problem import PlanningProblem
from motet.planner.selection import rank
from motet.planner.templates.combinations import (
    best_combination,
    best_combinations,
    combination_s,
    recommended_batch,
    template_sizes,
    uncovered,
)
from motet.planner.templates.pipelines import Template, Templates, build_plan, min_max_counts
from motet.planner.templates.stage_mapping import MappingProblem, StageMapping, map_stages
from motet.planner.templates.template_costs import mapping_problems

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
    _check_modules(problem)
    made: list[Templates] = []
    errors: list[UserError] = []
    for fully_sharded in _sets_of_sharded(problem):
        try:
            made.append(_templates(problem, fully_sharded=fully_sharded))
        except UserError as error:
            errors.append(error)
    if not made:
        raise errors[0]
    fewest = min(templates.fewest_nodes for templates in made)
    made = [templates for templates in made if templates.fewest_nodes == fewest]
    return made[0] if len(made) == 1 else min(made, key=lambda templates: _estimate_s(problem, templates))


def _sets_of_sharded(problem: PlanningProblem) -> list[tuple[str, ...]]:
    """Of the modules that may share their parameters, all sets."""
    able = [name for name, m in problem.modules.items() if m.may_be_sharded and max(m.cp_sizes) > 1]
    return [chosen for number in range(len(able) + 1) for chosen in combinations(able, number)]


def _templates(problem: PlanningProblem, *, fully_sharded: tuple[str, ...]) -> Templates:
    """Raises `UserError` if the cluster cannot hold f + 1 pipelines."""
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
    check_cover(range(sizes[0], max(found) + 1), cluster.num_nodes, failures)
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
    """Of an iteration on all nodes."""
    total = problem.num_microbatches * (problem.failures + 1)
    sizes = best_combination(templates.by_nodes, problem.cluster.num_nodes, templates.failures, total)
    return inf if sizes is None else combination_s(templates.by_nodes, sizes, total)


def larger_templates(problem: PlanningProblem, templates: Templates) -> dict[int, Template]:
    """`templates`, and those of larger pipelines up to all nodes, for policies that keep no f + 1 pipelines."""
    choices = mapping_problems(problem, fully_sharded=templates.fully_sharded)
    found = dict(templates.by_nodes)
    for n in range(templates.most_nodes + 1, problem.cluster.num_nodes + 1):
        best = _best_template(problem, choices, n)
        if best is None:
            break
        found[n] = best
    return found


def _best_template(problem: PlanningProblem, choices: Sequence[MappingProblem], num_nodes: int) -> Template | None:
    """The fastest of all choices; None if nothing fits, or all have more stages than the user allows."""
    found = [
        mapping
        for choice in choices
        if (mapping := map_stages(choice, num_nodes)) is not None
        and _has_few_stages(problem, mapping)
        and _is_as_mapped(choice, mapping)
    ]
    best = min(found, key=lambda mapping: mapping.objective_s, default=None)
    return None if best is None else _template(problem, num_nodes, best)


def _is_as_mapped(choice: MappingProblem, mapping: StageMapping) -> bool:
    """A mapping whose language model may share tokens has the costs of packed samples, which are padded if no stage
    does share them."""
    last = list(choice.modules)[-1]
    may_share = any(costs.cp_size > 1 for costs in choice.modules[last].all)
    return not may_share or any(stage.cp_size > 1 for stage in mapping.stages if stage.module == last)


def _has_few_stages(problem: PlanningProblem, mapping: StageMapping) -> bool:
    counts = Counter(stage.module for stage in mapping.stages)
    return all(counts[name] <= most_stages(problem, name) for name in problem.modules)


def _least_nodes(mapping: MappingProblem) -> int:
    """That have memory for parameters and the like."""
    static = [[each.static_bytes or {1: ()} for each in costs.all] for costs in mapping.modules.values()]
    needed = sum(
        min(size * sum(of_layers) for each in of_module for size, of_layers in each.items()) for of_module in static
    )
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


def _check_modules(problem: PlanningProblem) -> None:
    if (
        problem.loss_module is not None
        or len(problem.sinks) != 1
        or any(edge.target != problem.sinks[0] for edge in problem.edges)
    ):
        raise UserError(
            "parallel.planner: oobleck needs one language model that all encoders enter directly and "
            "that nothing reads; give another planner"
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
    return Template(num_nodes=num_nodes, replicas=replicas, first_s=mapping.fill_s, slowest_s=mapping.slowest_s)
