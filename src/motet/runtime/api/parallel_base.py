"""What parallel modules have in common: a training loop of the user's own calls them with global batches."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.utils import ModelOutput

from motet.errors import UserError
from motet.models.dict_batch import DictBatch
from motet.plan import Plan
from motet.runtime.engine import Engine


class ParallelModule(nn.Module, ABC):
    """This rank's part of a model."""

    plan: Plan
    _engine: Engine

    @abstractmethod
    def _read(self, batch: Mapping[str, Any]) -> DictBatch:
        """Collective. Raises `UserError` on every rank for a batch that is not as it must be."""

    def _check_trains(self, batch: DictBatch) -> None:
        """Raises `UserError` for a batch from which nothing can be learned."""

    def execute(self, batch: Mapping[str, Any]) -> ModelOutput:
        """Forward and backward of one global batch. Collective: every rank passes the same batch.

        Args:
            batch: what HuggingFace processors return (`motet.models.dict_batch`, with `labels`; for towers
                `motet.models.tower_batch`).

        Afterwards the gradients of this rank's parameters have been added to their `.grad`, summed over replicas; after
        an error they are what they were. Returns a `ModelOutput` with `loss`, a scalar tensor that is the same on every
        rank: the mean over all tokens of the global batch that have a label, or over what a contrastive loss compares.
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

        Returns the norm before."""
        return self._engine.clip_gradients(max_norm)


def check_no_sharing(parts: Mapping[str, nn.Module]) -> None:
    """Raises `UserError` if two parts of a model have a parameter in common: their ranks would each train a copy."""
    owner: dict[int, str] = {}
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            first = owner.setdefault(id(parameter), part)
            if first != part:
                raise UserError(
                    f"model: {first} and {part} have the parameter {name} in common, which ranks could not keep alike; "
                    "give each a copy of its own (copy.deepcopy)"
                )


@torch.no_grad()
def share_weights(model: nn.Module, device: torch.device) -> None:
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


def default_device() -> torch.device:
    if torch.cuda.is_available() and dist.get_backend() != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


NUM_COMPARED = 65_536
"""Elements of a tensor that ranks compare."""


def check_same_on_all_ranks(tensors: Iterable[Tensor], batch: DictBatch, device: torch.device) -> None:
    """Raises `UserError` on every rank if the ranks read different tensors (of large ones, samples are compared) or
    layouts."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().flatten()
        some = flat[:: max(1, flat.numel() // NUM_COMPARED)].cpu().contiguous()
        digest.update(some.view(torch.uint8).numpy().tobytes())
    digest.update(repr([sorted(sample.layouts.items()) for sample in batch.samples]).encode())
    value = int.from_bytes(digest.digest()[:7])
    bounds = torch.tensor([value, -value], dtype=torch.int64, device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    if bounds[0].item() != -bounds[1].item():
        raise UserError("batch: the ranks were given different batches; give the same global batch to every rank")
