"""Counts what a rank holds during an iteration by kind, from the tensors themselves: parameters, gradients, optimizer
states, and everything that autograd keeps for a backward, as it comes and goes."""

import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from motet.config import RunConfig
from motet.plan import Plan
from motet.runtime.assembly import build_engine, build_optimizer


class _Kept:
    """What autograd holds in the place of a tensor."""

    def __init__(self, ledger: "SavedStorages", tensor: Tensor) -> None:
        self.ledger, self.tensor = ledger, tensor
        ledger.add(tensor)

    def __del__(self) -> None:
        self.ledger.remove(self.tensor)


class SavedStorages:
    """Storages that autograd keeps, each counted once however many tensors of it are kept."""

    def __init__(self, not_counted: Iterable[Tensor]) -> None:
        self._not_counted = {tensor.untyped_storage()._cdata for tensor in not_counted}
        self._holders: Counter[int] = Counter()
        self.held = self.peak = 0

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._not_counted:
            self._holders[storage._cdata] += 1
            if self._holders[storage._cdata] == 1:
                self.held += storage.nbytes()
                self.peak = max(self.peak, self.held)

    def remove(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._not_counted:
            self._holders[storage._cdata] -= 1
            if not self._holders[storage._cdata]:
                self.held -= storage.nbytes()

    def watching(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Kept(self, tensor), lambda kept: kept.tensor)


def bytes_by_kind(config: RunConfig, plan: Plan, batch: Any) -> dict[str, int]:
    """Of this rank, in the second iteration of a training: `weights`, `gradients`, `moments`, and `activations`, the
    most that autograd keeps at once. Collective."""
    engine = build_engine(config, plan, torch.device("cpu"))
    optimizer = build_optimizer(config, engine.model)
    engine.model.zero_gradients()
    engine.run(batch)
    optimizer.step(0)
    engine.model.zero_gradients()
    weights = [parameter for stage in engine.model.modules() for parameter in stage.parameters()]
    saved = SavedStorages(weights)
    gc.collect()
    with saved.watching():
        engine.run(batch)
    parameters = [each.parameter for each in engine.model.parameters]
    states = [t for state in optimizer.states().values() for key, t in state.items() if key != "step"]
    return {
        "weights": _num_bytes([*weights, *parameters]),
        "gradients": _num_bytes(p.grad for p in parameters if p.grad is not None),
        "moments": _num_bytes(states),
        "activations": saved.peak,
    }


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
