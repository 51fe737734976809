"""DistTrain's parallelism units: what the search for an orchestration is given, and what it finds (DistTrain 5.1)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from motet.errors import UserError
from motet.planner.partition import bottlenecks

Role = Literal["encoder", "language_model", "generator"]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One module: costs of the whole of it, and the degrees that it may have."""

    role: Role
    layer_costs: tuple[float, ...]
    """Of each layer, in any measure: it says how evenly stages can be cut."""
    seconds: Mapping[int, float]
    """C(tp), by the tensor-parallel sizes that are allowed: forward and backward of one sample, as frozen as it is."""
    microbatch_s: Mapping[int, float] = field(default_factory=dict)
    """What each microbatch takes beside, by tensor-parallel size; none where there is no entry."""
    items_per_sample: int = 1
    """A microbatch is cut between items (images, clips); C is that of a sample with so many."""
    state_bytes: float = 0.0
    """Parameters and gradients."""
    optimizer_bytes: float = 0.0
    activation_bytes: Mapping[int, float] = field(default_factory=dict)
    """Of one sample on each rank of a tensor-parallel group, by its size; none where there is no entry. Not all of it
    is divided by the group."""
    boundary_s: float = 0.0
    """One sample's message to the next stage, and its gradient's way back."""
    reduce_s: float = 0.0
    """All gradients' bytes over the bandwidth of one device."""
    dp_sizes: tuple[int, ...] | None = None
    """None: whatever divides the items of the global batch."""
    max_stages: int | None = None
    """Virtual ones too."""
    equal_stages: bool = False
    """Stages, virtual ones too, hold equally many layers, as Megatron-LM demands."""
    max_devices: int | None = None
    vpp_sizes: tuple[int, ...] = (1,)
    """Stages of the module that a rank may hold (interleaved 1F1B)."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_costs)

    @cached_property
    def slowest_shares(self) -> np.ndarray:
        """[pp - 1]: the share of the slowest of so many stages in the module's time; infinite if there cannot be."""
        limit = min(self.num_layers, self.max_stages or self.num_layers)
        # A module that no sample of the batch has costs nothing: then a layer is as good as another.
        layer_costs = self.layer_costs if any(self.layer_costs) else (1.0,) * self.num_layers
        if not self.equal_stages:
            return bottlenecks(layer_costs, limit) / sum(layer_costs)
        costs = np.array(layer_costs)
        slowest = [
            costs.reshape(pp, -1).sum(axis=1).max() if self.num_layers % pp == 0 else inf for pp in range(1, limit + 1)
        ]
        return np.array(slowest) / costs.sum()


class UnitDegrees(NamedTuple):
    tp: int
    pp: int
    dp: int
    vpp: int = 1

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, kw_only=True)
class OrchestrationProblem:
    units: Mapping[str, Unit]
    """Exactly one is the language model."""
    num_devices: int
    global_batch_size: int
    microbatch_size: int = 1
    """Samples in the language model's microbatch."""
    num_microbatches: int | None = None
    """Per replica, for all modules; None: what `microbatch_size` leaves of the global batch."""
    device_bytes: float = inf
    zero1: bool = True
    """Optimizer state is sharded over the module's replicas."""
    state_copies: int = 1
    """With `zero1`: of each, so many replicas keep it."""

    def __post_init__(self) -> None:
        if [unit.role for unit in self.units.values()].count("language_model") != 1:
            raise UserError("parallel.planner: disttrain needs exactly one language model")

    @property
    def language_model(self) -> Unit:
        return next(unit for unit in self.units.values() if unit.role == "language_model")


@dataclass(frozen=True, kw_only=True)
class Orchestration:
    degrees: Mapping[str, UnitDegrees]
    num_microbatches: int
    iteration_s: float

    @property
    def num_devices(self) -> int:
        return sum(degrees.num_devices for degrees in self.degrees.values())
