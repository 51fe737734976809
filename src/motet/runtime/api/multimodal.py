"""A `MultimodalModule` on many devices, trained by a loop and an optimizer of the user's own.

(Cornstarch listing 1, thesis listing B.1.) Every process builds the same model, says how each module is to be laid out,
and calls `execute` with the same global batch:

    spec = MultimodalParallelSpec({"vision": ParallelSpec(pp_size=2)}, ParallelSpec(tp_size=2), num_microbatches=8)
    parallel = spec.apply(mllm)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for batch in dataloader:
        loss = parallel.execute(batch).loss
        optimizer.step()
        optimizer.zero_grad()

Data parallelism fills the world: its degree is the number of processes over the ranks of one copy of the model.

Limits: one degree of data parallelism for all modules. The norm of `parameters()` is this
rank's share, so clip with `clip_gradients`. With dropout in tensor-parallel groups, seed their ranks alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from motet.cluster.cluster import cpu_cluster
from motet.costs.analytic import analytic_table
from motet.errors import UserError
from motet.models.dict_batch import DictBatch, batch_from_dict
from motet.models.multimodal import ModalityModule, MultimodalModule
from motet.models.stages.encoder import EncoderStage
from motet.models.stages.language_model import LanguageModelStage
from motet.models.structure import (
    ModuleStructure,
    module_edges,
    module_structures,
    typical_sample,
)
from motet.parallel.tensor_parallel import TensorParallel, apply_tensor_parallel
from motet.plan import LANGUAGE_MODEL, ContextOptions, ModulePlan, Plan, Stage
from motet.planner.layout import Placement, build_plan
from motet.planner.problem import Degrees, ModuleProblem, PlanningProblem
from motet.runtime.api.parallel_base import (
    ParallelModule,
    check_no_sharing,
    check_same_on_all_ranks,
    default_device,
    share_weights,
)
from motet.runtime.engine import Engine
from motet.schedule.generators import GENERATORS


@dataclass(frozen=True)
class ParallelSpec:
    """How one module is laid out."""

    tp_size: int = 1
    """Size of the tensor-parallel groups."""
    cp_size: int = 1
    """Size of the context-parallel groups."""
    pp_size: int = 1
    """Number of pipeline stages."""
    context: ContextOptions = field(default_factory=ContextOptions)
    """How context-parallel groups share the tokens of a microbatch, whose samples are packed then."""
    sequence_parallel: bool = False
    """Inside tensor-parallel groups, norms and residuals hold a share of the sequence each."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers as docs/architecture.md counts them; None: the frozen-aware partition."""

    def __post_init__(self) -> None:
        for key in ("tp_size", "cp_size", "pp_size"):
            if getattr(self, key) < 1:
                raise UserError(f"ParallelSpec: {key} is {getattr(self, key)}; give at least 1")
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.pp_size:
            raise UserError(
                f"ParallelSpec: layers_per_stage has {len(self.layers_per_stage)} entries for pp_size {self.pp_size}; "
                f"give {self.pp_size}"
            )


@dataclass(frozen=True)
class MultimodalParallelSpec:
    """How a whole model is laid out; `apply` does it. The fields are the arguments of `MultimodalParallelModule`."""

    encoder_specs: Mapping[str, ParallelSpec]
    language_model_spec: ParallelSpec
    num_microbatches: int = 1
    microbatch_size: int = 1
    modality_parallelism: Placement = "parallel"
    schedule: str = "1f1b"
    packing: bool = False
    recompute: tuple[str, ...] = ()

    def apply(
        self, model: MultimodalModule, *, device: torch.device | None = None, timeout: timedelta = timedelta(minutes=5)
    ) -> "MultimodalParallelModule":
        """Takes `model` over. Collective."""
        return MultimodalParallelModule(model, **vars(self), device=device, timeout=timeout)


class MultimodalParallelModule(ParallelModule):
    """This rank's part of a `MultimodalModule`. Collective: every rank makes one with the same arguments.

    `model` is taken over: what this rank does not hold of it is freed. `parameters()` are those that this rank holds;
    make the optimizer after.

    Args:
        modality_parallelism: encoders on ranks of their own ("parallel"), in turns on the same ranks ("colocated"), or
            whole on each stage of the language model ("replicated").
        encoder_specs: by encoder.
        num_microbatches: of each replica in one iteration.
        microbatch_size: samples of one microbatch.
        schedule: a key of `motet.schedule.generators.GENERATORS`.
        packing: a microbatch's samples stand in one row without padding.
        recompute: the modules whose activations are computed again in the backward pass.
        device: of this rank's stages; None: the current CUDA device, or the CPU if the process group is gloo's.
        timeout: how long a message or collective may take.

    Raises `ValueError` for what no plan can satisfy, naming the argument.
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
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise UserError("there is no process group; call torch.distributed.init_process_group before")
        if model.is_taken_over:
            raise UserError("this MultimodalModule was parallelized before; build it anew")
        check_no_sharing(model.parts())
        if model.training:
            model.freeze_eval_parts()
        specs = {**(encoder_specs or {}), LANGUAGE_MODEL: language_model_spec or ParallelSpec()}
        packing = packing or model.media_attention != "causal"
        specs[LANGUAGE_MODEL] = _with_attention_of(model, specs[LANGUAGE_MODEL])
        structures = module_structures(model, packing=packing)
        _check_arguments(structures, specs, modality_parallelism, schedule, recompute)
        for key, number in (("num_microbatches", num_microbatches), ("microbatch_size", microbatch_size)):
            if number < 1:
                raise UserError(f"{key} is {number}; give at least 1")
        self.plan: Plan = _fill_world(
            structures, model, specs, modality_parallelism, num_microbatches, schedule, recompute
        )
        dp_size = len(self.plan.modules[LANGUAGE_MODEL].replicas)
        self.global_batch_size = num_microbatches * microbatch_size * dp_size
        self.device = default_device() if device is None else device
        share_weights(model, self.device)
        model.is_taken_over = True
        self._source = _Source(model, packing)
        self._engine = Engine(
            self.plan,
            self._make_stage,
            device=self.device,
            boundary_dtype=next(model.language_model.parameters()).dtype,
            timeout=timeout,
        )
        self.stages = nn.ModuleDict({name: stage for (name, _, _), stage in self._engine.model.stages.items()})  # type: ignore[misc]
        self._source.free_what_is_not_in(self._engine.model.modules())

    def _make_stage(
        self, name: str, module_plan: ModulePlan, stage: Stage, tp: TensorParallel
    ) -> EncoderStage | LanguageModelStage:
        owner = module_plan.data_module(name)
        module, recompute = self._source.take(owner), name in self.plan.recompute
        made: EncoderStage | LanguageModelStage
        if owner == LANGUAGE_MODEL:
            made = LanguageModelStage(
                owner,
                module.module,
                stage.layers,
                packing=self._source.packing,
                recompute=recompute,
                media_attention=self._source.model.media_attention,
                preprocess_callback=self._source.model.preprocess_callback,
            )
        else:
            made = EncoderStage(owner, module, stage.layers, recompute=recompute)
        idle = made.idle_blocks if isinstance(made, EncoderStage) else ()
        apply_tensor_parallel(made, module.module.config.model_type, tp, idle=idle)
        return made.train(self._source.model.training).to(self.device)

    def _read(self, batch: Mapping[str, Any]) -> DictBatch:
        if batch.get("labels") is None:
            raise UserError("batch: labels is missing; give the labels of input_ids, -100 where there is no loss")
        read = batch_from_dict(self._source.model, batch)
        if len(read.samples) != self.global_batch_size:
            raise UserError(
                f"batch: has {len(read.samples)} samples; give the global batch of {self.global_batch_size} "
                "(num_microbatches x microbatch_size x replicas) to every rank"
            )
        check_same_on_all_ranks([batch["input_ids"]], read, self.device)
        return read


class _Source:
    """The model that stages are taken from. Not a module: what is in it is held by the stages."""

    def __init__(self, model: MultimodalModule, packing: bool) -> None:
        self.model, self.packing = model, packing
        self._taken: set[str] = set()

    def take(self, name: str) -> ModalityModule:
        assert name not in self._taken, f"{name} stands twice on this rank"
        self._taken.add(name)
        return self.model.modality_modules()[name]

    def free_what_is_not_in(self, stages: Sequence[nn.Module]) -> None:
        held = {module for stage in stages for module in stage.modules()}
        for part in self.model.parts().values():
            if part not in held:
                part.to("meta")


def _with_attention_of(model: MultimodalModule, spec: ParallelSpec) -> ParallelSpec:
    return replace(spec, context=replace(spec.context, media_attention=model.media_attention))


def _check_arguments(
    structures: Mapping[str, ModuleStructure],
    specs: Mapping[str, ParallelSpec],
    modality_parallelism: str,
    schedule: str,
    recompute: tuple[str, ...],
) -> None:
    for name in specs:
        if name not in structures:
            raise UserError(f"encoder_specs: there is no encoder {name!r}; the model has {', '.join(structures)}")
    for name in structures:
        if name not in specs:
            raise UserError(f"encoder_specs: {name} is missing; give its ParallelSpec")
    if modality_parallelism not in get_args(Placement):
        raise UserError(
            f"modality_parallelism: {modality_parallelism!r} is not known; give one of {', '.join(get_args(Placement))}"
        )
    if schedule not in GENERATORS:
        raise UserError(f"schedule: {schedule!r} is not known; give one of {', '.join(GENERATORS)}")
    for name in recompute:
        if name not in structures:
            raise UserError(f"recompute: there is no module {name!r}; the model has {', '.join(structures)}")


def _fill_world(
    structures: Mapping[str, ModuleStructure],
    model: MultimodalModule,
    specs: Mapping[str, ParallelSpec],
    placement: Placement,
    num_microbatches: int,
    schedule: str,
    recompute: tuple[str, ...],
) -> Plan:
    """The plan with as many replicas as the processes allow."""
    cluster = cpu_cluster(dist.get_world_size())
    workloads = {name: structure.workload for name, structure in structures.items()}
    problem = PlanningProblem(
        modules={
            name: ModuleProblem(
                workload=structure.workload, trainable=structure.trainable, loss_weight=structure.loss_weight
            )
            for name, structure in structures.items()
        },
        edges=module_edges(model),
        cluster=cluster,
        table=analytic_table(workloads, cluster, tp_sizes={spec.tp_size for spec in specs.values()}),
        samples=(typical_sample(model),) * num_microbatches,
        num_microbatches=num_microbatches,
        schedule=schedule,
        recompute=recompute,
    )

    def plan_with(dp_size: int) -> Plan:
        degrees = {
            name: Degrees(
                tp=spec.tp_size,
                cp=spec.cp_size,
                pp=spec.pp_size,
                dp=dp_size,
                layers_per_stage=spec.layers_per_stage,
                sequence_parallel=spec.sequence_parallel,
                context=spec.context,
            )
            for name, spec in specs.items()
        }
        return build_plan(problem, degrees, placement=placement)

    ranks_per_copy = plan_with(1).num_ranks
    if dist.get_world_size() % ranks_per_copy:
        raise UserError(
            f"one copy of the model takes {ranks_per_copy} ranks, which {dist.get_world_size()} processes cannot be "
            f"divided into; start a multiple of {ranks_per_copy}, or change tp_size and pp_size"
        )
    return plan_with(dist.get_world_size() // ranks_per_copy)
