"""The simulator's rules once more, with nothing clever: at every moment look at everything, in exact fractions.

Shares no code with `motet.simulator.simulate` but the program that it reads. Quadratic and slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from motet.schedule.action import Compute, Reduce
from motet.schedule.lower import Message, Program, Step
from motet.simulator.costs import Costs


def reference_times(
    program: Program,
    costs: Costs,
    num_cores: int | None = None,
    ranks_per_node: int | None = None,
    num_cards: int = 1,
    slower: Mapping[int, int] = {},
) -> list[tuple[Fraction, Fraction]]:
    """Start and end of every step. `ranks_per_node`: messages between nodes share this many cards of each node, out and
    in. `slower`: factors by rank."""
    return _Iteration(program, costs, num_cores, ranks_per_node, num_cards, slower).times()


@dataclass
class _Iteration:
    """Steps are called by their place in the program."""

    program: Program
    costs: Costs
    num_cores: int | None
    ranks_per_node: int | None
    num_cards: int
    slower: Mapping[int, int]
    start: dict[int, Fraction] = field(default_factory=dict)
    end: dict[int, Fraction] = field(default_factory=dict)
    left: dict[int, Fraction] = field(default_factory=dict)
    """Of what has started and not ended."""

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return tuple(self.program.steps)

    @cached_property
    def who(self) -> list[tuple[int, ...]]:
        return [tuple(self.program.participants(step)) for step in self.steps]

    @cached_property
    def lists(self) -> list[list[int]]:
        """Of each rank."""
        num_ranks = 1 + max(map(max, self.who))
        return [[i for i in range(len(self.steps)) if rank in self.who[i]] for rank in range(num_ranks)]

    def times(self) -> list[tuple[Fraction, Fraction]]:
        now = Fraction(0)
        while True:
            while self.begin_and_end(now):
                pass
            if len(self.end) == len(self.steps):
                return [(self.start[i], self.end[i]) for i in range(len(self.steps))]
            speed = {i: self.speed_of(i) for i in self.left}
            passed = min(self.left[i] / speed[i] for i in self.left)
            now += passed
            for i in self.left:
                self.left[i] -= passed * speed[i]

    def begin_and_end(self, now: Fraction) -> bool:
        """Whatever may begin does, and what has nothing left to do ends; whether there was any."""
        changed = False
        for i in range(len(self.steps)):
            if i not in self.start and self.may_start(i):
                self.start[i], self.left[i] = now, self.duration(i)
                changed = True
            if i in self.left and self.left[i] == 0:
                self.end[i] = now
                del self.left[i]
                changed = True
        return changed

    def may_start(self, i: int) -> bool:
        step = self.steps[i]
        if not all(self.is_reached(i, rank) for rank in self.who[i]):
            return False
        if isinstance(step, Compute):
            needed = self.program.dependencies.reads(step)
            return all(
                j in self.end
                for j, other in enumerate(self.steps)
                if isinstance(other, Message) and other.value in needed and other.receiver in self.who[i]
            )
        if isinstance(step, Message):
            return all(
                j in self.end
                for j, other in enumerate(self.steps[:i])
                if isinstance(other, Message) and (other.sender, other.receiver) == (step.sender, step.receiver)
            )
        earlier = [j for j in range(i) if isinstance(self.steps[j], Reduce) and set(self.who[j]) & set(self.who[i])]
        return all(j in self.end for j in earlier)

    def is_reached(self, i: int, rank: int) -> bool:
        """All actions before it on the rank have ended."""
        before = self.lists[rank][: self.lists[rank].index(i)]
        return all(j in self.end for j in before if isinstance(self.steps[j], Compute))

    def duration(self, i: int) -> Fraction:
        step = self.steps[i]
        if isinstance(step, Compute):
            return Fraction(self.costs.compute_s(step)) * max(self.slower.get(rank, 1) for rank in self.who[i])
        return Fraction(self.costs.message_s(step) if isinstance(step, Message) else self.costs.reduce_s(step))

    def speed_of(self, i: int) -> Fraction:
        """1 but for computations that share the cores, and messages that share cards."""
        step = self.steps[i]
        if isinstance(step, Compute) and self.num_cores is not None:
            num_computing = sum(len(self.who[j]) for j in self.left if isinstance(self.steps[j], Compute))
            return min(Fraction(1), Fraction(self.num_cores, num_computing))
        if isinstance(step, Message) and self.ranks_per_node is not None:
            out, into = self.nodes_of(step)
            if out != into:
                under_way = [self.nodes_of(m) for m in map(self.steps.__getitem__, self.left) if isinstance(m, Message)]
                leaving = sum(a == out != b for a, b in under_way)
                entering = sum(b == into != a for a, b in under_way)
                return min(Fraction(1), Fraction(self.num_cards, leaving), Fraction(self.num_cards, entering))
        return Fraction(1)

    def nodes_of(self, message: Message) -> tuple[int, int]:
        assert self.ranks_per_node is not None
        return message.sender // self.ranks_per_node, message.receiver // self.ranks_per_node
