"""A contrastive model as a run file describes it: the shapes of its towers, its loss, and what is trained. Pure."""

from collections.abc import Callable, Mapping

from motet.config import DecoderConfig, PartConfig, RunConfig, TowerConfig
from motet.errors import UserError
from motet.parallel.tensor_plans import Config, setting
from motet.plan import CONTRASTIVE, DECODER, Edge, LayerRange, Plan
from motet.planner.distmm.planner import SCHEDULE
from motet.planner.distmm.towers import TowerLayout, tower_plan
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.registry import make_plan
from motet.schedule.batch_sync import pairs_of
from motet.shapes.families import as_tower, decoder_workload, module_workload
from motet.shapes.module_shape import ModuleWorkload, contrastive_loss, with_projector

ReadPart = Callable[[PartConfig, str], Config]
"""A part's configuration, by the part and its key in the run file."""


def tower_workloads(config: RunConfig, read: ReadPart) -> dict[str, ModuleWorkload]:
    """The shape of every tower with its projector, by name, and of the loss."""
    encoders = {name: _encoder(config, name, read) for name in config.model.towers}
    width = _width(config, {name: encoder.output_size for name, encoder in encoders.items()})
    towers = {}
    for name, encoder in encoders.items():
        projector = config.model.towers[name].projector
        if projector is not None:
            _check_stored_projection(name, config.model.towers[name], encoder, width)
            encoder = with_projector(encoder, projector, width)
        towers[name] = as_tower(encoder)
    given = config.model.contrastive
    loss = contrastive_loss(
        pairs_of(tuple(towers), given.anchor), width, num_parameters=1 if given.loss == "softmax" else 2
    )
    if config.model.decoder is None:
        return {**towers, CONTRASTIVE: loss}
    _check_read_tower(config.model.decoder.reads, encoders[config.model.decoder.reads])
    return {**towers, CONTRASTIVE: loss, DECODER: _decoder(config.model.decoder, width, read)}


def _check_read_tower(name: str, encoder: ModuleWorkload) -> None:
    """Its projector takes both its features and what it makes of a whole item."""
    if encoder.hidden_size != encoder.output_size:
        raise UserError(
            f"model.towers.{name}: makes features of {encoder.hidden_size}, but one of {encoder.output_size} of a "
            "whole item, and the decoder reads both; give it a projection_size equal to its hidden_size"
        )


def _decoder(part: DecoderConfig, width: int, read: ReadPart) -> ModuleWorkload:
    where = f"model.{DECODER}"
    values = dict(read(part, where))
    try:
        decoder = decoder_workload(values)
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix('model: ')}") from None
    if decoder.hidden_size != width:
        raise UserError(
            f"{where}: is {decoder.hidden_size} wide, but the towers' features {width}; set "
            f"model.contrastive.width to {decoder.hidden_size}, and give towers of another width a projector"
        )
    return decoder


def _encoder(config: RunConfig, name: str, read: ReadPart) -> ModuleWorkload:
    where = f"model.towers.{name}"
    values = read(config.model.towers[name], where)
    try:
        encoder = module_workload(values)
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix('model: ')}") from None
    if encoder.kind != "encoder":
        raise UserError(f"{where}: {encoder.family} is no encoder; give one of images, sounds or texts")
    if encoder.family == "siglip_vision_model" and not setting(encoder.config, "vision_use_head", True):
        raise UserError(f"{where}.values.vision_use_head: is false, so there are no features of a whole image; set it")
    return encoder


def _check_stored_projection(name: str, tower: TowerConfig, encoder: ModuleWorkload, width: int) -> None:
    """One is read with the weights of a CLIPModel's tower, and of a model "WithProjection"; others have none, whatever
    their projection_dim says."""
    stored = encoder.config.get("projection_dim", width)
    is_stored = tower.part is not None or "WithProjection" in str(encoder.config.get("architectures"))
    if tower.config is None and is_stored and tower.projector == "projection" and stored != width:
        raise UserError(
            f"model.towers.{name}.projector: the stored projection makes features of {stored}, but they are {width} "
            f"wide; set model.contrastive.width to {stored}, or give linear or mlp, which are drawn"
        )


def _width(config: RunConfig, sizes: dict[str, int]) -> int:
    """Of the features. Raises `UserError` if a tower without projector hands on another."""
    whole = {name: sizes[name] for name, tower in config.model.towers.items() if tower.projector is None}
    width = config.model.contrastive.width or next(iter(whole.values()))
    for name, size in whole.items():
        if size != width:
            raise UserError(
                f"model.towers.{name}.projector: is null, but the tower's width is {size} and that of the features "
                f"{width}; give it a projector, or set model.contrastive.width"
            )
    return width


def feature_width(workloads: dict[str, ModuleWorkload]) -> int:
    return workloads[CONTRASTIVE].hidden_size


def trainable_layers(config: RunConfig, name: str, workload: ModuleWorkload) -> tuple[LayerRange, ...]:
    """As docs/architecture.md numbers the layers: a tower's projector is its last one."""
    if name == CONTRASTIVE:
        return ((0, 1),) if config.model.contrastive.train else ()
    if name == DECODER:
        assert config.model.decoder is not None
        return ((0, workload.num_layers),) if config.model.decoder.train.module else ()
    tower = config.model.towers[name]
    last = workload.num_layers - (tower.projector is not None)
    body = [(0, last)] if tower.train.module else []
    if tower.projector is None or not tower.train.projector:
        return tuple(body)
    return ((0, workload.num_layers),) if body else ((last, workload.num_layers),)


def tower_edges(config: RunConfig, workloads: Mapping[str, ModuleWorkload]) -> tuple[Edge, ...]:
    edges = tuple(Edge(source=name, target=CONTRASTIVE) for name in config.model.towers)
    decoder = config.model.decoder
    if decoder is None:
        return edges
    return (*edges, Edge(source=decoder.reads, target=DECODER, layers=workloads[DECODER].blocks))


def plan_of_towers(config: RunConfig, problem: PlanningProblem) -> Plan:
    """The plan that `parallel` asks for. Raises `UserError` for what no plan can satisfy."""
    parallel = config.parallel
    if parallel.planner != "explicit":
        # The default of `planner` is one for encoders and a language model.
        planner = parallel.planner if "planner" in parallel.model_fields_set else "distmm"
        return make_plan(problem, planner, placement=parallel.placement)
    layouts = {
        name: TowerLayout(
            degrees=Degrees(
                tp=given.tp,
                pp=given.pp,
                dp=given.dp,
                layers_per_stage=given.layers_per_stage,
                sequence_parallel=given.sequence_parallel,
            ),
            per_batch=given.num_microbatches or parallel.num_microbatches,
        )
        for name, given in parallel.explicit.items()
    }
    for name, given in parallel.explicit.items():
        if given.cp > 1:
            raise UserError(
                f"parallel.explicit.{name}.cp: is {given.cp}, but towers and decoders have whole items; give 1"
            )
    if parallel.placement == "replicated":
        raise UserError(
            "parallel.placement: replicated is for encoders of a language model; give parallel or colocated"
        )
    plan = tower_plan(
        problem,
        layouts,
        together=[tuple(config.model.towers)] if parallel.placement == "colocated" else (),
        schedule=SCHEDULE if problem.schedules is None else problem.schedule,
        recompute_features=parallel.recompute_features,
    )
    if plan.num_ranks != problem.num_devices:
        raise UserError(
            f"parallel: the plan uses {plan.num_ranks} ranks but cluster has {problem.num_devices}; "
            f"set cluster.num_devices to {plan.num_ranks} or change tp, pp and dp"
        )
    return plan
