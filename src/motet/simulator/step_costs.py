"""The seconds of each step of a program: a cost model's answers, and what slows single ranks or steps down.

Stragglers: a rank's factor makes what it computes take that much longer; a group is as slow as its slowest member.
Jitter: every computation takes a random time longer, drawn for each action from its own number and the seed, so that
it does not depend on what else is in the program.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from motet.ragged_arrays import Floats, Ints
from motet.schedule.lower import Program
from motet.simulator.costs import ArrayCosts, Costs, ShardedCosts


@dataclass(frozen=True, kw_only=True)
class Disturbances:
    """What happens on real machines and stands in no cost model."""

    straggler_factors: Mapping[int, float] = field(default_factory=dict)
    """By rank; 1.2: all that the rank computes takes a fifth longer."""
    jitter: float = 0.0
    """The mean of what each computation takes longer, as a share of its own time; exponentially distributed."""
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
    """By place in `Program.actions`, by message, by reduction."""

    compute_s: Floats
    message_s: Floats
    message_bytes: Ints
    reduce_s: Floats
    gather_s: Floats
    """Of each reduction's layers."""


def step_costs(program: Program, costs: Costs, disturbances: Disturbances | None = None) -> StepCosts:
    """In the program's order of actions, messages and reductions; asked for all at once where `costs` can."""
    dependencies = program.dependencies
    if isinstance(costs, ArrayCosts):
        compute_s = costs.compute_seconds(dependencies)[program.actions]
        sizes = costs.carried_sizes(dependencies)[program.message_value]
        message_s = _link_seconds(program, costs, sizes)
    else:
        compute_s = np.array([costs.compute_s(action) for action in dependencies.actions(program.actions)], dtype=float)
        sizes = np.array([costs.message_bytes(message) for message in program.messages], dtype=np.int64)
        message_s = np.array([costs.message_s(message) for message in program.messages], dtype=float)
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
        # Drawn for all numbers there are, so that each action's own is the same under every schedule.
        draws = np.random.default_rng(disturbances.seed).exponential(
            disturbances.jitter, program.dependencies.num_actions
        )
        factors = factors * (1.0 + draws[program.actions])
    return factors
