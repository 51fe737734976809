"""Makes the planning problem of a run file, and the plan that the run file asks for.

Only configurations of models are read, no weights, and torch is not imported.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

from motet.assignment.batch_assignment import BatchAssignment
from motet.assignment.next_batch import NOT_FOR_TOWERS
from motet.assignment.sample import Sample
from motet.attention.masks.rules import MEDIA_ATTENTION
from motet.attention.masks.tile_counts import BLOCK_SIZE, most_block_tokens
from motet.balancing.policies import ASSIGNMENTS, assign
from motet.cluster import Cluster, available_cores, cluster_from_dict
from motet.config import CatalogueConfig, ModuleParallelConfig, RunConfig, load_catalogue
from motet.costs.analytic import Speeds, analytic_table
from motet.costs.cells import Cells
from motet.costs.cost_model import CostTable
from motet.costs.iteration import IterationCosts
from motet.costs.memory import ADAMW_STATES, MemoryOptions
from motet.errors import UserError, closest
from motet.families.configured_graph import ConfiguredGraph, read_graph
from motet.plan import CONTRASTIVE, LANGUAGE_MODEL, ContextOptions, Plan
from motet.planner.distmm.planner import SCHEDULE
from motet.planner.distmm.towers import TowerLayout, tower_plan
from motet.planner.layouts.degrees import NO_CONTEXT_PARALLELISM
from motet.planner.problem import Degrees, ModuleProblem, PlanningProblem
from motet.planner.registry import make_plan
from motet.schedule.generators import CONTRASTING, GENERATORS
from motet.schedule.routes import Routes
from motet.shapes.module_shape import QUERY_TOKENS, ModuleWorkload

MIN_SHARED_TOKENS = 4096
"""Fewest tokens of a sample on each rank of a context-parallel group, unless the user sets limits: with fewer,
communication and smaller kernels cost more than context parallelism saves."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
"""Bytes of a weight and of an element that is sent between stages, by `train.dtype`."""
MAIN_BYTES = {"bfloat16": 4}
"""Bytes of a gradient, a moment and the optimizer's own copy of a parameter, by `train.dtype`."""
CONTRASTIVE_DEGREES = {"tp", "pp", "dp", "layers_per_stage", "sequence_parallel"}
"""The degrees that modules of a contrastive model can have."""


def planning_problem(config: RunConfig, samples: Sequence[Sample]) -> PlanningProblem:
    """The planning problem of a run file. `samples`: a typical global batch.

    Raises `ValueError` naming the key of the run file that is wrong."""
    graph = read_graph(config)
    workloads = graph.workloads
    _check_schedule_and_assignment(config, graph)
    _check_limited_modules(config, workloads)
    cluster = describe_cluster(config)
    table = read_costs(config, workloads, cluster)
    measured_sizes = {size for sizes in table.modules.values() for size in sizes}
    is_measured = config.cluster.costs is not None
    cp = {name: _cp_sizes(config, name, samples) for name in workloads}
    if config.parallel.limits.fully_sharded and max(map(max, cp.values())) == 1:
        raise UserError(
            "parallel.limits.fully_sharded: ranks that share tokens share parameters, but parallel.limits.cp allows 1 "
            "alone; give larger sizes, or leave fully_sharded out"
        )
    modules = {
        name: ModuleProblem(
            workload=node.workload,
            trainable=node.trainable,
            loss_weight=node.loss_weight,
            tp_sizes=_known_sizes(table, name, _tp_sizes(config, name)),
            max_stages=node.workload.max_stages or _max_stages(config, name),
            cp_sizes=cp[name],
            may_be_sharded=config.parallel.limits.fully_sharded,
            context=_context(config, node.workload) if name == LANGUAGE_MODEL else ContextOptions(),
        )
        for name, node in graph.modules.items()
    }
    given = config.parallel.model_fields_set
    # Templates for failures take these from the run file.
    is_open = config.train.failures is None and not graph.of_kind("loss")
    queries = {name: modules.pop(name) for name, w in workloads.items() if w.family == QUERY_TOKENS}
    return PlanningProblem(
        modules=modules,
        query_tokens=queries,
        edges=tuple(edge for edge in graph.edges if edge.source not in queries),
        cluster=cluster,
        table=table,
        computed=compute_costs(config, workloads, cluster, measured_sizes) if is_measured else None,
        samples=tuple(samples),
        num_microbatches=config.parallel.num_microbatches,
        schedule=config.parallel.schedule,
        schedules=(config.parallel.schedule,) if "schedule" in config.parallel.model_fields_set else None,
        dp_sizes=_dp_sizes(config, config.parallel.num_microbatches),
        assignment=config.parallel.assignment,
        max_packed_tokens=config.parallel.max_packed_tokens,
        recompute=config.parallel.recompute,
        chooses_recompute="recompute" not in given,
        chooses_zero1=is_open and "zero1" not in given,
        chooses_assignment=is_open and "assignment" not in given and config.parallel.max_packed_tokens is None,
        microbatch_numbers=_numbers(config) if is_open and "num_microbatches" not in given else (),
        free_dp_sizes=_dp_sizes(config, 1),
        contrastive_batch_size=config.train.contrastive_batch_size,
        run_ahead=config.parallel.run_ahead,
        chooses_run_ahead=is_open and "run_ahead" not in given,
        memory=_memory_options(config),
        may_share_parameters=not config.parallel.zero1,
        survives_losses=config.train.failures is not None,
        num_cores=shared_cores(config),
        failures=1 if config.train.failures is None else config.train.failures.tolerate,
    )


def _check_schedule_and_assignment(config: RunConfig, graph: ConfiguredGraph) -> None:
    if config.parallel.run_ahead and config.train.failures is not None:
        raise UserError("parallel.run_ahead: is not supported with train.failures; leave one of them out")
    if config.parallel.run_ahead and graph.of_kind("loss"):
        raise UserError(f"parallel.run_ahead: {NOT_FOR_TOWERS}")
    schedule, assignment = config.parallel.schedule, config.parallel.assignment
    if assignment not in ASSIGNMENTS:
        near = closest(assignment.lower(), ASSIGNMENTS, "give one of")
        raise UserError(f'parallel.assignment: is "{assignment}"; {near}')
    if schedule not in GENERATORS:
        near = closest(schedule.lower(), GENERATORS, "give one of")
        raise UserError(f"parallel.schedule: {schedule!r} is not known; {near}")
    if schedule in CONTRASTING and not graph.of_kind("loss"):
        raise UserError(f"parallel.schedule: {schedule} is for contrastive towers; give 1f1b")


def _check_limited_modules(config: RunConfig, workloads: Mapping[str, ModuleWorkload]) -> None:
    limited = [name for name, workload in workloads.items() if workload.kind != "loss"]
    for name, own in config.parallel.limits.modules.items():
        if name in limited:
            workload = workloads[name]
            able = workload.kind in ("encoder", "language_model") and workload.family not in NO_CONTEXT_PARALLELISM
            able = able and workload.shares_tokens
            if not able and own.cp not in (None, (1,)):
                kind = workload.family if workload.kind == "encoder" else workload.kind
                raise UserError(
                    f"parallel.limits.modules.{name}.cp: is {list(own.cp)}, but context parallelism is not "
                    f"supported for a {kind}; leave it out"
                )
            continue
        if name in workloads:
            raise UserError(
                f"parallel.limits.modules.{name}: a loss is one stage on all ranks that hold features; leave it out"
            )
        raise UserError(f"parallel.limits.modules: there is no module {name!r}; give {', '.join(limited)}")


def plan_for(config: RunConfig, problem: PlanningProblem) -> Plan:
    """The plan that the run file's `parallel` asks for. Raises `ValueError` if no plan satisfies it."""
    parallel = config.parallel
    if problem.loss_module is not None:
        if parallel.planner == "explicit":
            return _explicit_contrastive_plan(config, problem)
        # The default of `planner` is for encoders and a language model.
        planner = parallel.planner if "planner" in parallel.model_fields_set else "distmm"
        return make_plan(problem, planner, placement=parallel.placement)
    degrees = explicit_degrees(config, {name: module.workload for name, module in problem.modules.items()})
    plan = make_plan(problem, parallel.planner, degrees=degrees, placement=parallel.placement)
    if parallel.run_ahead and not plan.run_ahead:
        plan = problem.with_run_ahead(plan)  # It says why it cannot.
    again = [name for name, own in plan.modules.items() if own.data_module(name) in parallel.recompute_features]
    return replace(plan, recompute_features=tuple(again)) if again else plan


def _explicit_contrastive_plan(config: RunConfig, problem: PlanningProblem) -> Plan:
    parallel = config.parallel
    for name, given in parallel.explicit.items():
        if given.cp > 1:
            raise UserError(
                f"parallel.explicit.{name}.cp: is {given.cp}, but context parallelism is not "
                "supported for towers and decoders; give 1"
            )
        if given.virtual_stages > 1:
            raise UserError(
                f"parallel.explicit.{name}.virtual_stages: is {given.virtual_stages}, but a contrastive model has one "
                "stage on each group; give 1"
            )
    if parallel.placement == "replicated":
        raise UserError(
            "parallel.placement: replicated is for encoders of a language model; give parallel or colocated"
        )
    plan = tower_plan(
        problem,
        {
            name: TowerLayout(
                degrees=Degrees(**given.model_dump(include=CONTRASTIVE_DEGREES)),
                per_batch=given.num_microbatches or parallel.num_microbatches,
            )
            for name, given in parallel.explicit.items()
        },
        together=[tuple(problem.towers)] if parallel.placement == "colocated" else (),
        schedule=SCHEDULE if problem.schedules is None else problem.schedule,
        recompute_features=parallel.recompute_features,
    )
    if plan.num_ranks != problem.num_devices:
        raise UserError(
            f"parallel: the plan uses {plan.num_ranks} ranks but cluster has {problem.num_devices}; "
            f"set cluster.num_devices to {plan.num_ranks} or change tp, pp and dp"
        )
    return plan


def _media_attention(config: RunConfig, language_model: ModuleWorkload) -> str:
    """The kind of attention of media tokens, on which the balance of context parallelism depends."""
    if config.model.media_attention != "family":
        return config.model.media_attention
    return MEDIA_ATTENTION.get(language_model.family, "causal")


def _context(config: RunConfig, language_model: ModuleWorkload) -> ContextOptions:
    """The options for planners that choose context parallelism; kernels support its heads with these blocks."""
    attentions = (layer.attention for layer in language_model.layers if layer.attention is not None)
    widest = max((attention.head_dim for attention in attentions), default=1)
    return ContextOptions(
        block_size=min(BLOCK_SIZE, most_block_tokens(widest)), media_attention=_media_attention(config, language_model)
    )


def explicit_degrees(config: RunConfig, workloads: Mapping[str, ModuleWorkload]) -> dict[str, Degrees]:
    """The degrees that `parallel.explicit` gives modules."""
    media = _media_attention(config, workloads[LANGUAGE_MODEL]) if LANGUAGE_MODEL in workloads else "causal"
    return {name: _degrees(given, media) for name, given in config.parallel.explicit.items()}


def _degrees(given: ModuleParallelConfig, media: str) -> Degrees:
    context = ContextOptions(**given.context.model_dump(), media_attention=media)
    values = {**given.model_dump(exclude={"num_microbatches"}), "context": context}
    return Degrees(**{**values, "sharded_replicas": given.shares_over_replicas})


def describe_cluster(config: RunConfig) -> Cluster:
    """The cluster of the run file. Defaults are H100s over InfiniBand, or CPU cores over Ethernet.

    Raises `UserError` for unknown devices and links, and for a catalogue that cannot be read."""
    cluster, is_cpu = config.cluster, _is_cpu(config)
    values: dict[str, Any] = {
        "num_devices": cluster.num_devices,
        "devices_per_node": cluster.num_devices // cluster.num_nodes,
        "device": cluster.accelerator or ("cpu" if is_cpu else "h100"),
        "between_nodes": cluster.between_nodes or ("ethernet100" if is_cpu else "infiniband400"),
        "nics_per_node": cluster.nics_per_node,
    }
    if cluster.within_node is not None:
        values["within_node"] = cluster.within_node
    shared = load_catalogue(cluster.catalogue) if cluster.catalogue is not None else CatalogueConfig()
    described = cluster_from_dict(
        values,
        devices={name: own.model_dump() for name, own in {**shared.devices, **cluster.devices}.items()},
        links={name: own.model_dump() for name, own in {**shared.links, **cluster.links}.items()},
    )
    if cluster.memory_bytes is None:
        return described
    return replace(described, device=replace(described.device, memory_bytes=cluster.memory_bytes))


def read_costs(config: RunConfig, workloads: Mapping[str, ModuleWorkload], cluster: Cluster) -> CostTable:
    """Measured costs if the run file names a file of them, else costs computed from the cluster's peak speeds."""
    sizes = {size for name in workloads for size in _tp_sizes(config, name)}
    return _read_costs(config, workloads, cluster, sizes)


def assignment_by_costs(config: RunConfig, plan: Plan) -> Callable[[Plan, Sequence[Sample]], BatchAssignment]:
    """Returns the function that assigns every global batch of a run, by the costs that order its actions too."""
    workloads = read_graph(config).workloads
    table = _read_costs(config, workloads, describe_cluster(config), _tp_sizes_of(plan))
    return partial(assign, workloads=workloads, table=table)


def iteration_costs(config: RunConfig, plan: Plan) -> Callable[[Routes, Sequence[Sample]], IterationCosts]:
    """Returns the costs of an iteration as a function of routes and samples, for any plan of the run file's model."""
    workloads, cluster = read_graph(config).workloads, describe_cluster(config)
    table = _read_costs(config, workloads, cluster, _tp_sizes_of(plan))
    return partial(IterationCosts, workloads=workloads, table=table, cluster=cluster, memory=_memory_options(config))


def shortest_seconds(config: RunConfig, plan: Plan) -> Callable[[Routes, Sequence[Sample]], float] | None:
    """Returns the seconds of an iteration at a model FLOPs utilization of 1 (`Evaluation.mfu`), as a function of routes
    and samples; None where the device's peak is not known."""
    cluster, workloads = describe_cluster(config), read_graph(config).workloads
    peak = cluster.device.peak_flops.get(config.train.dtype)
    if peak is None or cluster.device.name == "cpu":
        return None
    peak_of_all = plan.num_ranks * peak

    def seconds(routes: Routes, samples: Sequence[Sample]) -> float:
        return Cells(routes, samples, workloads, cluster.node).model_flops() / peak_of_all

    return seconds


def _tp_sizes_of(plan: Plan) -> set[int]:
    return {stage.tp_size for *_, stage in plan.stages()}


def _memory_options(config: RunConfig) -> MemoryOptions:
    dtype_bytes, main_bytes = DTYPE_BYTES[config.train.dtype], MAIN_BYTES.get(config.train.dtype)
    return MemoryOptions(
        parameter_bytes=dtype_bytes,
        activation_bytes=dtype_bytes,
        gradient_bytes=main_bytes,
        saves_less=main_bytes is not None,
        fused=config.train.kernels == "liger",
        optimizer_bytes=None if main_bytes is None else (ADAMW_STATES + 1) * main_bytes,
        zero1=config.parallel.zero1,
        state_copies=1 if config.train.failures is None else config.train.failures.tolerate + 1,
    )


def _read_costs(
    config: RunConfig, workloads: Mapping[str, ModuleWorkload], cluster: Cluster, tp_sizes: Set[int]
) -> CostTable:
    if config.cluster.costs is not None:
        table = CostTable.load(config.cluster.costs)
        # They take little time, a loss one that depends on the ranks that share it: their costs are always computed.
        short = {n: workload for n, workload in workloads.items() if workload.family in (CONTRASTIVE, QUERY_TOKENS)}
        if not short:
            return table
        computed = compute_costs(config, short, cluster, {1})
        return replace(table, modules={**table.modules, **computed.modules})
    return compute_costs(config, workloads, cluster, tp_sizes)


def compute_costs(
    config: RunConfig,
    workloads: Mapping[str, ModuleWorkload],
    cluster: Cluster,
    tp_sizes: Set[int],
    *,
    speeds: Speeds | None = None,
) -> CostTable:
    """Costs computed from the cluster's speeds. `speeds`: None: those of the run file, else of the catalogue."""
    if speeds is None and config.cluster.speeds is not None:
        speeds = Speeds.load(config.cluster.speeds)
    if any(workload.family == QUERY_TOKENS for workload in workloads.values()):
        tp_sizes = {*tp_sizes, 1}  # Query tokens are whole, whatever the limits say of other modules.
    return analytic_table(
        workloads,
        cluster,
        dtype=config.train.dtype,
        dtype_bytes=DTYPE_BYTES[config.train.dtype],
        tp_sizes=sorted(tp_sizes),
        speeds=speeds,
    )


def shared_cores(config: RunConfig) -> float | None:
    """The cores that all processes share on a single machine of CPUs; None: devices compute independently."""
    is_cpu = _is_cpu(config) or (config.cluster.device == "cpu" and config.cluster.num_cores is not None)
    if not is_cpu or config.cluster.num_nodes > 1:
        return None
    return float(config.cluster.num_cores or available_cores())


def _is_cpu(config: RunConfig) -> bool:
    # A run file for this machine may name an accelerator, to plan for that.
    return config.cluster.device == "cpu" and config.cluster.accelerator in (None, "cpu")


def _tp_sizes(config: RunConfig, name: str) -> tuple[int, ...]:
    if name == CONTRASTIVE:
        return (1,)
    if name in config.parallel.explicit:
        return (config.parallel.explicit[name].tp,)
    limits = config.parallel.limits
    own = limits.modules[name].tp if name in limits.modules else None
    within_node = config.cluster.num_devices // config.cluster.num_nodes
    return own or limits.tp or _powers_of_two(config, within_node)


def _cp_sizes(config: RunConfig, name: str, samples: Sequence[Sample]) -> tuple[int, ...]:
    limits = config.parallel.limits
    own = limits.modules[name].cp if name in limits.modules else None
    given = limits.cp if name == LANGUAGE_MODEL else None
    if own or given or name != LANGUAGE_MODEL:
        return own or given or (1,)
    longest = max((sample.num_tokens(LANGUAGE_MODEL) for sample in samples), default=0)
    within_node = config.cluster.num_devices // config.cluster.num_nodes
    return _powers_of_two(config, max(1, min(within_node, longest // MIN_SHARED_TOKENS)))


def _known_sizes(table: CostTable, name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes that the table has costs of; all of them if it has none, so that a later error names them."""
    return tuple(size for size in sizes if size in table.modules.get(name, ())) or sizes


def _numbers(config: RunConfig) -> tuple[int, ...]:
    """Numbers of microbatches of a replica, from which `auto` may choose."""
    size = config.train.global_batch_size
    return tuple(sorted({*(2**i for i in range(size.bit_length())), min(config.parallel.num_microbatches, size)}))


def _dp_sizes(config: RunConfig, num_microbatches: int) -> tuple[int, ...]:
    cluster = config.cluster
    most = min(config.train.global_batch_size // num_microbatches, cluster.num_devices)
    sizes = _powers_of_two(config, max(1, most))
    if not _is_cpu(config) and cluster.num_devices.bit_count() > 1:  # It is not a power of two.
        sizes = tuple(sorted({*sizes, *(3 * dp for dp in sizes if 3 * dp <= most)}))
    return config.parallel.limits.dp or sizes


def _powers_of_two(config: RunConfig, most: int) -> tuple[int, ...]:
    """The powers of two up to `most`; on CPUs 1 alone, since processes share the cores."""
    return (1,) if _is_cpu(config) else tuple(2**i for i in range(most.bit_length()))


def _max_stages(config: RunConfig, name: str) -> int | None:
    limits = config.parallel.limits
    own = limits.modules[name].max_pp if name in limits.modules else None
    return own or limits.max_pp
