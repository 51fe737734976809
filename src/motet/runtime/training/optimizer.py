"""AdamW over this rank's parameters, its state optionally sharded over the holders (ZeRO-1), and its learning rate.

Parameters in bfloat16 have float32 masters (`motet.runtime.training.master_weights`). Sharding is torch's
`ZeroRedundancyOptimizer` (Rajbhandari et al. 2020, "ZeRO", section 5.1), one for each reduction: every holder updates
whole parameters of its own and sends them to the others. Where nodes may fail, several holders do (`keep_alone`,
`motet.resilience.state_transfer`). A moving average of a parameter is one more of its states. Vectors (norms, biases)
are not decayed. A parameter without gradient, which no sample of a batch reached, stays as it is, as do its moments.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from motet.parallel.main_gradients import HALF_DTYPES
from motet.runtime.local_model import LocalParameter
from motet.runtime.training.master_weights import MASTER, MOMENTS, MasterAdamW, new_state
from motet.schedule.action import Reduce

AVERAGE = "average"
"""Name of the moving average of a parameter (of its master) among its states."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    learning_rate: float
    """Peak, for parts that are not named in `part_learning_rates`."""
    part_learning_rates: Mapping[str, float]
    """Peak learning rates by part, such as `vision.module`, `vision.projector`, `language_model.module`."""
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    zero1: bool
    """Whether the holders of a parameter share its state: each updates a part of it."""
    averages: Mapping[str, float] = field(default_factory=dict)
    """Decay of the moving average of the parameters, by part."""
    is_exact: bool = False
    """Whether a shard is updated bit by bit as the whole parameter would be, which replicas of different
    tensor-parallel sizes need. (On CPUs torch's fused AdamW rounds the rest of a tensor after its last full vector
    differently.)"""


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule:
    """The factor on every learning rate: up to 1 in a straight line, then down to `min_ratio` at the last step."""

    warmup_steps: int
    total_steps: int
    shape: Literal["constant", "linear", "cosine"]
    min_ratio: float

    def factor(self, finished_steps: int) -> float:
        """Factor in the step after so many finished ones."""
        if finished_steps < self.warmup_steps:
            return (finished_steps + 1) / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        num_falling = max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (finished_steps - self.warmup_steps) / num_falling)
        remaining = 1.0 - progress if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_ratio + (1.0 - self.min_ratio) * remaining


class Optimizer:
    """AdamW, or under ZeRO-1 one sharded AdamW for each reduction, stepped together.

    Collective under torch's ZeRO-1: every rank makes one and steps it."""

    def __init__(
        self, parameters: Sequence[LocalParameter], config: OptimizerConfig, schedule: LearningRateSchedule
    ) -> None:
        self._config, self._schedule = config, schedule
        self._trainable: dict[str, LocalParameter] = {}
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        """A parameter that is updated, and another copy of it on this rank."""
        for p in parameters:
            if p.parameter.requires_grad and p.is_kept:
                first = self._trainable.setdefault(p.name, p).parameter
                if first is not p.parameter:
                    self._copies.append((first, p.parameter))
        self._optimizers = [
            _adamw(members, group, config) for group, members in _grouped(self._trainable.values(), config.zero1)
        ]
        self._has_states = False
        self._decays: dict[Tensor, float] = {
            p.parameter: config.averages[p.part] for p in self._trainable.values() if p.part in config.averages
        }
        self._kept: frozenset[Tensor] | None = None
        """After `keep_alone`: what this rank updates."""
        self._written: Collection[str] = ()
        self._exchange: Callable[[], None] | None = None
        self._is_current = True
        """Whether the parameters that others update have their new values."""

    def keep_alone(self, names: Collection[str], *, written: Collection[str], exchange: Callable[[], None]) -> None:
        """Makes this rank keep the states of these parameters only, and update no others, from the first step on.

        Args:
            written: those of `names` whose states this rank writes into checkpoints, after its tensor-parallel group
                has gathered them.
            exchange: collective; receives the new values of all other parameters from the ranks that update them."""
        assert not self.states(), "states that are there would be lost"
        members = [p for name, p in self._trainable.items() if name in names]
        self._optimizers = [_adamw(members, None, self._config)] if members else []
        self._kept = frozenset(p.parameter for p in members)
        self._written, self._exchange = written, exchange

    def factor(self, finished_steps: int) -> float:
        """The factor on every learning rate in the step after so many finished ones."""
        return self._schedule.factor(finished_steps)

    @torch.no_grad()
    def step(self, finished_steps: int, is_finite: Tensor | None = None) -> None:
        """Updates the parameters; after `keep_alone` only those that this rank keeps, and it needs no other rank.

        `is_finite`: a tensor on their device; where it is false nothing changes, and the host need not know."""
        self._is_current = self._exchange is None
        factor = self.factor(finished_steps)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_learning_rate"] * factor
            if is_finite is not None:
                assert not self._config.is_exact, "torch's foreach implementation always steps"
                # torch's own way to leave out a step, which its gradient scaler uses.
                inner: Any = _inner(optimizer)
                flag = torch.zeros((), dtype=torch.float32, device=is_finite.device)
                inner.grad_scale, inner.found_inf = None, flag.masked_fill(~is_finite, 1.0)
            self._begin_averages(optimizer)
            optimizer.step()
            # Parameters that no batch has reached yet: checkpoints and other ranks expect a state of all.
            _initialize_missing(optimizer)
        self._has_states = True
        self._renew_averages(finished_steps, is_finite)
        self.renew_copies()

    def _begin_averages(self, optimizer: torch.optim.Optimizer) -> None:
        """Averages begin with the parameters before the first step."""
        if not self._decays:
            return
        _initialize_missing(optimizer)
        for parameter, state in _inner(optimizer).state.items():
            if parameter in self._decays and AVERAGE not in state:
                state[AVERAGE] = state.get(MASTER, parameter).detach().clone()

    def _renew_averages(self, finished_steps: int, is_finite: Tensor | None) -> None:
        for parameter, state in self.states().items() if self._decays else ():
            if AVERAGE in state:
                weight = 1 - min(self._decays[parameter], (1 + finished_steps) / (10 + finished_steps))
                target = state.get(MASTER, parameter).detach()
                if is_finite is None:
                    state[AVERAGE].lerp_(target, weight)
                else:
                    state[AVERAGE].lerp_(target, is_finite.to(target.dtype) * weight)

    def exchange(self) -> None:
        """After a step under `keep_alone`: receives the parameters that other ranks have updated. Collective."""
        if self._exchange is not None:
            self._exchange()
            self.renew_copies()
            self._is_current = True

    @torch.no_grad()
    def renew_copies(self) -> None:
        """Copies updated parameters to this rank's other copies of them."""
        for updated, copy in self._copies:
            copy.copy_(updated)

    def states(self) -> dict[Tensor, dict[str, Tensor]]:
        """The state tensors that this rank holds, by parameter; under ZeRO-1 only those of its own share."""
        return {
            parameter: state for optimizer in self._optimizers for parameter, state in _inner(optimizer).state.items()
        }

    def num_states(self, p: LocalParameter) -> int:
        """Number of tensors of the parameter's size that are kept for it, here or by another holder."""
        if not p.parameter.requires_grad:
            return 0
        return len(MOMENTS) + (p.part in self._config.averages)

    def keeps(self, parameter: nn.Parameter) -> bool:
        """Whether this rank updates it. Not for torch's ZeRO-1."""
        return self._kept is None or parameter in self._kept

    def is_current(self, parameter: nn.Parameter) -> bool:
        """Whether its values here are those after the last step."""
        return self._is_current or self.keeps(parameter)

    def writes_state(self, p: LocalParameter) -> bool:
        """Whether this rank writes the parameter's state into checkpoints: one rank does."""
        if self._kept is not None:
            return p.name in self._written
        return p.is_written or (p.tp.rank == 0 and self._is_sharded(p.parameter))

    def _is_sharded(self, parameter: nn.Parameter) -> bool:
        """Whether this rank, and no other holder of the parameter, has its state."""
        return any(
            isinstance(optimizer, ZeroRedundancyOptimizer) and parameter in optimizer.optim.state
            for optimizer in self._optimizers
        )

    @property
    def keeps_masters(self) -> bool:
        """Whether float32 masters of bfloat16 parameters exist, on this rank or others that update them. All ranks
        answer alike."""
        return self._has_states and any(p.parameter.dtype in HALF_DTYPES for p in self._trainable.values())

    def initialize_states(self) -> None:
        """Gives every parameter of this rank's share a state of zeros, for a checkpoint to be loaded into."""
        for optimizer in self._optimizers:
            _inner(optimizer).state.clear()
            _initialize_missing(optimizer)
            self._begin_averages(optimizer)
        self._has_states = True


def _grouped(
    parameters: Iterable[LocalParameter], zero1: bool
) -> list[tuple[dist.ProcessGroup | None, list[LocalParameter]]]:
    """The parameters that one optimizer updates, with the group that shares its state.

    In an order that all ranks agree on: the optimizers' steps are collective, and their groups overlap."""
    alone: list[LocalParameter] = []
    shared: dict[tuple[Reduce, bool], list[LocalParameter]] = {}
    for p in parameters:
        if zero1 and p.reduce_group is not None:
            assert p.reduce is not None
            shared.setdefault((p.reduce, p.is_shared_expert), []).append(p)
        else:
            alone.append(p)
    groups = [(members[0].reduce_group, members) for _, members in sorted(shared.items())]
    return [*groups, (None, alone)] if alone else groups


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def _initialize_missing(optimizer: torch.optim.Optimizer) -> None:
    """Gives a state of zeros to parameters that have none."""
    inner = _inner(optimizer)
    for group in inner.param_groups:
        for parameter in group["params"]:
            if parameter not in inner.state:
                inner.state[parameter] = new_state(parameter)


def _adamw(
    members: Sequence[LocalParameter], group: dist.ProcessGroup | None, config: OptimizerConfig
) -> torch.optim.Optimizer:
    by_options: dict[tuple[float, float], list[nn.Parameter]] = {}
    for member in members:
        learning_rate = config.part_learning_rates.get(member.part, config.learning_rate)
        decay = config.weight_decay if member.parameter.dim() > 1 else 0.0
        by_options.setdefault((learning_rate, decay), []).append(member.parameter)
    param_groups = [
        {"params": params, "lr": rate, "peak_learning_rate": rate, "weight_decay": decay}
        for (rate, decay), params in by_options.items()
    ]
    # One call for each group, or one for each operation, instead of a dozen small ones per parameter.
    implementation = "foreach" if config.is_exact else "fused"
    options: dict[str, object] = {"betas": config.betas, "eps": config.eps, implementation: True}
    is_half = any(member.parameter.dtype in HALF_DTYPES for member in members)
    optimizer_class = MasterAdamW if is_half else torch.optim.AdamW
    if group is None:
        return optimizer_class(param_groups, **options)  # type: ignore[arg-type]
    make: Callable[..., torch.optim.Optimizer] = ZeroRedundancyOptimizer
    return make(
        param_groups,
        optimizer_class=optimizer_class,
        process_group=group,
        parameters_as_bucket_view=True,
        lr=config.learning_rate,
        **options,
    )
