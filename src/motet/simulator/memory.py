"""How much memory each rank holds, and when, given when each step of a program began and ended.

| what | from | to |
|---|---|---|
| what a forward saves | the forward's start | the backward's end, or the input half's |
| what the input half leaves | the input half's end | the weight half's end |
| the buffer of a message, at its sender | the producer's end | the message's end |
| the buffer of a message, at its receiver | the message's start | the end of the action that reads it |
| parameters and all that is static | always | |

Limits: what passes between two stages on the same rank is charged to what they save, not by itself; temporary memory
inside an action and fragmentation are the cost model's to add to the static part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from motet.schedule.action import Compute, Kind
from motet.schedule.dependencies import SavedGraph, Value
from motet.schedule.lower import Message, Program
from motet.simulator.costs import Costs


@dataclass(frozen=True)
class MemoryCurve:
    """One rank's memory: `bytes_held[i]` from `times_s[i]` until `times_s[i + 1]`."""

    times_s: tuple[float, ...]
    bytes_held: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes_held)


def memory_curves(
    program: Program, costs: Costs, start: Sequence[float], end: Sequence[float]
) -> tuple[MemoryCurve, ...]:
    """One for each rank. `start`, `end`: of every step, in seconds. Where memory is freed and taken at the same moment
    it is freed first."""
    dependencies = program.dependencies
    num_ranks = dependencies.routes.plan.num_ranks
    changes: list[list[tuple[float, int]]] = [[] for _ in range(num_ranks)]

    def hold(rank: int, size: int, begin: float, finish: float) -> None:
        if size and begin < finish:
            changes[rank] += [(begin, size), (finish, -size)]

    reader: dict[Value, int] = {}
    writer: dict[Value, int] = {}
    for i, step in enumerate(program.steps):
        if isinstance(step, Compute):
            reader |= dict.fromkeys(dependencies.reads(step), i)
            writer |= dict.fromkeys(dependencies.writes(step), i)
    for i, step in enumerate(program.steps):
        if isinstance(step, Message):
            size = costs.message_bytes(step)
            hold(step.sender, size, end[writer[step.value]], end[i])
            hold(step.receiver, size, start[i], end[reader[step.value]])
        elif isinstance(step, Compute) and step.kind in (Kind.FORWARD, Kind.INPUT):
            saved = SavedGraph(step.cell, half=step.kind is Kind.INPUT)
            if saved in reader:
                size = costs.saved_bytes(step.cell, saved.half)
                for rank in dependencies.ranks(step):
                    hold(rank, size, start[i] if not saved.half else end[i], end[reader[saved]])
    return tuple(_curve(changes[rank], costs.static_bytes(rank)) for rank in range(num_ranks))


def _curve(changes: list[tuple[float, int]], static_bytes: int) -> MemoryCurve:
    changes.sort()  # By time, then by size: what is freed comes first.
    times = (0.0, *(time for time, _ in changes))
    held = accumulate((size for _, size in changes), initial=static_bytes)
    return MemoryCurve(times, tuple(held))
