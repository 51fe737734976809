"""A `ContrastiveModule` on many devices, trained by a loop and an optimizer of the user's own.

DistMM's four interfaces (section 6) in our terms: *initialization* is `ContrastiveParallelModule(model, specs)`, its
*partition annotation* is a `TowerSpec` for each tower (the modules themselves are transformers' own and need none), its
*training loop* is `execute`, forward and backward of a global batch, and *data loading* is the user's own loader, which
gives the same global batch to every process; of it a process computes what it holds.

    model = ContrastiveParallelModule(CLIPModel(config), {"image": TowerSpec(dp_size=2), "text": TowerSpec()})
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in dataloader:
        loss = model.execute(batch).loss
        optimizer.step()
        optimizer.zero_grad()
    trained = model.whole_model()  # a CLIPModel, on rank 0

Limits: as `motet.runtime.api.multimodal`; the layout is the user's, a search for one is the run file's.
"""

import copy
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from motet.assignment.sample import Sample, Segment
from motet.cluster.cluster import cpu_cluster
from motet.costs.analytic import analytic_table
from motet.errors import UserError
from motet.families.token_counts import encoder_segment
from motet.models.contrastive import ContrastiveModule
from motet.models.dict_batch import DictBatch
from motet.models.hub.clip import from_transformers, to_transformers
from motet.models.stages.caption_decoder import CaptionDecoderStage
from motet.models.stages.contrastive import ContrastiveStage
from motet.models.stages.encoder import EncoderStage
from motet.models.structure import decoder_structure, trainable_layers, workload_of
from motet.models.tower_batch import batch_of_towers
from motet.parallel.tensor_parallel import TensorParallel, apply_tensor_parallel
from motet.plan import CONTRASTIVE, DECODER, Edge, ModulePlan, Plan, Stage
from motet.planner.distmm.towers import TowerLayout, tower_plan
from motet.planner.problem import Degrees, ModuleProblem, PlanningProblem
from motet.runtime.api.parallel_base import (
    ParallelModule,
    check_no_sharing,
    check_same_on_all_ranks,
    default_device,
    share_weights,
)
from motet.runtime.engine import Engine
from motet.runtime.verification.verify import collect_weights
from motet.schedule.generators import GENERATORS
from motet.shapes.families import as_tower
from motet.shapes.module_shape import contrastive_loss

TYPICAL_CAPTION = 32
"""Tokens of a caption, by which a decoder's stages are cut."""


@dataclass(frozen=True)
class TowerSpec:
    """How one tower is laid out."""

    tp_size: int = 1
    """Size of the tensor-parallel groups."""
    pp_size: int = 1
    """Number of pipeline stages."""
    dp_size: int = 1
    """Number of replicas; towers need not have equally many."""
    num_microbatches: int = 1
    """Of each replica's share of a contrastive batch."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers as docs/architecture.md counts them; None: cut by their costs."""

    def __post_init__(self) -> None:
        for key in ("tp_size", "pp_size", "dp_size", "num_microbatches"):
            value = getattr(self, key)
            try:
                size = 0 if isinstance(value, bool) else operator.index(value)
            except TypeError:
                size = 0
            if size < 1:
                raise UserError(f"TowerSpec: {key} is {value}; give a whole number, at least 1")
            object.__setattr__(self, key, size)  # An int: plans are written as JSON.


class ContrastiveParallelModule(ParallelModule):
    """This rank's part of a contrastive model. Collective: every rank makes one with the same arguments.

    Args:
        model: a `ContrastiveModule`, or transformers' CLIPModel or SiglipModel (towers "image" and "text"). It is taken
            over: what this rank does not hold of it is freed.
        tower_specs: by tower, and for "decoder" where the model has one. Ranks are given out in this order.
        num_contrastive_batches: into how many the global batch falls; the loss is the mean over them.
        schedule: a key of `motet.schedule.generators.GENERATORS`.
        recompute_features: towers whose forward keeps no graph and runs again in the backward.
        device: of this rank's stages; None: the current CUDA device, or the CPU if the process group is gloo's.
        timeout: how long a message or collective may take.

    Raises `ValueError` for what no plan can satisfy, naming the argument.
    """

    def __init__(
        self,
        model: nn.Module,
        tower_specs: Mapping[str, TowerSpec],
        *,
        num_contrastive_batches: int = 1,
        schedule: str = "distmm_pipe",
        recompute_features: tuple[str, ...] = (),
        device: torch.device | None = None,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise UserError("there is no process group; call torch.distributed.init_process_group before")
        contrastive = model if isinstance(model, ContrastiveModule) else from_transformers(model)
        if contrastive.is_taken_over:
            raise UserError("this ContrastiveModule was parallelized before; build it anew")
        check_no_sharing(contrastive.parts())
        if contrastive.training:
            contrastive.freeze_eval_parts()
        _check(contrastive, tower_specs, schedule, recompute_features, num_contrastive_batches)
        self.plan = _plan(contrastive, tower_specs, num_contrastive_batches, schedule, recompute_features)
        self.device = default_device() if device is None else device
        share_weights(contrastive, self.device)
        self._is_contrastive, self._skeleton = contrastive is model, (_skeleton_of(contrastive),)
        contrastive.is_taken_over = True
        # Not registered as a submodule: what is in it is held by the stages.
        self._source = (contrastive,)
        self._engine = Engine(
            self.plan,
            self._make_stage,
            device=self.device,
            boundary_dtype=contrastive.loss.logit_scale.dtype,
            timeout=timeout,
        )
        stages = self._engine.model.modules()
        self.stages = nn.ModuleDict({name: stage for (name, _, _), stage in self._engine.model.stages.items()})  # type: ignore[misc]
        held = {module for stage in stages for module in stage.modules()}
        for name, part in contrastive.parts().items():
            if part not in held and name != f"{CONTRASTIVE}.module":
                part.to("meta")

    def _make_stage(
        self, name: str, module_plan: ModulePlan, stage: Stage, tp: TensorParallel
    ) -> EncoderStage | ContrastiveStage | CaptionDecoderStage:
        (model,) = self._source
        if name == CONTRASTIVE:
            return model.loss_stage().to(self.device)
        made: EncoderStage | CaptionDecoderStage
        if name == DECODER:
            assert model.decoder is not None
            family = model.decoder.config.model_type
            made = CaptionDecoderStage(name, model.decoder, stage.layers)
        else:
            tower = model.modality_modules()[name]
            family = tower.module.config.model_type
            made = EncoderStage(name, tower, stage.layers)
        if tp.size > 1:
            apply_tensor_parallel(made, family, tp)
        return made.train(model.training).to(self.device)

    @property
    def logit_scale(self) -> nn.Parameter | None:
        """The logarithm of the loss's scale; None on ranks that have no part in the loss."""
        stages = self._engine.model.modules()
        return next((stage.logit_scale for stage in stages if isinstance(stage, ContrastiveStage)), None)

    def whole_model(self) -> nn.Module | None:
        """The model with the weights that it has now, as it was given (a CLIPModel came in: one comes out), on the CPU
        of rank 0; None on other ranks. Collective."""
        self._engine.model.after_update()
        weights = collect_weights(self._engine.model)
        if weights is None:
            return None
        (skeleton,) = self._skeleton
        memo: dict[int, Any] = {}
        for part, module in skeleton.parts().items():
            for name, parameter in module.named_parameters():
                value = weights[f"{part}.{name}"][0].to("cpu", copy=True)
                memo[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
        whole = copy.deepcopy(skeleton, memo)
        return whole if self._is_contrastive else to_transformers(whole)

    def _read(self, batch: Mapping[str, Any]) -> DictBatch:
        read = batch_of_towers(self._source[0], batch)
        check_same_on_all_ranks(_tensors_of(batch), read, self.device)
        return read

    def _check_trains(self, batch: DictBatch) -> None:
        num_batches = self.plan.num_microbatches_of(CONTRASTIVE)
        if len(batch.samples) < 2 * num_batches:
            raise UserError(
                f"batch: has {len(batch.samples)} samples for {num_batches} contrastive batches, in which a sample is "
                "compared with others; give at least 2 for each"
            )


def _skeleton_of(model: ContrastiveModule) -> ContrastiveModule:
    """The model without its weights."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _tensors_of(batch: Mapping[str, Any]) -> Iterator[Tensor]:
    for key in sorted(batch):
        if isinstance(batch[key], Mapping):
            yield from _tensors_of(batch[key])
        elif isinstance(batch[key], Tensor):
            yield batch[key]


def _check(
    model: ContrastiveModule,
    specs: Mapping[str, TowerSpec],
    schedule: str,
    recompute_features: tuple[str, ...],
    num_contrastive_batches: int,
) -> None:
    towers = list(model.towers)
    modules = [*towers, DECODER] if model.reads else towers
    for name in specs:
        if name not in modules:
            raise UserError(f"tower_specs: there is no tower {name!r}; the model has {', '.join(modules)}")
    for name in recompute_features:
        if name not in towers:
            raise UserError(f"recompute_features: there is no tower {name!r}; the model has {', '.join(towers)}")
    for name in modules:
        if name not in specs:
            raise UserError(f"tower_specs: {name} is missing; give its TowerSpec")
        if not isinstance(specs[name], TowerSpec):
            raise UserError(f"tower_specs: {name} is a {type(specs[name]).__name__}; give a TowerSpec")
    if schedule not in GENERATORS:
        raise UserError(f"schedule: {schedule!r} is not known; give one of {', '.join(GENERATORS)}")
    if num_contrastive_batches < 1:
        raise UserError(f"num_contrastive_batches: is {num_contrastive_batches}; give at least 1")


def _plan(
    model: ContrastiveModule,
    specs: Mapping[str, TowerSpec],
    num_contrastive_batches: int,
    schedule: str,
    recompute_features: tuple[str, ...],
) -> Plan:
    plan = tower_plan(
        _planning_problem(model, specs, num_contrastive_batches, schedule),
        {
            name: TowerLayout(
                degrees=Degrees(
                    tp=spec.tp_size, pp=spec.pp_size, dp=spec.dp_size, layers_per_stage=spec.layers_per_stage
                ),
                per_batch=spec.num_microbatches,
            )
            for name, spec in specs.items()
        },
        recompute_features=recompute_features,
    )
    if plan.num_ranks != dist.get_world_size():
        raise UserError(
            f"tower_specs: take {plan.num_ranks} ranks, but {dist.get_world_size()} processes run; start "
            f"{plan.num_ranks}, or change tp_size, pp_size and dp_size"
        )
    return plan


def _planning_problem(
    model: ContrastiveModule, specs: Mapping[str, TowerSpec], num_contrastive_batches: int, schedule: str
) -> PlanningProblem:
    """One typical sample stands for each contrastive batch: nothing is estimated, the layouts are given."""
    cluster = cpu_cluster(dist.get_world_size())
    towers = model.modality_modules()
    workloads = {name: as_tower(workload_of(tower)) for name, tower in towers.items()}
    num_parameters = len(list(model.loss.parameters()))
    workloads[CONTRASTIVE] = contrastive_loss(model.pairs, model.width, num_parameters=num_parameters)
    trained = {name: trainable_layers(name, tower) for name, tower in towers.items()}
    trained[CONTRASTIVE] = ((0, 1),) if any(p.requires_grad for p in model.loss.parameters()) else ()
    layouts = {}
    for name, tower in towers.items():
        segment = encoder_segment(tower.module.config, item=0, grid=())
        layouts[name] = (Segment(segment.num_tokens, num_outputs=1, grid=segment.grid),)
    edges = [Edge(source=name, target=CONTRASTIVE) for name in towers]
    num_loss_tokens = {CONTRASTIVE: len(model.pairs)}
    if model.decoder is not None:
        structure = decoder_structure(model.decoder, loss_weight=model.caption_weight)
        workloads[DECODER], trained[DECODER] = structure.workload, structure.trainable
        edges.append(Edge(source=model.reads, target=DECODER, layers=workloads[DECODER].blocks))
        (segment,) = layouts[model.reads]
        layouts[model.reads] = (replace(segment, num_outputs=1 + segment.num_tokens),)
        layouts[DECODER] = (Segment(TYPICAL_CAPTION),)
        num_loss_tokens[DECODER] = TYPICAL_CAPTION - 1
    weights = {CONTRASTIVE: model.loss_weight, DECODER: model.caption_weight}
    return PlanningProblem(
        modules={
            name: ModuleProblem(workload=workload, trainable=trained[name], loss_weight=weights.get(name, 0.0))
            for name, workload in workloads.items()
        },
        edges=tuple(edges),
        cluster=cluster,
        table=analytic_table(workloads, cluster, tp_sizes={1, *(spec.tp_size for spec in specs.values())}),
        samples=(Sample("typical", layouts, num_loss_tokens),) * num_contrastive_batches,
        num_microbatches=1,
        schedule=schedule,
        contrastive_batch_size=1,
    )
