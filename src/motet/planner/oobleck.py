"""Oobleck: unlike pipelines of whole nodes from templates, so that training survives failures (thesis 2.4).

1. n0 is the smallest number of nodes on which the model fits (`motet.resilience.stage_mapping`, with memory).
2. Templates for n0 .. N - f n0 nodes, each the exact optimum of T1 + T2 + T3.
3. All combinations of at least f + 1 pipelines that use all nodes, with microbatches so that they end together
   (`motet.resilience.combinations`); the best few are simulated, and the fastest that fits is taken.

The global batch is cut into `num_microbatches` (f + 1) microbatches, whatever the pipelines: fewer pipelines compute
more of them each. It must have a sample for each.
Deviations: the templates' N_b is `num_microbatches`, what a pipeline gets where there are f + 1 of them (the thesis
plans with 4 S). FSDP inside a stage (thesis 2.6) is context parallelism with shared parameters: for each template, the
language model has either tensor parallelism of any sizes or stages of one such size, whichever is faster
(`parallel.limits.fully_sharded`). Limits: context parallelism by itself is not searched, and encoders have no FSDP. A
template whose best mapping has more stages than the user allows counts as none, though another might have fewer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil

from motet.costs.memory import RESERVE, gathered_bytes
from motet.costs.stage_seconds import is_gathered_in_backward, key_exchange, parameter_gather
from motet.errors import UserError
from motet.plan import Plan, Replica, Stage
from motet.planner.bound_and_simulate import rank
from motet.planner.degrees import cp_sizes, most_stages, tp_sizes
from motet.planner.evaluate import evaluate
from motet.planner.explicit import Placement
from motet.planner.layer_bytes import copied_bytes_of_layers, saved_bytes_of_layers, static_bytes_of_layers
from motet.planner.problem import PlanningProblem
from motet.resilience.combinations import best_combinations, recommended_batch, template_sizes, uncovered
from motet.resilience.mapping_problem import ChainCosts, MappingProblem
from motet.resilience.microbatches import min_max_counts
from motet.resilience.pipelines import Template, Templates, build_plan
from motet.resilience.stage_mapping import StageMapping, map_stages

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
            fully_sharded=any(size_of_shares(templates, name, n) > 1 for n in templates.by_nodes),
        )
        for name, replica in one.replicas.items()
    }
    like = problem.plan(modules, planner="oobleck")
    chosen = [templates.by_nodes[n] for n in sizes]
    return build_plan(like, templates, sizes, min_max_counts(chosen, total_microbatches(problem)))


def size_of_shares(templates: Templates, name: str, num_nodes: int) -> int:
    """Of the module's stages in a template: how many ranks share the tokens, and the parameters."""
    return templates.by_nodes[num_nodes].replicas[name].stages[0].cp_size


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
    choices = [_mapping_problem(problem, num_shares) for num_shares in (1, *_sharded_sizes(problem))]
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
        layer_bytes={name: copied_bytes_of_layers(problem, name) for name in problem.modules},
    )


def larger_templates(problem: PlanningProblem, templates: Templates) -> dict[int, Template]:
    """`templates`, and those of larger pipelines up to all nodes, for policies that keep no f + 1 pipelines."""
    choices = [_mapping_problem(problem, num_shares) for num_shares in (1, *_sharded_sizes(problem))]
    found = dict(templates.by_nodes)
    for n in range(templates.most_nodes + 1, problem.cluster.num_nodes + 1):
        best = _best_template(problem, choices, n)
        if best is None:
            break
        found[n] = best
    return found


def _best_template(problem: PlanningProblem, choices: Sequence[MappingProblem], num_nodes: int) -> Template | None:
    """The fastest of all choices; None if nothing fits, or all have more stages than the user allows."""
    found = [(choice, map_stages(choice, num_nodes)) for choice in choices]
    best = min(
        ((choice, mapping) for choice, mapping in found if mapping is not None and _has_few_stages(problem, mapping)),
        key=lambda pair: pair[1].objective_s,
        default=None,
    )
    return None if best is None else _template(problem, num_nodes, *best)


def _has_few_stages(problem: PlanningProblem, mapping: StageMapping) -> bool:
    counts = Counter(stage.module for stage in mapping.stages)
    return all(counts[name] <= most_stages(problem, name) for name in problem.modules)


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


def _sharded_sizes(problem: PlanningProblem) -> list[int]:
    """Of the language model's groups that share tokens and parameters."""
    name = problem.sinks[0]
    if not problem.modules[name].may_be_sharded:
        return []
    sizes = cp_sizes(problem, name, problem.failures + 1)
    return [size for size in sizes if 1 < size <= problem.cluster.devices_per_node]


def _mapping_problem(problem: PlanningProblem, num_shares: int) -> MappingProblem:
    """`num_shares`: the ranks of each of the language model's stages that share tokens and parameters; 1: stages have
    tensor parallelism."""
    chains = {name: _chain_costs(problem, name) for name in (*problem.sources, *problem.sinks)}
    if num_shares > 1:
        chains[problem.sinks[0]] = _sharded_costs(problem, problem.sinks[0], num_shares)
    return MappingProblem(
        modules=chains,
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


def _sharded_costs(problem: PlanningProblem, name: str, num_shares: int) -> ChainCosts:
    """As `IterationCosts` has them: each rank computes its share of the tokens, exchanges keys and values, and gathers
    parameters in the forward and in the backward."""
    num_pipelines, memory = problem.failures + 1, problem.memory
    layers = problem.modules[name].workload.layers
    load = problem.typical_load(name, num_pipelines, cp=num_shares)
    stage = Stage(layers=(0, len(layers)), ranks=tuple(range(num_shares)), cp_size=num_shares)
    seconds = []
    for layer, needs, time in zip(
        layers, problem.gradients[name], problem.layer_times(name, 1, num_pipelines, cp=num_shares), strict=True
    ):
        keys_s = key_exchange(layer, stage, problem.cluster, memory).seconds(load)
        parameters_s = parameter_gather(layer, stage, problem.cluster, memory).seconds(load)
        is_gathered = is_gathered_in_backward(layer, needs, problem.gradients[name])
        num_sent = 1 + is_gathered + needs.weight_gradient
        seconds.append(time.total_s + (1 + needs.any) * keys_s + num_sent * parameters_s)
    trained = [(layer, problem.modules[name].is_trainable(i)) for i, layer in enumerate(layers)]
    blocks = [entry for entry in trained if entry[0].part == "block"]
    others = [
        0 if entry in blocks else gathered_bytes([entry], tp_size=1, num_shares=num_shares, options=memory)
        for entry in trained
    ]
    static = static_bytes_of_layers(problem, name, tp_size=1, num_holders=num_pipelines, num_shares=num_shares)
    return ChainCosts(
        seconds={num_shares: seconds},
        static_bytes={num_shares: [own + gathered for own, gathered in zip(static, others, strict=True)]},
        saved_bytes={num_shares: saved_bytes_of_layers(problem, name, load, tp_size=1, fully_sharded=True)},
        fixed_bytes={num_shares: gathered_bytes(blocks, tp_size=1, num_shares=num_shares, options=memory)},
    )


def _template(problem: PlanningProblem, num_nodes: int, choice: MappingProblem, mapping: StageMapping) -> Template:
    sharded = {name for name, costs in choice.modules.items() if costs.fixed_bytes is not None}
    replicas: Mapping[str, Replica] = {
        name: Replica(
            stages=tuple(
                Stage(
                    layers=stage.layers,
                    ranks=tuple(range(stage.first_device, stage.first_device + stage.num_devices)),
                    tp_size=1 if name in sharded else stage.num_devices,
                    cp_size=stage.num_devices if name in sharded else 1,
                )
                for stage in mapping.stages
                if stage.module == name
            )
        )
        for name in problem.modules
    }
    return Template(num_nodes=num_nodes, replicas=replicas, first_s=mapping.fill_s, slowest_s=mapping.slowest_s)
