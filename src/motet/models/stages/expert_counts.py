"""Numbers of tokens that choose each expert of a mixture, for the update of its router's correction of scores."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from motet.assignment.sample import Sample
from motet.devices import to_device
from motet.errors import UserError
from motet.families.stored_weights import CORRECTION
from motet.parallel.experts import can_be_distributed, expert_inputs


class ExpertCounts:
    """The counts of one stage, over the tokens that this rank holds: an observer of its rows.

    Raises `UserError` for a model whose routers have no correction."""

    def __init__(self, model: nn.Module) -> None:
        """`model`: whole; layers may lose their weights, but not their modules' identity, after."""
        self.counts: dict[str, Tensor] = {}
        """By name of the correction in `model`: [experts], since somebody cleared it."""
        self._choices: list[tuple[str, Tensor]] | None = None
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
        if self._choices is not None:
            _, choices, _ = expert_inputs(experts, args, kwargs)
            self._choices.append((name, choices))

    @property
    def names(self) -> tuple[str, ...]:
        """The corrections of the whole model."""
        return tuple(self._num_experts)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the stage's forward: what runs again in a backward is not counted twice."""
        self._choices = []
        try:
            yield
        finally:
            self._recorded, self._choices = self._choices, None

    def add(self, samples: Sequence[Sample], sample_of_row: Tensor, place_of_row: Tensor, device: torch.device) -> None:
        """Counts what was recorded."""
        held = to_device(torch.nonzero(sample_of_row >= 0)[:, 0], device)
        for name, choices in self._recorded:
            chosen = choices.index_select(0, held).flatten()
            if name not in self.counts:
                self.counts[name] = torch.zeros(self._num_experts[name], dtype=torch.float64, device=device)
            self.counts[name].index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.float64))


def _around(name: str) -> Iterator[str]:
    """The paths of the modules that a tensor is in, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name
