"""Parallel modules whose plan follows from a layout of each module, as in the papers' listings.

* `MultimodalParallelModule` (Cornstarch listing 1, thesis listing B.1): a `MultimodalModule` and a `ParallelSpec` for
  each of its modules. Data parallelism fills the world: its degree is the number of processes over the ranks of one
  copy of the model. All modules have the same degree.

      spec = MultimodalParallelSpec({"vision": ParallelSpec(pp_size=2)}, ParallelSpec(tp_size=2), num_microbatches=8)
      parallel = spec.apply(mllm)

* `ContrastiveParallelModule` (the interfaces of DistMM section 6): a `ContrastiveModule`, or a CLIPModel or SiglipModel
  of transformers, and a `TowerSpec` for each tower, each with its own degree of data parallelism.

      parallel = ContrastiveParallelModule(CLIPModel(config), {"image": TowerSpec(dp_size=2), "text": TowerSpec()})

`motet.runtime.parallel_module.ParallelModule` says how they are trained.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch import nn

from motet.cluster import cpu_cluster
from motet.costs.analytic import analytic_table
from motet.errors import UserError
from motet.models.contrastive import ContrastiveModule
from motet.models.graph import ModuleGraph
from motet.models.hub.clip import from_transformers, to_transformers
from motet.models.hub.generation import Prompt, generate_answers
from motet.models.multimodal import MultimodalModule
from motet.models.stages.contrastive import ContrastiveStage
from motet.models.stages.stage import Batch
from motet.plan import CONTRASTIVE, LANGUAGE_MODEL, ContextOptions, Plan
from motet.planner.distmm.towers import TowerLayout, tower_plan
from motet.planner.layouts.layout import Placement, build_plan
from motet.planner.problem import Degrees, ModuleProblem, PlanningProblem
from motet.recomputation import check_entries, split_entry
from motet.runtime.communication.agreement import on_first_rank
from motet.runtime.parallel_module import FIVE_MINUTES, ParallelModule, check_ready
from motet.schedule.generators import GENERATORS


@dataclass(frozen=True)
class ParallelSpec:
    """Layout of one module of a `MultimodalModule`."""

    tp_size: int = 1
    """Size of the tensor-parallel groups."""
    cp_size: int = 1
    """Size of the context-parallel groups."""
    pp_size: int = 1
    """Number of pipeline stages."""
    context: ContextOptions = field(default_factory=ContextOptions)
    """How context-parallel groups distribute the tokens of a microbatch, whose samples are then packed."""
    sequence_parallel: bool = False
    """Whether the ranks of a tensor-parallel group split norms and residuals along the sequence."""
    ep_size: int = 1
    """Number of ranks over which experts are distributed: tp_size, or tp_size times a divisor of the number of
    replicas."""
    layers_per_stage: tuple[int, ...] | None = None
    """Number of layers of each stage, as docs/architecture.md counts them; None: the frozen-aware partition."""

    def __post_init__(self) -> None:
        for key in ("tp_size", "cp_size", "pp_size", "ep_size"):
            if getattr(self, key) < 1:
                raise UserError(f"ParallelSpec: {key} is {getattr(self, key)}; give at least 1")
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.pp_size:
            raise UserError(
                f"ParallelSpec: layers_per_stage has {len(self.layers_per_stage)} entries for pp_size {self.pp_size}; "
                f"give {self.pp_size}"
            )


@dataclass(frozen=True)
class MultimodalParallelSpec:
    """Layout of a whole model. The fields are the arguments of `MultimodalParallelModule`."""

    encoder_specs: Mapping[str, ParallelSpec]
    language_model_spec: ParallelSpec
    num_microbatches: int = 1
    microbatch_size: int = 1
    modality_parallelism: Placement = "parallel"
    schedule: str = "1f1b"
    packing: bool = False
    recompute: tuple[str, ...] = ()

    def apply(
        self, model: MultimodalModule, *, device: torch.device | None = None, timeout: timedelta = FIVE_MINUTES
    ) -> "MultimodalParallelModule":
        """Makes this rank's part of the model; takes ownership of `model`. Collective."""
        return MultimodalParallelModule(model, **vars(self), device=device, timeout=timeout)


class MultimodalParallelModule(ParallelModule):
    """This rank's part of a `MultimodalModule` (see `ParallelModule`).

    Args:
        modality_parallelism: encoders on ranks of their own ("parallel"), in turns on the same ranks ("colocated"), or
            whole on each stage of the language model ("replicated").
        encoder_specs: the layout of each encoder, by name.
        num_microbatches: number of microbatches of each replica in one iteration.
        microbatch_size: number of samples of one microbatch.
        schedule: a key of `motet.schedule.generators.GENERATORS`.
        packing: whether a microbatch's samples are in one row without padding.
        recompute: the modules whose activations are computed again in the backward pass, as `parallel.recompute` of run
            files (`name` or `name:kind`).
    """

    def __init__(
        self,
        model: MultimodalModule,
        modality_parallelism: Placement = "parallel",
        encoder_specs: Mapping[str, ParallelSpec] | None = None,
        language_model_spec: ParallelSpec | None = None,
        num_microbatches: int = 1,
        microbatch_size: int = 1,
        *,
        schedule: str = "1f1b",
        packing: bool = False,
        recompute: tuple[str, ...] = (),
        device: torch.device | None = None,
        timeout: timedelta = FIVE_MINUTES,
    ) -> None:
        check_ready(model)
        packing = packing or model.media_attention != "causal"
        specs = {**(encoder_specs or {}), LANGUAGE_MODEL: language_model_spec or ParallelSpec()}
        _check_specs(specs, list(model.nodes), ParallelSpec, "encoder_specs", "encoder")
        if modality_parallelism not in get_args(Placement):
            raise UserError(
                f"modality_parallelism: {modality_parallelism!r} is not known; give one of "
                f"{', '.join(get_args(Placement))}"
            )
        _check_schedule(schedule)
        _check_names([name for name, _ in map(split_entry, recompute)], list(model.nodes), "recompute", "module")
        try:
            check_entries(recompute)
        except ValueError as error:
            raise UserError(str(error)) from None
        for key, number in (("num_microbatches", num_microbatches), ("microbatch_size", microbatch_size)):
            if number < 1:
                raise UserError(f"{key} is {number}; give at least 1")
        problem = _planning_problem(
            model,
            {spec.tp_size for spec in specs.values()},
            packing=packing,
            samples=(model.typical_sample(),) * num_microbatches,
            num_microbatches=num_microbatches,
            schedule=schedule,
            recompute=recompute,
        )
        plan = _plan_that_fills_the_world(problem, specs, modality_parallelism, model.media_attention)
        super().__init__(model, plan, packing=packing, device=device, timeout=timeout)
        self.global_batch_size = num_microbatches * microbatch_size * len(plan.modules[LANGUAGE_MODEL].replicas)

    def generate(
        self, batch: Mapping[str, Any], *, max_new_tokens: int, eos_token_id: int | None = None
    ) -> list[list[int]]:
        """Answers to the prompts of a batch, greedily, with the weights that the model has now. Collective.

        The whole model is gathered on rank 0, where transformers' `generate` runs. Returns, on every rank, the token
        ids of each answer.

        Args:
            batch: as `execute` takes it, of any size; labels are not read.
            eos_token_id: ends an answer; None: what the model's generation configuration says, if anything.
        """
        whole = self.whole_model()

        def answer() -> list[list[int]]:
            assert isinstance(whole, MultimodalModule)
            read = whole.read_batch({key: value for key, value in batch.items() if key != "labels"})
            prompts = [
                Prompt(
                    read.features(LANGUAGE_MODEL, i)["input_ids"],
                    {name: sample.layouts.get(name, ()) for name in whole.encoders},
                    {name: read.features(name, i) for name in whole.encoders if sample.has(name)},
                )
                for i, sample in enumerate(read.samples)
            ]
            return generate_answers(whole, prompts, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id)

        return on_first_rank(list[list[int]], answer)

    def _check_size(self, batch: Mapping[str, Any], read: Batch) -> None:
        if batch.get("labels") is None:
            raise UserError("batch: labels is missing; give the labels of input_ids, -100 where there is no loss")
        if len(read.samples) != self.global_batch_size:
            raise UserError(
                f"batch: has {len(read.samples)} samples; give the global batch of {self.global_batch_size} "
                "(num_microbatches x microbatch_size x replicas) to every rank"
            )


@dataclass(frozen=True)
class TowerSpec:
    """Layout of one tower, or of the caption decoder, of a `ContrastiveModule`."""

    tp_size: int = 1
    """Size of the tensor-parallel groups."""
    pp_size: int = 1
    """Number of pipeline stages."""
    dp_size: int = 1
    """Number of replicas, which may differ between towers."""
    num_microbatches: int = 1
    """Microbatches of each replica's share of a contrastive batch."""
    layers_per_stage: tuple[int, ...] | None = None
    """Number of layers of each stage, as docs/architecture.md counts them; None: a partition by cost."""

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
    """This rank's part of a contrastive model (see `ParallelModule`).

    Args:
        model: a `ContrastiveModule`, or transformers' CLIPModel or SiglipModel (towers "image" and "text").
        tower_specs: the layout of each tower by name, and of "decoder" if the model has one. Ranks are numbered in this
            order.
        num_contrastive_batches: number of contrastive batches in a global batch; the loss is the mean over them.
        schedule: a key of `motet.schedule.generators.GENERATORS`.
        recompute_features: towers whose forward keeps no graph and runs again in the backward.
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
        timeout: timedelta = FIVE_MINUTES,
    ) -> None:
        contrastive = model if isinstance(model, ContrastiveModule) else from_transformers(model)
        check_ready(contrastive)
        names = [name for name in contrastive.nodes if name != CONTRASTIVE]
        _check_specs(tower_specs, names, TowerSpec, "tower_specs", "tower")
        _check_names(recompute_features, list(contrastive.towers), "recompute_features", "tower")
        _check_schedule(schedule)
        if num_contrastive_batches < 1:
            raise UserError(f"num_contrastive_batches: is {num_contrastive_batches}; give at least 1")
        problem = _planning_problem(
            contrastive,
            {1, *(spec.tp_size for spec in tower_specs.values())},
            samples=(contrastive.typical_sample(),) * num_contrastive_batches,
            num_microbatches=1,
            schedule=schedule,
            contrastive_batch_size=1,
        )
        layouts = {
            name: TowerLayout(
                degrees=Degrees(
                    tp=spec.tp_size, pp=spec.pp_size, dp=spec.dp_size, layers_per_stage=spec.layers_per_stage
                ),
                per_batch=spec.num_microbatches,
            )
            for name, spec in tower_specs.items()
        }
        plan = tower_plan(problem, layouts, recompute_features=recompute_features)
        if plan.num_ranks != dist.get_world_size():
            raise UserError(
                f"tower_specs: take {plan.num_ranks} ranks, but {dist.get_world_size()} processes run; start "
                f"{plan.num_ranks}, or change tp_size, pp_size and dp_size"
            )
        super().__init__(contrastive, plan, device=device, timeout=timeout)
        self._is_contrastive = contrastive is model

    @property
    def logit_scale(self) -> nn.Parameter | None:
        """The logarithm of the loss's scale; None on ranks that have no part in the loss."""
        stages = self._engine.model.modules()
        return next((stage.module.logit_scale for stage in stages if isinstance(stage, ContrastiveStage)), None)

    def whole_model(self) -> nn.Module | None:
        """Like `ParallelModule.whole_model`, in the class that was given: a CLIPModel for a CLIPModel."""
        whole = super().whole_model()
        return whole if self._is_contrastive or whole is None else to_transformers(cast(ContrastiveModule, whole))

    def _as_graph(self, whole: nn.Module) -> ModuleGraph:
        return super()._as_graph(whole) if self._is_contrastive else from_transformers(whole)

    def _check_trains(self, batch: Batch) -> None:
        num_batches = self.plan.num_microbatches_of(CONTRASTIVE)
        if len(batch.samples) < 2 * num_batches:
            raise UserError(
                f"batch: has {len(batch.samples)} samples for {num_batches} contrastive batches, in which a sample is "
                "compared with others; give at least 2 for each"
            )


def _check_specs(specs: Mapping[str, Any], names: Iterable[str], spec_class: type, key: str, what: str) -> None:
    _check_names(specs, names, key, what)
    for name in names:
        if name not in specs:
            raise UserError(f"{key}: {name} is missing; give its {spec_class.__name__}")
        if not isinstance(specs[name], spec_class):
            raise UserError(f"{key}: {name} is a {type(specs[name]).__name__}; give a {spec_class.__name__}")


def _check_names(given: Iterable[str], names: Iterable[str], key: str, what: str) -> None:
    for name in given:
        if name not in names:
            raise UserError(f"{key}: there is no {what} {name!r}; the model has {', '.join(names)}")


def _check_schedule(schedule: str) -> None:
    if schedule not in GENERATORS:
        raise UserError(f"schedule: {schedule!r} is not known; give one of {', '.join(GENERATORS)}")


def _planning_problem(
    model: ModuleGraph, tp_sizes: set[int], *, packing: bool = False, **options: Any
) -> PlanningProblem:
    """Makes a planning problem of the model on CPU devices; the layout is given, so costs only balance stages."""
    cluster = cpu_cluster(dist.get_world_size())
    workloads = {name: node.workload(packing=packing) for name, node in model.nodes.items()}
    return PlanningProblem(
        modules={
            name: ModuleProblem(workload=workloads[name], trainable=node.trainable, loss_weight=node.loss_weight)
            for name, node in model.nodes.items()
        },
        edges=model.edges,
        cluster=cluster,
        table=analytic_table(workloads, cluster, tp_sizes=tp_sizes),
        **options,
    )


def _plan_that_fills_the_world(
    problem: PlanningProblem, specs: Mapping[str, ParallelSpec], placement: Placement, media_attention: str
) -> Plan:
    """The plan with as many replicas as the processes allow."""

    def plan_with(dp_size: int, *, distributes_experts: bool = True) -> Plan:
        degrees = {
            name: Degrees(
                tp=spec.tp_size,
                cp=spec.cp_size,
                pp=spec.pp_size,
                dp=dp_size,
                layers_per_stage=spec.layers_per_stage,
                sequence_parallel=spec.sequence_parallel,
                ep=spec.ep_size if distributes_experts else 1,
                context=replace(spec.context, media_attention=media_attention)
                if name == LANGUAGE_MODEL
                else spec.context,
            )
            for name, spec in specs.items()
        }
        return build_plan(problem, degrees, placement=placement)

    ranks_per_copy = plan_with(1, distributes_experts=False).num_ranks
    if dist.get_world_size() % ranks_per_copy:
        raise UserError(
            f"one copy of the model takes {ranks_per_copy} ranks, which {dist.get_world_size()} processes cannot be "
            f"divided into; start a multiple of {ranks_per_copy}, or change tp_size and pp_size"
        )
    return plan_with(dist.get_world_size() // ranks_per_copy)
