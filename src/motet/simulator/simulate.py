"""Runs a program on a virtual clock, by the same rules as the executor runs it on torch.distributed.

* Each rank goes through its projection of the program. A compute action blocks its ranks, all of them together, until
  it ends; it begins when all of them have reached it and every message that it reads has arrived.
* Messages do not block: a rank posts its send or receive when it reaches it and goes on. The transfer begins when both
  ends are posted, and messages from one rank to another follow each other.
* Reductions do not block either: one begins when its last participant has reached it, and each rank's reductions follow
  each other. The iteration ends when all have ended; then comes what is fixed, the optimizer's step.
* Optionally ranks share processor cores: k computing ranks on c cores progress at rate min(1, c/k).

Limits: communication costs no processor time, links of different pairs do not slow each other down.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from motet.schedule.action import Compute, Reduce
from motet.schedule.dependencies import Value
from motet.schedule.lower import Message, Program
from motet.simulator.costs import Costs
from motet.simulator.event_queue import EventQueue, SharedCores
from motet.simulator.memory import MemoryCurve, memory_curves
from motet.timeline import Span, Timeline


@dataclass(frozen=True)
class SimulationResult:
    timeline: Timeline
    memory: tuple[MemoryCurve, ...]
    """For each rank."""

    @property
    def iteration_time_s(self) -> float:
        return self.timeline.iteration_time_s

    @property
    def bubble_fraction(self) -> float:
        return self.timeline.bubble_fraction

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        return tuple(curve.peak_bytes for curve in self.memory)


def simulate(program: Program, costs: Costs, *, num_cores: float | None = None) -> SimulationResult:
    """Predicts when each rank does what. `num_cores`: that all ranks share; None: each has its own."""
    start, end = _Clock(program, costs, inf if num_cores is None else num_cores).run()
    timeline = _timeline(program, costs, start, end)
    return SimulationResult(timeline, memory_curves(program, costs, start, end))


class _Clock:
    def __init__(self, program: Program, costs: Costs, num_cores: float) -> None:
        self.costs, self.steps = costs, program.steps
        num_ranks = program.dependencies.routes.plan.num_ranks
        self.participants = [program.participants(step) for step in program.steps]
        self.missing = [len(ranks) for ranks in self.participants]
        """For each step: the participants that have not reached it, and the other steps that it waits for."""
        self.lists: list[list[int]] = [[] for _ in range(num_ranks)]
        reader: dict[Value, int] = {}
        self.waited_for_by: list[list[int]] = [[] for _ in self.steps]
        """For each message, the action that reads it; for each reduction, its ranks' next ones."""
        last_reduction: dict[int, int] = {}
        for i, step in enumerate(program.steps):
            for rank in self.participants[i]:
                self.lists[rank].append(i)
            if isinstance(step, Compute):
                reader |= dict.fromkeys(program.dependencies.reads(step), i)
            elif isinstance(step, Reduce):
                for rank in self.participants[i]:
                    if rank in last_reduction:
                        self.waited_for_by[last_reduction[rank]].append(i)
                    last_reduction[rank] = i
        for i, step in enumerate(program.steps):
            if isinstance(step, Message):
                self.waited_for_by[i].append(reader[step.value])
            for waiting in self.waited_for_by[i]:
                self.missing[waiting] += 1

        self.position = [0] * num_ranks
        self.start = [0.0] * len(self.steps)
        self.end = [0.0] * len(self.steps)
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.cores: SharedCores[int] = SharedCores(num_cores)
        self.events: EventQueue[int] = EventQueue()

    def run(self) -> tuple[list[float], list[float]]:
        """Start and end of every step, in seconds."""
        for rank in range(len(self.lists)):
            self._go_on(0.0, rank)
        while (next_s := min(self.cores.next_end_s, self.events.next_time_s)) != inf:
            # Of a computation and a message that end together, the computation goes first.
            now, i = self.cores.pop() if self.cores.next_end_s == next_s else self.events.pop()
            self.end[i] = now
            if isinstance(self.steps[i], Compute):
                for rank in self.participants[i]:
                    self.position[rank] += 1
                for rank in self.participants[i]:
                    self._go_on(now, rank)
            for waiting in self.waited_for_by[i]:
                self._satisfy(now, waiting)
        assert all(at == len(steps) for at, steps in zip(self.position, self.lists, strict=True)), "a rank is stuck"
        return self.start, self.end

    def _go_on(self, now: float, rank: int) -> None:
        """Takes the rank's steps up to the next one that blocks it."""
        steps = self.lists[rank]
        while self.position[rank] < len(steps):
            i = steps[self.position[rank]]
            if isinstance(self.steps[i], Compute):
                self._satisfy(now, i)
                return
            self.position[rank] += 1
            self._satisfy(now, i)

    def _satisfy(self, now: float, i: int) -> None:
        """One thing less that step i waits for."""
        self.missing[i] -= 1
        if self.missing[i]:
            return
        step = self.steps[i]
        if isinstance(step, Compute):
            self.start[i] = now
            self.cores.start(now, self.costs.compute_s(step), len(self.participants[i]), i)
        elif isinstance(step, Message):
            link = (step.sender, step.receiver)
            self.start[i] = max(now, self.link_free[link])
            self.link_free[link] = self.start[i] + self.costs.message_s(step)
            self.events.push(self.link_free[link], 0, i)
        else:
            self.start[i] = now
            self.events.push(now + self.costs.reduce_s(step), 1, i)


def _timeline(program: Program, costs: Costs, start: Sequence[float], end: Sequence[float]) -> Timeline:
    spans: list[Span] = []
    for step, begin, finish in zip(program.steps, start, end, strict=True):
        if isinstance(step, Message):
            spans.append(Span(step.sender, str(step), "message", begin, finish))
        else:
            kind = "reduce" if isinstance(step, Reduce) else step.kind.value
            name = str(step)
            spans += [Span(rank, name, kind, begin, finish) for rank in program.participants(step)]
    num_ranks = program.dependencies.routes.plan.num_ranks
    if costs.fixed_s:
        last = max(end, default=0.0)
        spans += [Span(rank, "optimizer", "optimizer", last, last + costs.fixed_s) for rank in range(num_ranks)]
    return Timeline(tuple(spans), num_ranks)
