"""A model on many devices, trained by a loop and an optimizer of the user's own.

`ParallelModule` is this rank's part of any `ModuleGraph` under any plan. Its two faces derive the plan from the papers'
arguments:

* `MultimodalParallelModule` (Cornstarch listing 1, thesis listing B.1): a `MultimodalModule` and a `ParallelSpec` for
  each of its modules. Data parallelism fills the world: its degree is the number of processes over the ranks of one
  copy of the model. All modules have the same degree.

      spec = MultimodalParallelSpec({"vision": ParallelSpec(pp_size=2)}, ParallelSpec(tp_size=2), num_microbatches=8)
      parallel = spec.apply(mllm)

* `ContrastiveParallelModule` (the interfaces of DistMM section 6): a `ContrastiveModule`, or a CLIPModel or SiglipModel
  of transformers, and a `TowerSpec` for each tower, each with its own degree of data parallelism.

      parallel = ContrastiveParallelModule(CLIPModel(config), {"image": TowerSpec(dp_size=2), "text": TowerSpec()})

Every process builds the same model and calls `execute` with the same global batch; it computes what it holds of it:

    optimizer = torch.optim.AdamW(parallel.parameters())
    for batch in dataloader:
        loss = parallel(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    parallel.save_checkpoint("checkpoint", optimizer)  # `load_checkpoint` reads it under any plan.
    parallel.save_pretrained("exported")  # `whole_model` and `state_dict` have the same in memory, on rank 0.

Limits: the norm of `parameters()` is this rank's share, so clip with `clip_gradients`. With dropout in tensor-parallel
groups, seed their ranks alike.
"""

import copy
import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from motet.assignment.sample import Sample
from motet.cluster import cpu_cluster
from motet.costs.analytic import analytic_table
from motet.devices import communication_device
from motet.errors import UserError, one_line
from motet.models.contrastive import ContrastiveModule
from motet.models.graph import ModuleGraph
from motet.models.hub.clip import from_transformers, to_transformers
from motet.models.hub.export import export_module, graph_tensors
from motet.models.hub.generation import Prompt, generate_answers
from motet.models.multimodal import MultimodalModule
from motet.models.stages.contrastive import ContrastiveStage
from motet.models.stages.stage import Batch, StageModule
from motet.parallel.tensor.tensor_parallel import TensorParallel
from motet.plan import CONTRASTIVE, LANGUAGE_MODEL, ContextOptions, ModulePlan, Plan, Stage
from motet.planner.distmm.towers import TowerLayout, tower_plan
from motet.planner.layouts.layout import Placement, build_plan
from motet.planner.problem import Degrees, ModuleProblem, PlanningProblem
from motet.recomputation import check_entries, of_module, split_entry
from motet.runtime.assembly import make_stage
from motet.runtime.checkpoint.checkpoint import (
    fill,
    read_training_state,
    stored_optimizer_shapes,
    tensors_to_save,
    write_checkpoint,
)
from motet.runtime.checkpoint.folder import TrainingState
from motet.runtime.checkpoint.torch_optimizer import TorchOptimizerStates
from motet.runtime.communication.agreement import on_every_rank, on_first_rank
from motet.runtime.engine import Engine
from motet.runtime.verification.verify import collect_weights
from motet.runtime.whole_matrices import watch_optimizers
from motet.schedule.generators import GENERATORS

FIVE_MINUTES = timedelta(minutes=5)


class LoadedKeys(NamedTuple):
    """Missing and unexpected keys, as torch's `load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ParallelModule(nn.Module):
    """This rank's part of a model. Collective: every rank makes one with the same arguments.

    Takes ownership of `model` and frees the parts that this rank does not hold. `parameters()` are those that this rank
    holds; make the optimizer after this call.

    Args:
        plan: a plan of the model's nodes and edges, for as many ranks as there are processes.
        packing: whether the language model's samples are in one row without padding.
        device: device of this rank's stages; None: the current accelerator, or the CPU if the process group is gloo's.
        timeout: maximum time of a message or collective.

    Raises `UserError` for arguments that no plan can satisfy, naming the argument.
    """

    def __init__(
        self,
        model: ModuleGraph,
        plan: Plan,
        *,
        packing: bool = False,
        device: torch.device | None = None,
        timeout: timedelta = FIVE_MINUTES,
    ) -> None:
        super().__init__()
        check_ready(model)
        _check_plan(model, plan)
        self.plan = plan
        self.device = communication_device() if device is None else device
        _share_weights(model, self.device)
        # Not registered as submodules: the stages hold what is in them.
        self._model, self._without_weights = (model,), (_without_weights(model),)
        self._packing, self._taken = packing, set[str]()
        model.is_taken_over = True
        self._engine = Engine(
            plan,
            self._make_stage,
            device=self.device,
            boundary_dtype=next(node for node in model.nodes.values() if node.num_typical_loss_tokens).dtype,
            timeout=timeout,
            keeps_unreached=True,
        )
        watch_optimizers(self._engine.model.parameters)
        stages = self._engine.model.modules()
        self.stages = nn.ModuleDict({key[0]: cast(nn.Module, s) for key, s in self._engine.model.stages.items()})
        """This rank's stages, by module."""
        held = {module for stage in stages for module in stage.modules()}
        for part in model.parts().values():
            if part not in held:
                part.to("meta")
        if not self._engine.model.trainable():
            # Optimizers of torch refuse an empty list.
            self.nothing_to_train = nn.Parameter(torch.empty(0, device=self.device))

    def _make_stage(self, name: str, module_plan: ModulePlan, stage: Stage, tp: TensorParallel) -> StageModule:
        owner = module_plan.data_module(name)
        assert owner not in self._taken, f"{owner} stands twice on this rank"
        self._taken.add(owner)
        (model,) = self._model
        made = make_stage(
            model.nodes[owner],
            stage.layers,
            tp,
            self.device,
            packing=self._packing,
            recompute=of_module(self.plan.recompute, name),
        )
        cast(nn.Module, made).train(model.training)
        return made

    def forward(self, **batch: Any) -> ModelOutput:
        """The loss of a global batch, as `execute` takes it. Collective.

        In training mode the gradients are computed at once, and `loss.backward()` adds them, multiplied by the incoming
        gradient, to the `.grad` of this rank's parameters; `loss.backward()` is not collective. In evaluation mode, or
        without gradients, this is `eval_loss`."""
        if not (self.training and torch.is_grad_enabled()):
            return ModelOutput(loss=self.eval_loss(batch))
        trainable = self._engine.model.trainable()
        earlier = [parameter.grad for parameter in trainable]
        try:
            self._engine.model.zero_gradients()
            loss = self.execute(batch).loss
            gradients = [(parameter, parameter.grad) for parameter in trainable if parameter.grad is not None]
        finally:
            for parameter, gradient in zip(trainable, earlier, strict=True):
                parameter.grad = gradient
        return ModelOutput(loss=_GivenGradients.apply(torch.zeros((), requires_grad=True), loss, gradients))

    def execute(self, batch: Mapping[str, Any]) -> ModelOutput:
        """Forward and backward of one global batch. Collective: every rank passes the same batch.

        Args:
            batch: the output of HuggingFace processors (`motet.models.batch`), with `labels` for a language model.

        Adds the gradients of the global batch, summed over replicas, to the `.grad` of this rank's parameters. A
        parameter that no sample of the batch reaches gets none. After an error, the gradients are unchanged. Returns a
        `ModelOutput` with `loss`, a scalar tensor that is the same on every rank: the mean over all tokens of the
        global batch that have a label, or over all comparisons of a contrastive loss.
        """
        self._engine.model.after_update()  # The user's optimizer does not say when it steps.
        trainable = self._engine.model.trainable()
        if not any(module.trainable for module in self.plan.modules.values()):
            raise UserError("nothing is trainable; put a part into training mode and let it require gradients")
        read = self._read(batch)
        self._check_trains(read)
        # The sum over replicas must not count what an earlier call has left.
        earlier = [(parameter, parameter.grad) for parameter in trainable if parameter.grad is not None]
        self._engine.model.zero_gradients()
        try:
            loss = self._engine.run(read).loss
        except BaseException:
            self._engine.model.zero_gradients()
            raise
        finally:
            for parameter, gradient in earlier:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return ModelOutput(loss=torch.tensor(loss, dtype=torch.float64))

    def eval_loss(self, batch: Mapping[str, Any]) -> Tensor:
        """The loss of a global batch, forward only and without dropout. Collective."""
        self._engine.model.after_update()
        was_training = self.training
        self.eval()
        try:
            loss = self._engine.run(self._read(batch), forward_only=True).loss
        finally:
            self.train(was_training)
        return torch.tensor(loss, dtype=torch.float64)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients so that the norm of the whole model's is at most `max_norm`. Collective.

        Returns the norm before scaling."""
        return self._engine.clip_gradients(max_norm)

    def whole_model(self) -> nn.Module | None:
        """The whole model with its current weights, on the CPU of rank 0; None on other ranks. Collective."""
        self._engine.model.after_update()
        weights = collect_weights(self._engine.model)
        if weights is None:
            return None
        (model,) = self._without_weights
        memo = _kept_callbacks(model)
        for part, module in model.parts().items():
            for name, parameter in module.named_parameters():
                value = weights[f"{part}.{name}"][0].to("cpu", copy=True)
                memo[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
        return copy.deepcopy(model, memo)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the state dict of the whole model, on the CPU of rank 0; {} on other ranks. Collective."""
        whole = self.whole_model()
        return {} if whole is None else whole.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> LoadedKeys:
        """Loads rank 0's `state_dict` of the whole model; those of other ranks are ignored. Collective.

        Raises `UserError` on every rank if names or shapes are not the model's. Returns missing and unexpected
        keys, which are empty if `strict`."""
        whole = self.whole_model()
        tensors: dict[str, Tensor] = {}

        def load() -> LoadedKeys:
            assert whole is not None
            try:
                keys = whole.load_state_dict(state_dict, strict=strict, assign=assign)
            except RuntimeError as error:
                raise UserError(f"state_dict: {one_line(error)}") from None
            tensors.update(graph_tensors(self._as_graph(whole)))
            return LoadedKeys(*keys)

        keys = on_first_rank(LoadedKeys, load)
        kind = dict[str, tuple[tuple[int, ...], str]]
        shapes = on_first_rank(kind, lambda: {n: (tuple(t.shape), str(t.dtype)) for n, t in tensors.items()})
        with torch.no_grad():
            for name, (shape, dtype) in shapes.items():
                full = (
                    tensors[name]
                    if name in tensors
                    else torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                )
                full = full.to(self.device).contiguous()
                dist.broadcast(full, src=0)
                for p in self._engine.model.parameters:
                    if p.name == name and p.is_kept:
                        p.parameter.copy_(p.cut(full))
        return keys

    def save_pretrained(self, folder: str | Path, processors: Mapping[str, Any] | None = None) -> None:
        """Writes the whole model for `from_pretrained` of transformers, on rank 0. Collective.

        Args:
            folder: folder to write, which is replaced if it is an earlier export.
            processors: by module, its tokenizer, image processor or feature extractor, saved with it.
        """
        whole = self.whole_model()

        def save() -> None:
            if isinstance(whole, MultimodalModule):
                export_module(whole, folder, processors=processors)
            elif isinstance(whole, PreTrainedModel):
                whole.save_pretrained(folder)
                for processor in (processors or {}).values():
                    processor.save_pretrained(folder)
            else:
                raise UserError(
                    f"save_pretrained: transformers has no model of a {type(whole).__name__}; call whole_model() and "
                    "save its parts"
                )

        on_first_rank(None, save)

    def save_checkpoint(
        self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None, *, step: int = 0, keep: int = 2
    ) -> Path:
        """Writes a checkpoint into `folder`, as `motet train` does. Collective. Returns the checkpoint's folder,
        `step_...`.

        Args:
            optimizer: optimizer of this rank's parameters, whose state is saved too.
            step: number of finished steps, after which the checkpoint is named.
            keep: number of checkpoints to keep; older ones are deleted."""
        self._engine.model.after_update()
        states = TorchOptimizerStates(optimizer, self._engine.model.parameters)
        tensors = {name: tensor.detach().cpu() for name, tensor in tensors_to_save(self._engine.model, states)}
        return write_checkpoint(Path(folder), tensors, TrainingState(step, {}, self.plan.to_json()), keep=keep)

    def load_checkpoint(self, checkpoint: str | Path, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Loads weights, and the state of the optimizer, from a checkpoint of this model under any plan, written by
        `save_checkpoint` or `motet train`. Collective. Returns its number of finished steps.

        Raises `UserError` on every rank if it is damaged or belongs to another model."""
        state = read_training_state(Path(checkpoint))
        states = TorchOptimizerStates(optimizer, self._engine.model.parameters)
        stored = on_first_rank(dict[str, tuple[int, ...]], lambda: stored_optimizer_shapes(Path(checkpoint)))
        on_every_rank(None, lambda: states.make_states(stored))
        fill(Path(checkpoint), self._engine.model, states)
        return state.step

    def _as_graph(self, whole: nn.Module) -> ModuleGraph:
        """Returns the graph of modules of a model that `whole_model` returned."""
        return cast(ModuleGraph, whole)

    def _read(self, batch: Mapping[str, Any]) -> Batch:
        """Collective. Raises `UserError` on every rank for an invalid batch."""
        (model,) = self._model
        read = model.read_batch(batch)
        self._check_size(batch, read)
        _check_same_on_all_ranks(_tensors_of(batch), read.samples, self.device)
        return read

    def _check_size(self, batch: Mapping[str, Any], read: Batch) -> None:
        """Raises `UserError` for a batch that the plan cannot cut."""

    def _check_trains(self, batch: Batch) -> None:
        """Raises `UserError` for a batch from which nothing can be learned."""


class _GivenGradients(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> Tensor:
        """`anchor`: requires a gradient, as the parameters do."""
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[None, None, None]:
        for parameter, gradient in ctx.gradients:
            scaled = gradient * factor.to(gradient)
            parameter.grad = scaled if parameter.grad is None else parameter.grad.add_(scaled)
        return None, None, None


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


# The model: what is checked and shared before ranks take their parts of it -------------------------------------------


def check_ready(model: ModuleGraph) -> None:
    """Freezes parts in evaluation mode. Raises `UserError` if the model cannot be parallelized, or was before."""
    if not dist.is_initialized():
        raise UserError("there is no process group; call torch.distributed.init_process_group first")
    if model.is_taken_over:
        raise UserError(f"this {type(model).__name__} was parallelized before; build a new one")
    owner: dict[int, str] = {}
    for part, module in model.parts().items():
        for name, parameter in module.named_parameters():
            first = owner.setdefault(id(parameter), part)
            if first != part:
                raise UserError(
                    f"model: {first} and {part} have the parameter {name} in common, which ranks could not keep equal; "
                    "give each a copy of its own (copy.deepcopy)"
                )
    if model.training:
        model.freeze_eval_parts()


def _check_plan(model: ModuleGraph, plan: Plan) -> None:
    """Raises `UserError` if the plan is not one of this model, or of this many processes."""
    nodes = model.nodes
    planned = {module.data_module(name): module for name, module in plan.modules.items()}
    if nodes.keys() != planned.keys():
        raise UserError(f"plan: its modules are {', '.join(planned)}, but the model has {', '.join(nodes)}")
    for name, module in planned.items():
        if module.shares_over_replicas:
            raise UserError(
                f"plan: modules.{name}.sharded_replicas: a parallel module has whole parameters, or those of a "
                "context-parallel group; set it to 1, or train with motet train"
            )
        if module.num_layers != nodes[name].num_layers:
            raise UserError(
                f"plan: {name} has {module.num_layers} layers, but the model's has {nodes[name].num_layers}"
            )
    if plan.num_ranks != dist.get_world_size():
        raise UserError(f"plan: takes {plan.num_ranks} ranks, but {dist.get_world_size()} processes run; start as many")


def _without_weights(model: ModuleGraph) -> ModuleGraph:
    memo = _kept_callbacks(model)
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _kept_callbacks(model: ModuleGraph) -> dict[int, Any]:
    """Prevents `copy.deepcopy` from copying the objects that the user's callbacks are bound to."""
    return {id(callback): callback for node in model.nodes.values() for callback in node.callbacks}


@torch.no_grad()
def _share_weights(model: nn.Module, device: torch.device) -> None:
    """Gives all ranks rank 0's weights, if theirs differ (models with random weights, built under different seeds)."""
    tensors = [*model.parameters(), *model.buffers()]
    sums = torch.stack([tensor.sum(dtype=torch.float64).cpu() for tensor in tensors]).to(device)
    bounds = torch.cat([sums, -sums])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    differ = bounds[: len(tensors)] != -bounds[len(tensors) :]
    for tensor, differs in zip(tensors, differ.tolist(), strict=True):
        if differs:
            shared = tensor.to(device).contiguous()
            dist.broadcast(shared, src=0)
            tensor.copy_(shared)


# The plan: from the arguments of the faces ---------------------------------------------------------------------------


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


# Batches -------------------------------------------------------------------------------------------------------------

NUM_COMPARED = 65_536
"""Elements of a tensor that ranks compare."""


def _tensors_of(batch: Mapping[str, Any]) -> Iterator[Tensor]:
    for key in sorted(batch):
        if isinstance(batch[key], Mapping):
            yield from _tensors_of(batch[key])
        elif isinstance(batch[key], Tensor):
            yield batch[key]


def _check_same_on_all_ranks(tensors: Iterable[Tensor], samples: Iterable[Sample], device: torch.device) -> None:
    """Raises `UserError` on every rank if the ranks read different layouts or tensors (of large tensors, some elements
    are compared)."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().flatten()
        some = flat[:: max(1, flat.numel() // NUM_COMPARED)].cpu().contiguous()
        digest.update(some.view(torch.uint8).numpy().tobytes())
    digest.update(repr([sorted(sample.layouts.items()) for sample in samples]).encode())
    value = int.from_bytes(digest.digest()[:7])
    bounds = torch.tensor([value, -value], dtype=torch.int64, device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    if bounds[0].item() != -bounds[1].item():
        raise UserError("batch: the ranks were given different batches; give the same global batch to every rank")
