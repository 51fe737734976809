"""The auxiliary loss of mixtures of experts, which keeps routers from preferring a few experts.

Of a sample with T tokens and a layer with E experts it is E * sum over experts of c / T * p / T, where c is the number
of tokens that choose the expert and p the sum of its probabilities (Fedus et al. 2022, "Switch Transformers", equations
4 to 6); the mean over the model's mixtures counts, and each sample by its number of loss tokens. It is defined for a
sample, not for a microbatch, so it is the same however a batch is cut, packed or shared by ranks.

Every stage has the part of its own layers, as a second root of its backward.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softmax

from motet.assignment.sample import Sample
from motet.devices import to_device
from motet.errors import UserError
from motet.parallel.tensor.tensor_collectives import TensorParallel, all_reduce


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


class RouterLoss:
    """The part of one stage. Raises `UserError` for a model that transformers gives no such loss."""

    def __init__(self, model: Any, weight: float) -> None:
        """`model`: whole; layers may lose their weights, but not their modules' identity, after."""
        routers = find_routers(model)
        if not routers or not hasattr(model.config, "router_aux_loss_coef"):
            raise UserError(
                f"router_aux_loss: transformers has no auxiliary loss for the routers of {type(model).__name__}; set "
                "it to 0"
            )
        self._weight = weight
        self._num_mixtures = len(routers)
        self._num_chosen = int(model.config.num_experts_per_tok)
        self._logits: list[Tensor] | None = None
        for router, place in routers:
            router.register_forward_hook(lambda module, args, output, place=place: self._keep(output[place]))

    def _keep(self, logits: Tensor) -> None:
        if self._logits is not None:
            self._logits.append(logits)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the stage's forward: what runs again in a backward is not counted twice."""
        self._logits = []
        try:
            yield
        finally:
            self._recorded, self._logits = self._logits, None

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
        if not self._recorded:
            return total
        (held,) = torch.nonzero(sample_of_row >= 0, as_tuple=True)
        lengths = to_device(torch.bincount(sample_of_row[held], minlength=len(samples)), device)
        owner, held = to_device(sample_of_row[held], device), to_device(held, device)
        counts, sums = [], []
        for logits in self._recorded:
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
