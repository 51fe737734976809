"""From a schedule to a program: reductions and messages are added, and everything is put into one total order.

Every rank runs its projection of the one order in which each message stands right after its producer. That cannot
deadlock under any rendezvous rule: the first step of the order that has not happened is first in the projection of
every rank that takes part in it. All ranks derive the same order; `Program.digest` lets them compare it.
"""

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from motet.schedule.action import Action, Compute, Durations, Reduce, unit_duration
from motet.schedule.dependencies import Activation, Dependencies, Gradient, Value, WeightGradient
from motet.schedule.routes import Cell
from motet.schedule.schedule import Schedule, grid


class Message(NamedTuple):
    """One rank's share of a route, to another rank. `gradient`: the way back, not the mirror of the way there."""

    source: Cell
    target: Cell
    gradient: bool
    sender: int
    receiver: int

    @property
    def value(self) -> Activation | Gradient:
        """What it carries a share of."""
        return Gradient(self.source, self.target) if self.gradient else Activation(self.source, self.target)

    def __str__(self) -> str:
        arrow = "<-" if self.gradient else "->"
        source, target = (f"{c.module}[{c.replica}].{c.stage}:{c.microbatch}" for c in (self.source, self.target))
        return f"{source}{arrow}{target} {self.sender}>{self.receiver}"


Step = Compute | Reduce | Message


class CyclicScheduleError(ValueError):
    """A schedule whose actions wait for each other. The message shows each rank's place."""


@dataclass(frozen=True)
class Program:
    """All steps of one iteration in one total order."""

    steps: tuple[Step, ...]
    dependencies: Dependencies

    def participants(self, step: Step) -> tuple[int, ...]:
        return (step.sender, step.receiver) if isinstance(step, Message) else self.dependencies.ranks(step)

    @cached_property
    def projections(self) -> tuple[tuple[Step, ...], ...]:
        """What each rank runs, in the total order."""
        ranks: list[list[Step]] = [[] for _ in range(self.dependencies.routes.plan.num_ranks)]
        for step in self.steps:
            for rank in self.participants(step):
                ranks[rank].append(step)
        return tuple(tuple(steps) for steps in ranks)

    def digest(self) -> str:
        return hashlib.sha256("\n".join(map(str, self.steps)).encode()).hexdigest()


def lower(schedule: Schedule, dependencies: Dependencies, duration_s: Durations = unit_duration) -> Program:
    """The program of a schedule. `duration_s` makes the order follow expected times; every rank must use the same.

    Raises `CyclicScheduleError` if actions wait for each other."""
    ordered = order_actions(schedule, dependencies, duration_s)
    steps: list[Step] = []
    for action in add_reductions(ordered, dependencies):
        steps.append(action)
        for value in dependencies.writes(action):
            steps += messages(value, dependencies)
    return Program(tuple(steps), dependencies)


def order_actions(schedule: Schedule, dependencies: Dependencies, duration_s: Durations) -> list[Compute]:
    """The actions in the order in which they end on a virtual clock; ties by rank.

    By their ends and not by their starts, because then a rank posts its receive for what ends while it computes before
    it begins to compute, and the transfer is hidden. For the same reason every transfer takes time on this clock, less
    than any difference between durations: moments are (seconds, transfers)."""
    ranks = schedule.ranks
    position = [0] * len(ranks)
    rank_free_at = [(0.0, 0)] * len(ranks)
    arrived_at: dict[Value, tuple[float, int]] = {}
    readers: dict[Value, list[Compute]] = defaultdict(list)
    missing: dict[Compute, int] = {}
    at_head: dict[Compute, int] = defaultdict(int)
    produced = {value for actions in ranks for action in actions for value in dependencies.writes(action)}
    for actions in ranks:
        for action in actions:
            if action not in missing:
                reads = dependencies.reads(action)
                missing[action] = len(reads)
                for value in reads:
                    if value not in produced:
                        raise CyclicScheduleError(f"{action} reads {value}, which no action writes")
                    readers[value].append(action)

    running: list[tuple[tuple[float, int], int, Compute]] = []

    def start_if_ready(action: Compute) -> None:
        group = dependencies.ranks(action)
        if at_head[action] == len(group) and missing[action] == 0:
            arrivals = [arrived_at[value] for value in dependencies.reads(action)]
            start_s, num_transfers = max(*arrivals, *(rank_free_at[rank] for rank in group), (0.0, 0))
            heapq.heappush(running, ((start_s + duration_s(action), num_transfers), min(group), action))

    def advance(rank: int) -> None:
        if position[rank] < len(ranks[rank]):
            action = ranks[rank][position[rank]]
            at_head[action] += 1
            start_if_ready(action)

    for rank in range(len(ranks)):
        advance(rank)
    ordered: list[Compute] = []
    while running:
        end, _, action = heapq.heappop(running)
        ordered.append(action)
        group = dependencies.ranks(action)
        for rank in group:
            rank_free_at[rank] = end
            position[rank] += 1
        for value in dependencies.writes(action):
            end_s, num_transfers = end
            arrived_at[value] = (end_s, num_transfers + 1) if messages(value, dependencies) else end
            for reader in readers[value]:
                missing[reader] -= 1
                if missing[reader] == 0:
                    start_if_ready(reader)
        for rank in group:
            advance(rank)
    if len(ordered) < len(missing):
        raise CyclicScheduleError(
            "the schedule's actions wait for each other:\n" + grid(schedule.ranks, dict(enumerate(position)))
        )
    return ordered


def add_reductions(ordered: Sequence[Compute], dependencies: Dependencies) -> list[Action]:
    """Puts each reduction right after the last action that writes one of the gradients it sums.

    Of several after one action the last layers' comes first, as their gradients do; shared parameters come last."""
    in_order = sorted(dependencies.reductions, key=lambda reduce: (reduce.tied, -reduce.first))
    pending = {reduce: set(dependencies.reads(reduce)) for reduce in in_order}
    waiting: dict[Value, list[Reduce]] = defaultdict(list)
    for reduce, values in pending.items():
        for value in values:
            waiting[value].append(reduce)
    result: list[Action] = []
    for action in ordered:
        result.append(action)
        for value in dependencies.writes(action):
            if isinstance(value, WeightGradient):
                for reduce in waiting[value]:
                    pending[reduce].discard(value)
                    if not pending[reduce]:
                        result.append(reduce)
    # A run of layers that no microbatch reached (a batch without images) still takes part, with zeros.
    result += [reduce for reduce in in_order if not dependencies.reads(reduce)]
    return result


def messages(value: Value, dependencies: Dependencies) -> list[Message]:
    """The messages that carry a value between ranks; none for what stays on a rank.

    Members of a tensor-parallel group all hold the whole tensor, so each receiver needs one sender: itself if it is
    one of them, else the one at its own place in the group, modulo the group's size. Forwards the consumers choose
    among the producers, backwards the producers choose among the consumers.
    """
    if not isinstance(value, Activation | Gradient):
        return []
    gradient = isinstance(value, Gradient)
    producers = dependencies.routes.stage(value.source).ranks
    consumers = dependencies.routes.stage(value.target).ranks
    senders, receivers = (consumers, producers) if gradient else (producers, consumers)
    return [
        Message(value.source, value.target, gradient, senders[i % len(senders)], receiver)
        for i, receiver in enumerate(receivers)
        if receiver not in senders
    ]
