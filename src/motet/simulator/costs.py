"""Protocols of the simulator's cost models, and the durations of a program's steps under disturbances.

Every cost model implements `Costs` in seconds and bytes; `motet.costs` does for real models and clusters. A model may
also implement `ArrayCosts` (many answers at once), `GroupCosts` (the part of a computation that is communication),
`ShardedCosts` (the optimizer state is sharded, so new parameters are gathered) and `KindCosts` (bytes by kind).

Stragglers: a rank's factor multiplies the time of what it computes; a group is as slow as its slowest member. Jitter:
every computation takes a random additional time, drawn from the action's own number and the seed, so that it does not
depend on the rest of the program.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from motet.ragged_arrays import Floats, Ints
from motet.schedule.action import Compute, Kind, Reduce
from motet.schedule.dependencies import Dependencies
from motet.schedule.lower import Message, Program
from motet.schedule.routes import Cell


class Costs(Protocol):
    """Durations and sizes of one iteration. Every answer is a pure function of its argument."""

    @property
    def fixed_s(self) -> float:
        """Time of each iteration beside its actions: the optimizer step and the like."""

    def compute_s(self, action: Compute) -> float:
        """Duration of the action on the stage's ranks without disturbances."""

    def message_s(self, message: Message) -> float:
        """Time for which the message occupies its link, latency included."""

    def message_bytes(self, message: Message) -> int:
        """Size of the message, which is also the size of the buffers at both of its ends."""

    def reduce_s(self, reduce: Reduce) -> float:
        """Duration of the reduction after its last participant has joined."""

    def saved_bytes(self, cell: Cell, half: bool) -> int:
        """Bytes that *each* rank of the stage saves for the cell's backward; of a cell that runs ahead, those of its
        output, which are kept until the next iteration.

        `half`: those that remain from the input half until the weight half has run."""

    def static_bytes(self, rank: int) -> int:
        """Parameters, gradients, optimizer state and everything else that stays for the whole iteration."""


@runtime_checkable
class ArrayCosts(Protocol):
    """The answers of `Costs` by number (`motet.schedule.dependencies`), for programs of very many actions.

    A model may implement these only if a message's size follows from its value, and its time from that and its ends."""

    def compute_seconds(self, dependencies: Dependencies) -> Floats:
        """`compute_s` of each action."""

    def saved_sizes(self, dependencies: Dependencies) -> Ints:
        """`saved_bytes` of each cell, in row 0 the whole and in row 1 the half."""

    def carried_sizes(self, dependencies: Dependencies) -> Ints:
        """`message_bytes` of each value that routes carry."""

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        """Latency in seconds and bytes per second: a message takes the latency, then its bytes at that rate."""


@runtime_checkable
class GroupCosts(Protocol):
    def group_communication_s(self, action: Compute) -> float:
        """The part of `compute_s` in which the stage's ranks exchange tensors and compute nothing."""


@runtime_checkable
class ShardedCosts(Protocol):
    def gather_s(self, reduce: Reduce) -> float:
        """Duration of gathering the new parameters of the layers that `reduce` sums; 0 where nothing is sharded."""


@runtime_checkable
class KindCosts(Protocol):
    """The bytes of `Costs` by kind."""

    def static_by_kind(self, rank: int) -> Mapping[str, int]:
        """`static_bytes` by kind."""

    def saved_logits(self, dependencies: Dependencies) -> Ints:
        """The part of `saved_sizes` that is logits."""


@dataclass(frozen=True, kw_only=True)
class UniformCosts:
    """Equal costs of every stage, for drawings and tests. The two halves of a backward take equally long."""

    forward_s: float = 1.0
    backward_s: float = 2.0
    message_seconds: float = 0.0
    reduce_seconds: float = 0.0
    gather_seconds: float = 0.0
    fixed_s: float = 0.0
    saved_bytes_per_cell: int = 1
    half_bytes_per_cell: int = 1
    bytes_per_message: int = 0
    static_bytes_per_rank: int = 0

    def compute_s(self, action: Compute) -> float:
        if action.kind is Kind.FORWARD:
            return self.forward_s
        return self.backward_s if action.kind is Kind.BACKWARD else self.backward_s / 2

    def message_s(self, message: Message) -> float:
        return self.message_seconds

    def message_bytes(self, message: Message) -> int:
        return self.bytes_per_message

    def reduce_s(self, reduce: Reduce) -> float:
        return self.reduce_seconds

    def gather_s(self, reduce: Reduce) -> float:
        return self.gather_seconds

    def saved_bytes(self, cell: Cell, half: bool) -> int:
        return self.half_bytes_per_cell if half else self.saved_bytes_per_cell

    def static_bytes(self, rank: int) -> int:
        return self.static_bytes_per_rank


@dataclass(frozen=True, kw_only=True)
class Disturbances:
    """Slow ranks and random delays, which no cost model contains."""

    straggler_factors: Mapping[int, float] = field(default_factory=dict)
    """By rank; 1.2: every computation of the rank takes a fifth longer."""
    jitter: float = 0.0
    """Mean additional time of a computation, as a share of its own time; exponentially distributed."""
    seed: int = 0

    def __post_init__(self) -> None:
        for rank, factor in self.straggler_factors.items():
            if factor <= 0:
                raise ValueError(f"straggler factor of rank {rank} is {factor}; give one above 0")
        if self.jitter < 0:
            raise ValueError(f"jitter is {self.jitter}; give 0 or more")

    @property
    def none(self) -> bool:
        return not self.jitter and all(factor == 1.0 for factor in self.straggler_factors.values())


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Durations and sizes by place in `Program.actions`, by message and by reduction."""

    compute_s: Floats
    message_s: Floats
    message_bytes: Ints
    reduce_s: Floats
    gather_s: Floats
    """Gather of new parameters, by reduction."""


def step_costs(program: Program, costs: Costs, disturbances: Disturbances | None = None) -> StepCosts:
    """Durations in the program's order, from `ArrayCosts` where `costs` implements it."""
    dependencies = program.dependencies
    if isinstance(costs, ArrayCosts):
        compute_s = costs.compute_seconds(dependencies)[program.actions]
        sizes = costs.carried_sizes(dependencies)[program.message_value]
        message_s = _link_seconds(program, costs, sizes)
    else:
        compute_s = np.array([costs.compute_s(action) for action in dependencies.actions(program.actions)], dtype=float)
        sizes = np.array([costs.message_bytes(message) for message in program.messages], dtype=np.int64)
        message_s = np.array([costs.message_s(message) for message in program.messages], dtype=float)
    # Forwards are the first actions. Those that ran in the iteration before take no time.
    ran_before = np.append(dependencies.routes.cell_ran_before, False)
    compute_s[ran_before[np.minimum(program.actions, dependencies.routes.num_cells)]] = 0.0
    if disturbances is not None and not disturbances.none:
        compute_s = compute_s * _factors(program, disturbances)
    gathers = costs.gather_s if isinstance(costs, ShardedCosts) else lambda reduce: 0.0
    return StepCosts(
        compute_s=compute_s,
        message_s=message_s,
        message_bytes=sizes,
        reduce_s=np.array([costs.reduce_s(reduce) for reduce in program.reductions], dtype=float),
        gather_s=np.array([gathers(reduce) for reduce in program.reductions], dtype=float),
    )


def _link_seconds(program: Program, costs: ArrayCosts, sizes: Ints) -> Floats:
    links = [costs.link(sender, receiver) for sender, receiver in program.links.tolist()]
    latency_s, bytes_per_s = np.array(links, dtype=float).reshape(-1, 2).T
    return latency_s[program.message_link] + sizes / bytes_per_s[program.message_link]


def _factors(program: Program, disturbances: Disturbances) -> Floats:
    routes = program.dependencies.routes
    slowest = [
        max(disturbances.straggler_factors.get(rank, 1.0) for rank in stage.planned.ranks) for stage in routes.stages
    ]
    factors = np.array(slowest, dtype=float)[routes.cell_stage[program.actions % max(1, routes.num_cells)]]
    if disturbances.jitter:
        # Drawn for all action numbers, so that each action's draw is the same under every schedule.
        draws = np.random.default_rng(disturbances.seed).exponential(
            disturbances.jitter, program.dependencies.num_actions
        )
        factors = factors * (1.0 + draws[program.actions])
    return factors
