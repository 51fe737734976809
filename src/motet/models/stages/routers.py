"""The auxiliary loss of mixtures of experts, and counts of their experts' tokens, from the routers of a stage.

The auxiliary loss keeps routers from preferring a few experts. Of a sample with T tokens and a layer with E experts it
is E * sum over experts of c / T * p / T, where c is the number of tokens that choose the expert and p the sum of its
probabilities (Fedus et al. 2022, "Switch Transformers", equations 4 to 6); the mean over the model's mixtures counts,
and each sample by its number of loss tokens. It is defined for a sample, not for a microbatch, so it is the same
however a batch is cut, packed or shared by ranks. Every stage has the part of its own layers, as a second root of its
backward.

The numbers of tokens that choose each expert serve the update of the corrections of routers' scores
(`motet.runtime.router_corrections`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softmax

from motet.assignment.sample import Sample
from motet.devices import to_device
from motet.errors import UserError
from motet.families.stored_weights import CORRECTION
from motet.parallel.experts import can_be_distributed, expert_inputs
from motet.parallel.tensor.tensor_collectives import TensorParallel, all_reduce

T = TypeVar("T")


class ForwardRecord(Generic[T]):
    """Records what hooks find in a stage's forwards, but not in what a backward runs again."""

    def __init__(self) -> None:
        self._open: list[T] | None = None
        self.recorded: list[T] = []
        """From the last forward."""

    def record(self, found: T) -> None:
        if self._open is not None:
            self._open.append(found)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around each forward."""
        self._open = []
        try:
            yield
        finally:
            self.recorded, self._open = self._open, None


def find_routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The routers of a model, by what transformers itself records of it: module, and the place of its logits among its
    outputs."""
    recorders = [
        recorder
        for part in model.modules()
        if (recorder := (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")) is not None
    ]
    if not recorders:
        return []
    return [(part, recorders[0].index) for part in model.modules() if type(part) is recorders[0].target_class]


class RouterLoss(ForwardRecord[Tensor]):
    """The part of the auxiliary loss of one stage, which records the routers' logits.

    Raises `UserError` for a model for which transformers has no such loss."""

    def __init__(self, model: Any, weight: float) -> None:
        """`model`: whole; layers may lose their weights, but not their modules' identity, after."""
        super().__init__()
        routers = find_routers(model)
        if not routers or not hasattr(model.config, "router_aux_loss_coef"):
            raise UserError(
                f"router_aux_loss: transformers has no auxiliary loss for the routers of {type(model).__name__}; set "
                "it to 0"
            )
        self._weight = weight
        self._num_mixtures = len(routers)
        self._num_chosen = int(model.config.num_experts_per_tok)
        for router, place in routers:
            router.register_forward_hook(lambda module, args, output, place=place: self.record(output[place]))

    def loss(
        self,
        sample_of_row: Tensor,
        samples: Sequence[Sample],
        name: str,
        group: TensorParallel | None,
        device: torch.device,
    ) -> Tensor:
        """Returns the loss of what was recorded: the sum over samples, each times its loss tokens; this rank's summand
        where `group` shares the tokens.

        Args:
            sample_of_row: on the host, of each row of the routers' logits; -1 where no token stands, or another rank's.
            name: the module, in the samples' numbers of loss tokens.
        """
        total = torch.zeros((), device=device)
        if not self.recorded:
            return total
        (held,) = torch.nonzero(sample_of_row >= 0, as_tuple=True)
        lengths = to_device(torch.bincount(sample_of_row[held], minlength=len(samples)), device)
        owner, held = to_device(sample_of_row[held], device), to_device(held, device)
        counts, sums = [], []
        for logits in self.recorded:
            chances = softmax(logits.flatten(0, -2).index_select(0, held).float(), dim=-1)
            chosen = torch.zeros_like(chances).scatter_(1, chances.topk(self._num_chosen, dim=-1).indices, 1.0)
            zeros = chances.new_zeros(len(samples), chances.shape[-1])
            counts.append(zeros.index_add(0, owner, chosen.detach()))
            sums.append(zeros.index_add(0, owner, chances))
        chosen, probabilities = torch.stack(counts), torch.stack(sums)  # [layers, samples, experts]
        if group is not None:
            lengths, chosen = all_reduce(lengths, group), all_reduce(chosen, group)
        tokens = lengths.clamp(min=1).to(chosen.dtype)
        of_sample = (chosen * probabilities).sum(dim=(0, 2)) / tokens.square() * chosen.shape[-1] / self._num_mixtures
        weights = [sample.num_loss_tokens.get(name, 0) * self._weight for sample in samples]
        return total + (of_sample * to_device(torch.tensor(weights, dtype=of_sample.dtype), of_sample.device)).sum()


class ExpertCounts(ForwardRecord[tuple[str, Tensor]]):
    """Numbers of tokens that choose each expert of a stage, of those that this rank holds. It observes the stage's rows
    (`motet.models.stages.causal.RowObserver`).

    Raises `UserError` for a model whose routers have no correction."""

    def __init__(self, model: nn.Module) -> None:
        """`model`: whole; layers may lose their weights, but not their modules' identity, after."""
        super().__init__()
        self.counts: dict[str, Tensor] = {}
        """By name of the correction in `model`: [experts], since somebody cleared it."""
        experts = {
            path.rpartition(".")[0]: module for path, module in model.named_modules() if can_be_distributed(module)
        }
        num_experts = {}
        for name, buffer in model.named_buffers():
            if name.rpartition(".")[2] == CORRECTION:
                mixture = next((path for path in _around(name) if path in experts), None)
                if mixture is not None:
                    num_experts[name] = len(buffer)
                    experts[mixture].register_forward_pre_hook(partial(self._keep, name), with_kwargs=True)
        if not num_experts:
            raise UserError(
                f"model.language_model.router_bias_update_rate: the routers of {type(model).__name__} have no buffer "
                f"{CORRECTION}; set it to 0"
            )
        self._num_experts = num_experts

    def _keep(self, name: str, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, choices, _ = expert_inputs(experts, args, kwargs)
        self.record((name, choices))

    @property
    def names(self) -> tuple[str, ...]:
        """The corrections of the whole model."""
        return tuple(self._num_experts)

    def add(self, samples: Sequence[Sample], sample_of_row: Tensor, place_of_row: Tensor, device: torch.device) -> None:
        """Counts what was recorded (see `RowObserver`)."""
        held = to_device(torch.nonzero(sample_of_row >= 0)[:, 0], device)
        for name, choices in self.recorded:
            chosen = choices.index_select(0, held).flatten()
            if name not in self.counts:
                self.counts[name] = torch.zeros(self._num_experts[name], dtype=torch.float64, device=device)
            self.counts[name].index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.float64))


def _around(name: str) -> Iterator[str]:
    """The paths of the modules that a tensor is in, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name
