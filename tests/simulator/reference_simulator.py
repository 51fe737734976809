"""The simulator's rules once more, with nothing clever: at every moment look at everything, in exact fractions.

Shares no code with `motet.simulator.simulate` but the program that it reads. Quadratic and slow.
"""

from collections.abc import Mapping
from fractions import Fraction

from motet.schedule.action import Compute, Reduce
from motet.schedule.lower import Message, Program
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
    steps = program.steps
    who = [program.participants(step) for step in steps]
    lists = [[i for i in range(len(steps)) if rank in who[i]] for rank in range(1 + max(map(max, who)))]
    start: dict[int, Fraction] = {}
    end: dict[int, Fraction] = {}
    left: dict[int, Fraction] = {}  # of what has started and not ended
    now = Fraction(0)

    def reached(i: int, rank: int) -> bool:
        """All actions before it on the rank have ended."""
        before = lists[rank][: lists[rank].index(i)]
        return all(j in end for j in before if isinstance(steps[j], Compute))

    def may_start(i: int) -> bool:
        step = steps[i]
        if not all(reached(i, rank) for rank in who[i]):
            return False
        if isinstance(step, Compute):
            needed = program.dependencies.reads(step)
            return all(
                j in end
                for j, other in enumerate(steps)
                if isinstance(other, Message) and other.value in needed and other.receiver in who[i]
            )
        if isinstance(step, Message):
            return all(
                j in end
                for j, other in enumerate(steps[:i])
                if isinstance(other, Message) and (other.sender, other.receiver) == (step.sender, step.receiver)
            )
        earlier = [j for j in range(i) if isinstance(steps[j], Reduce) and set(who[j]) & set(who[i])]
        return all(j in end for j in earlier)

    def duration(i: int) -> Fraction:
        step = steps[i]
        if isinstance(step, Compute):
            return Fraction(costs.compute_s(step)) * max(slower.get(rank, 1) for rank in who[i])
        return Fraction(costs.message_s(step) if isinstance(step, Message) else costs.reduce_s(step))

    while len(end) < len(steps):
        changed = True
        while changed:
            changed = False
            for i in range(len(steps)):
                if i not in start and may_start(i):
                    start[i], left[i] = now, duration(i)
                    changed = True
                if i in left and left[i] == 0:
                    end[i] = now
                    del left[i]
                    changed = True
        if len(end) == len(steps):
            break
        num_computing = sum(len(who[i]) for i in left if isinstance(steps[i], Compute))
        under_way = [steps[i] for i in left if isinstance(steps[i], Message)]

        def speed_of(i: int, num_computing: int = num_computing, under_way: list = under_way) -> Fraction:
            step = steps[i]
            if isinstance(step, Compute) and num_cores is not None:
                return min(Fraction(1), Fraction(num_cores, num_computing))
            if isinstance(step, Message) and ranks_per_node is not None:
                out, into = step.sender // ranks_per_node, step.receiver // ranks_per_node
                if out != into:
                    crossing = [(m.sender // ranks_per_node, m.receiver // ranks_per_node) for m in under_way]
                    leaving = sum(a == out != b for a, b in crossing)
                    entering = sum(b == into != a for a, b in crossing)
                    return min(Fraction(1), Fraction(num_cards, leaving), Fraction(num_cards, entering))
            return Fraction(1)

        speed = {i: speed_of(i) for i in left}
        step_s = min(left[i] / speed[i] for i in left)
        now += step_s
        for i in left:
            left[i] -= step_s * speed[i]
    return [(start[i], end[i]) for i in range(len(steps))]
