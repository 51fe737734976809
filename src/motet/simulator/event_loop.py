"""Times of a program's steps where computations share processors or messages share network cards.

The rules are those of `motet.simulator.clock`, but the duration of a step depends on what runs at the same time, so an
event loop follows the clock. Shared are

* cores: k computing ranks on c cores progress at rate min(1, c/k);
* network cards: of the messages between nodes, k that leave (or enter) a node of c cards at once progress at rate
  min(1, c/k); a message goes at the lower of the rates at its two ends.

Events are ordered by (time, priority, sequence): of two events at the same time the one of lower priority value comes
first, and of two with equal priority the one that was pushed first. A simulation is therefore deterministic.

Limits: bandwidth that a message loses at one end is not given to others at the other end; latency is shared like
bandwidth; reductions share neither cores nor cards. Equal pipelines are not folded here, so run time grows with all
ranks and messages: 1296 GPUs with 300,000 messages take about 6 s.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

import numpy as np

from motet.schedule.action import Compute, Reduce
from motet.schedule.dependencies import Value
from motet.schedule.lower import Message, Program
from motet.simulator.clock import Times
from motet.simulator.costs import StepCosts

T = TypeVar("T")


class EventQueue(Generic[T]):
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, T]] = []
        self._num_pushed = 0

    def push(self, time_s: float, priority: int, event: T) -> None:
        heapq.heappush(self._heap, (time_s, priority, self._num_pushed, event))
        self._num_pushed += 1

    def pop(self) -> tuple[float, T]:
        """The next event and its time."""
        time_s, _, _, event = heapq.heappop(self._heap)
        return time_s, event

    @property
    def next_time_s(self) -> float:
        """Infinite if the queue is empty."""
        return self._heap[0][0] if self._heap else inf


class SharedCores(Generic[T]):
    """Processor sharing: k computing ranks on c cores all progress at rate min(1, c/k).

    Work is therefore kept in *progress* instead of time: a computation that begins at progress p and takes w seconds
    alone ends at progress p + w. Nothing is recomputed when a rank joins or leaves."""

    def __init__(self, num_cores: float = inf) -> None:
        self._num_cores = num_cores
        self._num_computing = 0
        self._now_s = 0.0
        self._progress_s = 0.0
        self._ends: EventQueue[tuple[T, int]] = EventQueue()

    @property
    def _rate(self) -> float:
        return min(1.0, self._num_cores / self._num_computing) if self._num_computing else 1.0

    def _advance(self, now_s: float) -> None:
        if self._num_cores == inf:
            self._progress_s = now_s  # Exactly, without rounding.
        else:
            self._progress_s += (now_s - self._now_s) * self._rate
        self._now_s = now_s

    def start(self, now_s: float, work_s: float, num_ranks: int, event: T) -> None:
        """`num_ranks` ranks begin to compute for `work_s` seconds (of undisturbed time) each."""
        self._advance(now_s)
        self._num_computing += num_ranks
        self._ends.push(self._progress_s + work_s, 0, (event, num_ranks))

    @property
    def next_end_s(self) -> float:
        """When the next work ends if nothing else begins; infinite if there is none."""
        if self._ends.next_time_s == inf:
            return inf
        if self._num_cores == inf:
            return self._ends.next_time_s
        return self._now_s + max(0.0, self._ends.next_time_s - self._progress_s) / self._rate

    def pop(self) -> tuple[float, T]:
        """The work that ends next and when."""
        now_s = self.next_end_s
        self._advance(now_s)
        _, (event, num_ranks) = self._ends.pop()
        self._num_computing -= num_ranks
        return now_s, event


@dataclass(frozen=True)
class SharedCards:
    """The network cards that all messages between nodes go through."""

    node: Callable[[int], int]
    """The node of a rank."""
    num_cards: float
    """How many messages leave (and enter) a node at full speed at once."""


def run_events(program: Program, seconds: StepCosts, num_cores: float = inf, cards: SharedCards | None = None) -> Times:
    """`num_cores`: that all ranks share."""
    loop = _Loop(program, seconds, num_cores, cards)
    loop.run()
    places = [np.array(place, dtype=np.int64) for place in program.places]
    start, end = np.array(loop.start, dtype=float), np.array(loop.end, dtype=float)
    actions, messages, reductions = places
    return Times(start[actions], end[actions], start[messages], end[messages], start[reductions], end[reductions])


class _Loop:
    def __init__(self, program: Program, seconds: StepCosts, num_cores: float, cards: SharedCards | None) -> None:
        self.steps = program.steps
        self.seconds = program.in_order(seconds.compute_s, seconds.message_s, seconds.reduce_s).tolist()
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
        self.on_link: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        """The messages from one rank to another that are in flight or queued."""
        self.cores: SharedCores[int] = SharedCores(num_cores)
        self.transfers = _Transfers(cards)
        self.events: EventQueue[int] = EventQueue()

    def run(self) -> None:
        for rank in range(len(self.lists)):
            self._go_on(0.0, rank)
        while True:
            sources = (self.cores.next_end_s, self.transfers.next_end_s, self.events.next_time_s)
            if (next_s := min(sources)) == inf:
                break
            # If a computation and a message end together, the computation comes first.
            source = (self.cores, self.transfers, self.events)[sources.index(next_s)]
            now, i = source.pop()
            self._finish(now, i)
        assert all(at == len(steps) for at, steps in zip(self.position, self.lists, strict=True)), "a rank is stuck"

    def _finish(self, now: float, i: int) -> None:
        step = self.steps[i]
        self.end[i] = now
        if isinstance(step, Compute):
            for rank in self.participants[i]:
                self.position[rank] += 1
            for rank in self.participants[i]:
                self._go_on(now, rank)
        elif isinstance(step, Message):
            waiting = self.on_link[step.sender, step.receiver]
            waiting.popleft()
            if waiting:
                self._transfer(now, waiting[0])
        for other in self.waited_for_by[i]:
            self._satisfy(now, other)

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
        """Counts one condition of step i as met, and starts the step after the last one."""
        self.missing[i] -= 1
        if self.missing[i]:
            return
        step = self.steps[i]
        if isinstance(step, Compute):
            self.start[i] = now
            self.cores.start(now, self.seconds[i], len(self.participants[i]), i)
        elif isinstance(step, Message):
            waiting = self.on_link[step.sender, step.receiver]
            waiting.append(i)
            if len(waiting) == 1:
                self._transfer(now, i)
        else:
            self.start[i] = now
            self.events.push(now + self.seconds[i], 1, i)

    def _transfer(self, now: float, i: int) -> None:
        self.start[i] = now
        sender, receiver = self.participants[i]
        if self.transfers.shares_cards(sender, receiver):
            self.transfers.start(now, self.seconds[i], sender, receiver, i)
        else:
            self.events.push(now + self.seconds[i], 0, i)


class _Transfers:
    """The messages between nodes that are in flight.

    When one begins or ends, only the rates of those that share an end with it change. A heap holds the end of each at
    its present rate; outdated entries are skipped."""

    def __init__(self, cards: SharedCards | None) -> None:
        self._cards = cards
        self._under_way: dict[int, _Transfer] = {}
        self._at: dict[tuple[str, int], dict[int, _Transfer]] = defaultdict(dict)
        """Transfers by the nodes that they leave and enter."""
        self._ends: list[tuple[float, int]] = []

    def shares_cards(self, sender: int, receiver: int) -> bool:
        return self._cards is not None and self._cards.node(sender) != self._cards.node(receiver)

    def start(self, now_s: float, work_s: float, sender: int, receiver: int, i: int) -> None:
        assert self._cards is not None
        ends = (("out", self._cards.node(sender)), ("in", self._cards.node(receiver)))
        self._under_way[i] = transfer = _Transfer(ends, work_s, now_s)
        for end in ends:
            self._at[end][i] = transfer
        self._set_rates(now_s, ends)

    def _set_rates(self, now_s: float, ends: Iterable[tuple[str, int]]) -> None:
        for end in ends:
            for i, transfer in self._at[end].items():
                rate = self._rate(transfer)
                if rate != transfer.rate:
                    transfer.left_s -= (now_s - transfer.since_s) * transfer.rate
                    transfer.since_s, transfer.rate = now_s, rate
                    transfer.end_s = now_s + max(0.0, transfer.left_s) / rate
                    heapq.heappush(self._ends, (transfer.end_s, i))

    def _rate(self, transfer: "_Transfer") -> float:
        assert self._cards is not None
        busiest = max(len(self._at[end]) for end in transfer.ends)
        return min(1.0, self._cards.num_cards / busiest)

    @property
    def next_end_s(self) -> float:
        while self._ends:
            end_s, i = self._ends[0]
            if i in self._under_way and self._under_way[i].end_s == end_s:
                return end_s
            heapq.heappop(self._ends)
        return inf

    def pop(self) -> tuple[float, int]:
        """The next transfer to end; of several, the first one in the program."""
        now_s = self.next_end_s
        _, i = heapq.heappop(self._ends)
        ends = self._under_way.pop(i).ends
        for end in ends:
            del self._at[end][i]
        self._set_rates(now_s, ends)
        return now_s, i


@dataclass(slots=True)
class _Transfer:
    ends: tuple[tuple[str, int], tuple[str, int]]
    left_s: float
    """Remaining time at full rate, from `since_s` on."""
    since_s: float
    rate: float = 0.0
    end_s: float = inf
