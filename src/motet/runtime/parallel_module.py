"""A model on many devices, trained by a loop and an optimizer of the user's own.

`ParallelModule` is this rank's part of any `ModuleGraph` under any plan. `motet.runtime.parallel_specs` derives plans
from the layouts of modules.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from motet.assignment.sample import Sample
from motet.devices import communication_device
from motet.errors import UserError, one_line
from motet.models.graph import ModuleGraph
from motet.models.hub.export import check_export, describe_module, export_module, graph_tensors
from motet.models.multimodal import MultimodalModule
from motet.models.stages.stage import Batch, StageModule
from motet.parallel.tensor.tensor_parallel import TensorParallel
from motet.plan import ModulePlan, Plan, Stage
from motet.recomputation import of_module
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

        Raises `UserError` on every rank, before weights are gathered, if transformers would not load all of them again.
        """
        (described,) = self._without_weights
        if isinstance(described, MultimodalModule):
            check_export(describe_module(described))
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
