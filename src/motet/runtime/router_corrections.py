"""The update of the corrections of routers' scores, which balances the load of a mixture's experts without a loss.

After each step the correction of an expert rises by the rate where fewer tokens of the global batch chose it than the
mean, and falls by it where more did (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2). Counts are sums
over all ranks, so every rank that holds a router updates it alike.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from motet.models.stages.language_model import LanguageModelStage
from motet.runtime.communication.agreement import gather_values
from motet.runtime.executor import Executor
from motet.runtime.local_model import LocalModel, LocalParameter


class RouterCorrections:
    """The corrections of this rank's routers. Collective: every rank makes one, whatever it holds."""

    def __init__(self, model: LocalModel, rate: float) -> None:
        self._model, self._rate = model, rate
        self._counted = {
            key: stage.expert_counts
            for key, stage in model.stages.items()
            if isinstance(stage, LanguageModelStage) and stage.expert_counts is not None
        }
        self.held: Mapping[str, LocalParameter] = {
            p.name: p for p in model.parameters if p.stage in self._counted and p.name in self._names_of(p.stage)
        }
        """The corrections that this rank holds, by name."""
        mine = [(name, len(p.parameter)) for name, p in self.held.items()]
        everyone = gather_values(list[tuple[str, int]], mine) if rate else []
        self._sizes = dict(sorted({pair for pairs in everyone for pair in pairs}))
        self._counts: dict[str, Tensor] = {}
        """Of the last iteration, over all ranks."""

    def _names_of(self, key: tuple[str, int, int]) -> set[str]:
        owner = self._model.plan.modules[key[0]].data_module(key[0])
        stage = self._model.stages[key]
        return {f"{owner}.{stage.canonical_name(f'module.{name}')}" for name in self._counted[key].names}

    def begin(self) -> None:
        """Before an iteration."""
        for counted in self._counted.values():
            counted.counts.clear()

    def sum_counts(self, executor: Executor, device: torch.device) -> None:
        """After an iteration. Collective."""
        if not self._sizes:
            return
        totals = torch.zeros(sum(self._sizes.values()), dtype=torch.float64, device=device)
        self._counts = dict(zip(self._sizes, totals.split(list(self._sizes.values())), strict=True))
        for key, counted in self._counted.items():
            if self._model.tensor_parallel[key].rank:
                continue  # The first of its group has the same tokens.
            owner = self._model.plan.modules[key[0]].data_module(key[0])
            for name, counts in counted.counts.items():
                self._counts[f"{owner}.{self._model.stages[key].canonical_name(f'module.{name}')}"] += counts
        executor.sum_over_ranks(totals, "of tokens of experts")

    @torch.no_grad()
    def update(self, is_finite: Tensor | None = None) -> None:
        """After the optimizer's step. `is_finite`: on the device; where it is false nothing changes."""
        for name, p in self.held.items():
            correction = p.parameter.detach()
            counts = self._counts[name]
            change = self._rate * torch.sign(counts.mean() - counts)
            if is_finite is not None:
                change = change * is_finite
            correction.add_(change.to(correction))
