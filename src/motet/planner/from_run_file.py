"""From a run file to a planning problem and its plan. Pure: of the model only configurations are read, no weights."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

from motet.assignment.batch_assignment import BatchAssignment
from motet.assignment.sample import Sample
from motet.attention.masks.rules import MEDIA_ATTENTION
from motet.attention.masks.tile_counts import BLOCK_SIZE, most_block_tokens
from motet.balancing.policies import assign
from motet.cluster import Cluster, available_cores, cluster_from_dict
from motet.config import (
    CatalogueConfig,
    ModuleParallelConfig,
    PartConfig,
    RunConfig,
    load_catalogue,
)
from motet.costs.analytic import analytic_table
from motet.costs.cost_model import CostTable
from motet.costs.iteration import IterationCosts
from motet.costs.kernel_speeds import Speeds
from motet.costs.memory import MemoryOptions
from motet.errors import UserError, closest
from motet.families.hf_config import read_generator, read_part_values
from motet.plan import CONTRASTIVE, DECODER, LANGUAGE_MODEL, ContextOptions, Edge, LayerRange, Plan
from motet.planner.degrees import NO_CONTEXT_PARALLELISM
from motet.planner.distmm.towers_from_run_file import plan_of_towers, tower_edges, tower_workloads
from motet.planner.distmm.towers_from_run_file import trainable_layers as trainable_layers_of_towers
from motet.planner.problem import Degrees, ModuleProblem, PlanningProblem
from motet.planner.registry import make_plan
from motet.schedule.generators import CONTRASTING, GENERATORS
from motet.schedule.routes import Routes
from motet.shapes.families import module_workload
from motet.shapes.module_shape import ModuleWorkload, with_feature_layer, with_projector

MIN_SHARED_TOKENS = 4096
"""Of a sample on each rank of a context-parallel group, where the user sets no limits: with fewer, what the ranks
exchange and the smaller kernels cost more than is won."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 4, "float64": 8}
"""By `train.dtype`, of weights and of what travels between stages; bfloat16 is autocast."""
AUTOCAST_BYTES = {"bfloat16": 2}
"""By `train.dtype`, of what autocast computes."""


def planning_problem(config: RunConfig, samples: Sequence[Sample]) -> PlanningProblem:
    """`samples`: a typical global batch. Raises `ValueError` naming the key of the run file that is wrong."""
    _check_schedule(config)
    workloads = read_workloads(config)
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
    return PlanningProblem(
        modules={
            name: ModuleProblem(
                workload=workload,
                trainable=trainable_layers(config, name, workload),
                loss_weight=_loss_weight(config, name),
                tp_sizes=_known_sizes(table, name, _tp_sizes(config, name)),
                max_stages=_max_stages(config, name),
                cp_sizes=cp[name],
                may_be_sharded=config.parallel.limits.fully_sharded,
                context=_context(config, workload) if name == LANGUAGE_MODEL else ContextOptions(),
            )
            for name, workload in workloads.items()
        },
        edges=tower_edges(config, workloads)
        if config.model.towers
        else edges_between(config, workloads[LANGUAGE_MODEL]),
        cluster=cluster,
        table=table,
        computed=_compute_costs(config, workloads, cluster, measured_sizes) if is_measured else None,
        samples=tuple(samples),
        num_microbatches=config.parallel.num_microbatches,
        schedule=config.parallel.schedule,
        schedules=(config.parallel.schedule,) if "schedule" in config.parallel.model_fields_set else None,
        dp_sizes=_dp_sizes(config),
        assignment=config.parallel.assignment,
        max_packed_tokens=config.parallel.max_packed_tokens,
        recompute=config.parallel.recompute,
        contrastive_batch_size=config.train.contrastive_batch_size,
        memory=_memory_options(config),
        num_cores=shared_cores(config),
        failures=1 if config.train.failures is None else config.train.failures.tolerate,
    )


def _check_schedule(config: RunConfig) -> None:
    schedule = config.parallel.schedule
    if schedule not in GENERATORS:
        near = closest(schedule.lower(), GENERATORS, "give one of")
        raise UserError(f"parallel.schedule: {schedule!r} is not known; {near}")
    if schedule in CONTRASTING and not config.model.towers:
        raise UserError(f"parallel.schedule: {schedule} is for towers that a loss contrasts; give 1f1b")


def _check_limited_modules(config: RunConfig, workloads: Mapping[str, ModuleWorkload]) -> None:
    limited = [name for name, workload in workloads.items() if workload.kind != "loss"]
    for name, own in config.parallel.limits.modules.items():
        if name in limited:
            workload = workloads[name]
            able = workload.kind in ("encoder", "language_model") and workload.family not in NO_CONTEXT_PARALLELISM
            if not able and own.cp not in (None, (1,)):
                kind = workload.family if workload.kind == "encoder" else workload.kind
                raise UserError(
                    f"parallel.limits.modules.{name}.cp: is {list(own.cp)}, but ranks cannot share the tokens of a "
                    f"{kind}; leave it out"
                )
            continue
        if name in workloads:
            raise UserError(
                f"parallel.limits.modules.{name}: a loss is one stage on all ranks that hold features; leave it out"
            )
        raise UserError(f"parallel.limits.modules: there is no module {name!r}; give {', '.join(limited)}")


def _loss_weight(config: RunConfig, name: str) -> float:
    if name == DECODER and config.model.decoder is not None:
        return config.model.decoder.loss_weight
    return (
        config.model.contrastive.loss_weight
        if name == CONTRASTIVE
        else float(name == LANGUAGE_MODEL or name in config.model.generators)
    )


def plan_for(config: RunConfig, problem: PlanningProblem) -> Plan:
    """The plan that `parallel` asks for. Raises `ValueError` for what no plan can satisfy."""
    if config.model.towers:
        return plan_of_towers(config, problem)
    media = _media_attention(config, problem.modules[LANGUAGE_MODEL].workload)
    degrees = {name: _degrees(given, media) for name, given in config.parallel.explicit.items()}
    return make_plan(problem, config.parallel.planner, degrees=degrees, placement=config.parallel.placement)


def _is_packed(config: RunConfig) -> bool:
    return config.parallel.packing or config.model.media_attention != "causal"


def _media_attention(config: RunConfig, language_model: ModuleWorkload) -> str:
    """What media tokens see, as far as it matters for the balance of context parallelism."""
    if config.model.media_attention != "family":
        return config.model.media_attention
    return MEDIA_ATTENTION.get(language_model.family, "causal")


def _context(config: RunConfig, language_model: ModuleWorkload) -> ContextOptions:
    """Of planners that choose context parallelism: blocks are such that kernels can take its heads."""
    attentions = (layer.attention for layer in language_model.layers if layer.attention is not None)
    widest = max((attention.head_dim for attention in attentions), default=1)
    return ContextOptions(
        block_size=min(BLOCK_SIZE, most_block_tokens(widest)), media_attention=_media_attention(config, language_model)
    )


def _degrees(given: ModuleParallelConfig, media: str) -> Degrees:
    context = ContextOptions(**given.context.model_dump(), media_attention=media)
    return Degrees(**{**given.model_dump(exclude={"num_microbatches"}), "context": context})


def read_workloads(config: RunConfig) -> dict[str, ModuleWorkload]:
    """The shape of every module, encoders with their projectors, by name."""
    if config.model.towers:
        return tower_workloads(config, read_part_values)
    language_model = _read_workload(config.model.causal_lm, f"model.{LANGUAGE_MODEL}", _is_packed(config))
    workloads = {}
    for name, part in config.model.encoders.items():
        encoder = _read_workload(part, f"model.encoders.{name}")
        if encoder.kind != "encoder":
            raise UserError(f"model.encoders.{name}: {encoder.family} is a language model; give an encoder")
        if part.feature_layer is not None:
            try:
                encoder = with_feature_layer(encoder, part.feature_layer)
            except UserError as error:
                raise UserError(f"model.encoders.{name}.{error}") from None
        if part.projector is not None:
            encoder = with_projector(encoder, part.projector, language_model.hidden_size)
        elif encoder.output_size != language_model.hidden_size:
            raise UserError(
                f"model.encoders.{name}.projector: is null, but the encoder's width is {encoder.output_size} and the "
                f"language model's {language_model.hidden_size}; give linear or mlp"
            )
        workloads[name] = encoder
    if language_model.kind != "language_model":
        raise UserError(f"model.{LANGUAGE_MODEL}: {language_model.family} is an encoder; give a language model")
    width = language_model.hidden_size
    generators = {name: read_generator(part, name, width) for name, part in config.model.generators.items()}
    return {**workloads, LANGUAGE_MODEL: language_model, **generators}


def _read_workload(part: PartConfig, where: str, packing: bool = False) -> ModuleWorkload:
    values = read_part_values(part, where)
    try:
        return module_workload(values, packing=packing)
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix('model: ')}") from None


def trainable_layers(config: RunConfig, name: str, workload: ModuleWorkload) -> tuple[LayerRange, ...]:
    """As docs/architecture.md numbers the layers: an encoder's projector is its last one."""
    if config.model.towers:
        return trainable_layers_of_towers(config, name, workload)
    if name == LANGUAGE_MODEL or name in config.model.generators:
        part = config.model.generators.get(name, config.model.causal_lm)
        return ((0, workload.num_layers),) if part.train.module else ()
    encoder = config.model.encoders[name]
    last = workload.num_layers - (encoder.projector is not None)
    ranges = [(0, last)] if encoder.train.module else []
    if encoder.projector is not None and encoder.train.projector:
        ranges = [(0, workload.num_layers)] if ranges else [(last, workload.num_layers)]
    return tuple(ranges)


def edges_between(config: RunConfig, language_model: ModuleWorkload) -> tuple[Edge, ...]:
    """Encoders enter the language model at layer 0, or at its cross-attention layers; it enters generators."""
    layers: tuple[int, ...] = (0,)
    if config.model.merge == "cross_attention":
        crossing = language_model.config.get("cross_attention_layers") or ()
        if not crossing:
            raise UserError(
                f"model.merge: {language_model.family} has no cross-attention layers; give placeholder or prepend"
            )
        layers = tuple(1 + layer for layer in crossing)
    return (
        *(Edge(source=name, target=LANGUAGE_MODEL, layers=layers) for name in config.model.encoders),
        *(Edge(source=LANGUAGE_MODEL, target=name) for name in config.model.generators),
    )


def describe_cluster(config: RunConfig) -> Cluster:
    """What the run file leaves out is that of H100s over InfiniBand, or of CPU cores over Ethernet.

    Raises `UserError` for devices and links that nobody knows, and a catalogue that cannot be read."""
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
    """Measured, if the run file names a file of costs, else computed from the cluster's peaks and bandwidths."""
    sizes = {size for name in workloads for size in _tp_sizes(config, name)}
    return _read_costs(config, workloads, cluster, sizes)


def assignment_by_costs(config: RunConfig, plan: Plan) -> Callable[[Plan, Sequence[Sample]], BatchAssignment]:
    """How every batch of a run is cut, by the costs by which its actions are ordered too."""
    workloads = read_workloads(config)
    table = _read_costs(config, workloads, describe_cluster(config), _tp_sizes_of(plan))
    return partial(assign, workloads=workloads, table=table)


def iteration_costs(config: RunConfig, plan: Plan) -> Callable[[Routes, Sequence[Sample]], IterationCosts]:
    """What an iteration costs under any plan of the run file's model, by its routes and samples."""
    workloads, cluster = read_workloads(config), describe_cluster(config)
    table = _read_costs(config, workloads, cluster, _tp_sizes_of(plan))
    return partial(IterationCosts, workloads=workloads, table=table, cluster=cluster, memory=_memory_options(config))


def _tp_sizes_of(plan: Plan) -> set[int]:
    return {stage.tp_size for *_, stage in plan.stages()}


def _memory_options(config: RunConfig) -> MemoryOptions:
    dtype_bytes = DTYPE_BYTES[config.train.dtype]
    return MemoryOptions(
        parameter_bytes=dtype_bytes,
        activation_bytes=dtype_bytes,
        autocast_bytes=AUTOCAST_BYTES.get(config.train.dtype),
        zero1=config.parallel.zero1,
        state_copies=1 if config.train.failures is None else config.train.failures.tolerate + 1,
    )


def _read_costs(
    config: RunConfig, workloads: Mapping[str, ModuleWorkload], cluster: Cluster, tp_sizes: Set[int]
) -> CostTable:
    if config.cluster.costs is not None:
        table = CostTable.load(config.cluster.costs)
        if not config.model.towers:
            return table
        # The loss takes little, and depends on who shares it: it is computed.
        computed = _compute_costs(config, {CONTRASTIVE: workloads[CONTRASTIVE]}, cluster, {1})
        return replace(table, modules={**table.modules, **computed.modules})
    return _compute_costs(config, workloads, cluster, tp_sizes)


def _compute_costs(
    config: RunConfig, workloads: Mapping[str, ModuleWorkload], cluster: Cluster, tp_sizes: Set[int]
) -> CostTable:
    return analytic_table(
        workloads,
        cluster,
        dtype=config.train.dtype,
        dtype_bytes=DTYPE_BYTES[config.train.dtype],
        tp_sizes=sorted(tp_sizes),
        speeds=None if config.cluster.speeds is None else Speeds.load(config.cluster.speeds),
    )


def shared_cores(config: RunConfig) -> float | None:
    """The cores that all processes share, on one machine of CPUs; None: each device computes by itself."""
    is_cpu = _is_cpu(config) or (config.cluster.device == "cpu" and config.cluster.num_cores is not None)
    if not is_cpu or config.cluster.num_nodes > 1:
        return None
    return float(config.cluster.num_cores or available_cores())


def _is_cpu(config: RunConfig) -> bool:
    """Who names an accelerator asks about it, also from a run file for this machine."""
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
    given = limits.cp if name == LANGUAGE_MODEL or config.model.towers else None
    if own or given or name != LANGUAGE_MODEL:
        return own or given or (1,)
    longest = max((sample.num_tokens(LANGUAGE_MODEL) for sample in samples), default=0)
    within_node = config.cluster.num_devices // config.cluster.num_nodes
    return _powers_of_two(config, max(1, min(within_node, longest // MIN_SHARED_TOKENS)))


def _known_sizes(table: CostTable, name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those that the table has costs of; all of them if it has none, so that somebody says which are missing."""
    return tuple(size for size in sizes if size in table.modules.get(name, ())) or sizes


def _dp_sizes(config: RunConfig) -> tuple[int, ...]:
    cluster = config.cluster
    most = min(config.train.global_batch_size // config.parallel.num_microbatches, cluster.num_devices)
    sizes = _powers_of_two(config, max(1, most))
    if not _is_cpu(config) and cluster.num_devices.bit_count() > 1:  # Not a power of two itself.
        sizes = tuple(sorted({*sizes, *(3 * dp for dp in sizes if 3 * dp <= most)}))
    return config.parallel.limits.dp or sizes


def _powers_of_two(config: RunConfig, most: int) -> tuple[int, ...]:
    """From 1 to `most`; 1 alone on CPUs, whose cores are shared and which no collective makes faster."""
    return (1,) if _is_cpu(config) else tuple(2**i for i in range(most.bit_length()))


def _max_stages(config: RunConfig, name: str) -> int | None:
    limits = config.parallel.limits
    own = limits.modules[name].max_pp if name in limits.modules else None
    return own or limits.max_pp
