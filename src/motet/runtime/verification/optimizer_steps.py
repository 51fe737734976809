"""Compares the weights after some steps of the optimizer with those of a plain loop in one process.

The plain loop is what a user of transformers would write: the loss of the whole batch, `clip_grad_norm_`, torch's AdamW
and a scheduler's factor. Unlike a comparison of gradients it shows what the optimizer makes of them: parameters that no
sample reached stay as they are, clipping uses the norm of the whole model, states are those of whole parameters.

The error of a parameter is |w - ref| over the distance that it has moved, and at least over that of its module's RMS
element: AdamW moves parameters whose gradients are rounding alone by rounding. In float64 only: in lower precision,
AdamW's first steps turn the sign of a small gradient into a whole step.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motet.config import RunConfig
from motet.families.stored_weights import CORRECTION
from motet.models.graph import ModuleNode
from motet.models.reference import reference_loss
from motet.models.stages.stage import Batch
from motet.runtime.assembly import build_optimizer, part_learning_rates, router_bias_update_rate
from motet.runtime.engine import Engine
from motet.runtime.next_batch import NextBatch
from motet.runtime.training.optimizer import Optimizer
from motet.runtime.verification.verify import BuildReference, HeldBatch, collect_weights, load_weights

TOLERANCE = 1e-9


@dataclass(frozen=True)
class StepsComparison:
    """Weights after some steps of the optimizer."""

    steps: int
    losses_reference: list[float]
    losses_distributed: list[float]
    max_weight_rel_err: float
    worst_weight: str
    num_weights_compared: int

    @property
    def failures(self) -> list[str]:
        if not self.num_weights_compared:
            return ["no weight was compared: nothing is trainable"]
        if self.max_weight_rel_err <= TOLERANCE:
            return []
        return [
            f"{self.worst_weight} has a relative error of {self.max_weight_rel_err:.2e} after {self.steps} steps of "
            f"the optimizer, the tolerance is {TOLERANCE:.0e}"
        ]


def compare_steps(
    engine: Engine, config: RunConfig, batches: Sequence[Batch], build_reference: BuildReference
) -> StepsComparison | None:
    """One step of the optimizer for each batch. Collective; returns the comparison on rank 0, else None. Should be
    within `float64_throughout`."""
    before = collect_weights(engine.model)
    optimizer = build_optimizer(config, engine.model)
    losses = []
    for number, batch in enumerate(batches):
        following = NextBatch(batches[number + 1], (0, number + 1)) if number + 1 < len(batches) else None
        losses.append(_step(engine, optimizer, config, batch, number, following))
    after = collect_weights(engine.model)
    if before is None or after is None:
        return None
    nodes = build_reference()
    modules: dict[str, nn.Module] = {name: nn.ModuleDict(node.parts) for name, node in nodes.items()}
    load_weights(modules, {name: versions[0] for name, versions in before.items()})
    plain_losses = _plain_loop(nodes, modules, config, batches, optimizer.factor)
    trained = {
        f"{module}.{name}": parameter.detach()
        for module, part in modules.items()
        for name, parameter in part.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and f"{module}.{name}" in before
    }
    if router_bias_update_rate(config):
        trained |= {
            f"{module}.{name}": buffer
            for module, part in modules.items()
            for name, buffer in part.named_buffers()
            if f"{module}.{name}" in before and name.endswith(CORRECTION)
        }
    errors = _errors(before, after, trained)
    worst = max(errors, key=errors.__getitem__, default="")
    return StepsComparison(len(batches), plain_losses, losses, errors[worst] if worst else math.inf, worst, len(errors))


def _step(
    engine: Engine,
    optimizer: Optimizer,
    config: RunConfig,
    batch: Batch,
    finished_steps: int,
    following: NextBatch | None,
) -> float:
    engine.model.zero_gradients()
    result = engine.run(batch, seed=(0, finished_steps), following=following)
    if config.train.clip_grad_norm:
        engine.model.clip_gradients(result.gradient_norm, config.train.clip_grad_norm)
    optimizer.step(finished_steps)
    engine.router_corrections.update()
    optimizer.exchange()
    engine.model.after_update()
    return result.loss


def _plain_loop(
    nodes: Mapping[str, ModuleNode],
    modules: Mapping[str, nn.Module],
    config: RunConfig,
    batches: Sequence[Batch],
    factor: Callable[[int], float],
) -> list[float]:
    train, rates, rate = config.train, part_learning_rates(config), router_bias_update_rate(config)
    groups, trained = [], []
    for name, module in modules.items():
        for key, parameter in module.named_parameters():
            if parameter.requires_grad:
                peak = rates.get(f"{name}.{'projector' if key.startswith('projector.') else 'module'}")
                decay = train.weight_decay if parameter.dim() > 1 else 0.0
                groups.append({"params": [parameter], "peak": peak or train.learning_rate, "weight_decay": decay})
                trained.append(parameter)
    optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, betas=train.betas, eps=train.eps)
    losses = []
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        with _choices_of_routers(modules) as choices:
            loss = reference_loss(nodes, HeldBatch(batch, modules), draw_key=(0, number))
        loss.backward()
        if train.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(trained, train.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor(number)
        optimizer.step()
        for router, chosen in choices.items() if rate else ():
            correction = getattr(router, CORRECTION)
            counts = torch.bincount(torch.cat(chosen).flatten(), minlength=len(correction))
            correction += rate * torch.sign(counts.sum() - len(correction) * counts).to(correction)
        losses.append(loss.item())
    return losses


@contextmanager
def _choices_of_routers(modules: Mapping[str, nn.Module]) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """Records the experts that each router with a correction chooses: the integers among its outputs."""
    choices: dict[nn.Module, list[Tensor]] = {}

    def record(router: nn.Module, args: Any, outputs: Sequence[Tensor]) -> None:
        choices.setdefault(router, []).extend(output for output in outputs if not output.is_floating_point())

    routers = [part for module in modules.values() for part in module.modules() if hasattr(part, CORRECTION)]
    hooks = [router.register_forward_hook(record) for router in routers]
    try:
        yield choices
    finally:
        for hook in hooks:
            hook.remove()


def _errors(
    before: Mapping[str, Sequence[Tensor]], after: Mapping[str, Sequence[Tensor]], plain: Mapping[str, Tensor]
) -> dict[str, float]:
    moved = {name: torch.linalg.vector_norm(plain[name].cpu() - before[name][0]).item() for name in plain}
    squares: dict[str, float] = {}
    elements: dict[str, int] = {}
    for name, distance in moved.items():
        module = name.partition(".")[0]
        squares[module] = squares.get(module, 0.0) + distance**2
        elements[module] = elements.get(module, 0) + plain[name].numel()
    errors = {}
    for name, weight in plain.items():
        module = name.partition(".")[0]
        typical = math.sqrt(squares[module] / elements[module] * weight.numel())
        difference = max(torch.linalg.vector_norm(version - weight.cpu()).item() for version in after[name])
        scale = max(moved[name], typical)
        # A module that no batch has reached has not moved at all.
        errors[name] = difference / scale if scale else (0.0 if difference == 0 else math.inf)
    return errors
