"""Interleaved 1F1B over a DAG of modules (Narayanan et al. 2021, section 2.2), with the usual and an adjusted warm-up.

A replica of P x V stages stands on P groups of ranks, stage s on group s mod P, so each group holds V chunks of it. A
group takes a run of P microbatches through its first chunk, then the same through its second one, and so on, backwards
from the last chunk to the first; the fill and the drain then shrink by the factor V. How many forwards a group at place
p runs before it alternates one forward and one backward:

* usual, as in Megatron-LM: (V - 1) P + 2 (P - 1 - p);
* adjusted (Optimus, section 4.3 and Figure 12): (V - 1) P + (P - 1 - p). The first chunk's later microbatches are then
  needed later and fewer activations are held, in the same time. The paper shows the effect only; the number is ours,
  the least with which no backward waits where messages take no time.

If P does not divide the number of microbatches, the runs are longer: as many runs as have P at least, as equal as can
be. No turn is lost then, which shorter runs would do; what is held grows with the run. Modules before it (encoders on
ranks of their own) keep 1F1B, with as many microbatches in flight as the first stage after them needs.

That this cannot deadlock needs that microbatch i feeds microbatch i, that no rank holds stages of two replicas and that
a replica's stages go round their groups. Give place p's k-th forward the time k + p and its i-th backward the time at
which its turn comes, later places first: then all that an action reads comes earlier. Where this does not hold the list
scheduler takes over, under 1F1B's limit on microbatches in flight.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from motet.schedule.action import Compute, Durations
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.generators.one_f_one_b import alternate, backwards_of, forwards_of, one_stage
from motet.schedule.routes import Cell, Routes
from motet.schedule.schedule import Schedule, schedule_of_groups
from motet.schedule.stage_graph import (
    StageKey,
    cells_of_stages,
    cuts_alike,
    groups_in_rounds,
    microbatches_in_flight,
    stages_after,
)


def interleaved_1f1b(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs` and `memory` matter only where the closed form does not hold."""
    return _interleaved(routes, costs, memory, forwards_per_place=2)


def interleaved_1f1b_adjusted(
    routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None
) -> Schedule:
    """With the adjusted warm-up. `costs` and `memory` matter only where the closed form does not hold."""
    return _interleaved(routes, costs, memory, forwards_per_place=1)


def _interleaved(
    routes: Routes, costs: Durations | None, memory: MemoryLimit | None, *, forwards_per_place: int
) -> Schedule:
    groups = groups_in_rounds(routes.plan)
    if memory is not None or groups is None or not cuts_alike(routes):
        return list_schedule(routes, costs, in_flight=microbatches_in_flight(routes), memory=memory)
    cells = cells_of_stages(routes)
    after = stages_after(routes)
    stages_of_replica: dict[tuple[str, int], list[StageKey]] = defaultdict(list)
    for stage in cells:
        stages_of_replica[stage.module, stage.replica].append(stage)

    order: dict[tuple[int, ...], list[Compute]] = {}
    in_flight: dict[StageKey, int] = {}
    for replica, stages in reversed(stages_of_replica.items()):
        if len(groups[replica]) == len(stages):
            for stage in reversed(stages):
                num_after = max((in_flight[target] for target in after[stage]), default=0)
                in_flight[stage] = 1 + num_after
                order[groups[replica][stage.stage]] = one_stage(cells[stage], routes, num_after)
        else:
            num_after = max((in_flight[target] for target in after[stages[-1]]), default=0)
            rounds = _Rounds(1 + cells[stages[0]][-1].microbatch, len(groups[replica]), len(stages), num_after)
            for place, group in enumerate(groups[replica]):
                chunks = [cells[stage] for stage in stages[place :: rounds.num_places]]
                num_warm_up = rounds.lead + forwards_per_place * (rounds.num_places - 1 - place)
                order[group] = rounds.merge(chunks, routes, num_warm_up)
            in_flight |= dict.fromkeys(stages, rounds.in_flight_on_entry(forwards_per_place))
    return schedule_of_groups(routes.plan, order.items())


class _Run(NamedTuple):
    """Consecutive microbatches [first, last) that go through one chunk before the group turns to the next."""

    first: int
    last: int
    num_turns: int
    """At least the number of places, so that a microbatch is back at the first place when its next turn comes."""


class _Rounds:
    """The turns of one replica's groups, forwards from the first chunk on, backwards from the last one on."""

    def __init__(self, num_microbatches: int, num_places: int, num_stages: int, num_after: int) -> None:
        """`num_after`: how many microbatches the modules after this one have in flight."""
        self.num_places, self.num_chunks = num_places, ceil(num_stages / num_places)
        number = max(1, num_microbatches // num_places)
        bounds = pairwise(num_microbatches * i // number for i in range(number + 1))
        self.runs = [_Run(first, last, max(last - first, num_places)) for first, last in bounds]
        # Before the last chunk gets a microbatch back, it must have begun that one and `num_after` more.
        forwards, backwards = self._turns_of_chunk(self.num_chunks - 1), self._turns_of_chunk(0)
        needed = [*forwards[num_after:], *forwards[-1:] * num_after]
        self.lead = max(forward - backward for forward, backward in zip(needed, backwards, strict=False))
        """How many turns of forwards the last place is ahead of its backwards."""

    def _turns_of_chunk(self, chunk: int) -> list[int]:
        """The turn of each microbatch's forward; it is the turn of its backward in the chunk as far from the last."""
        return [
            run.first * self.num_chunks + chunk * run.num_turns + i
            for run in self.runs
            for i in range(run.last - run.first)
        ]

    def in_flight_on_entry(self, forwards_per_place: int) -> int:
        """The most microbatches that the first stage has begun and not finished."""
        ahead = self.lead + forwards_per_place * (self.num_places - 1)
        forwards, backwards = self._turns_of_chunk(0), self._turns_of_chunk(self.num_chunks - 1)
        return max(bisect_right(forwards, ahead + turn) - m for m, turn in enumerate(backwards))

    def merge(self, chunks: Sequence[Sequence[Cell]], routes: Routes, num_warm_up: int) -> list[Compute]:
        """What a group with these chunks executes."""
        num_microbatches = self.runs[-1].last
        of_chunks = [forwards_of(cells, num_microbatches) for cells in chunks]
        of_chunks_back = [backwards_of(cells, num_microbatches, routes) for cells in reversed(chunks)]
        forwards: list[Compute | None] = []
        backwards: list[Compute | None] = []
        for first, last, num_turns in self.runs:
            rest = [None] * (num_turns - (last - first))
            lacking = [None] * num_turns * (self.num_chunks - len(chunks))
            for turns in of_chunks:
                forwards += turns[first:last]
                forwards += rest
            forwards += lacking
            backwards += lacking
            for turns in of_chunks_back:
                backwards += turns[first:last]
                backwards += rest
        return alternate(forwards, backwards, num_warm_up)
