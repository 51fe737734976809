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

from collections import defaultdict
from collections.abc import Sequence, Set
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np

from motet.ragged_arrays import Ints
from motet.schedule.action import Durations
from motet.schedule.dependencies import NOTHING, Dependencies
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.generators.turns import alternate, backward_turns, forward_turns, num_microbatches, one_group
from motet.schedule.routes import Routes, StageCells
from motet.schedule.schedule import Schedule, schedule_of_groups
from motet.schedule.stage_graph import StageKey, cuts_alike, groups_in_rounds, microbatches_in_flight, stages_after


def interleaved_1f1b(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs` and `memory` matter only where the closed form does not hold."""
    return _interleaved(routes, costs, memory, forwards_per_place=2)


def interleaved_1f1b_adjusted(
    routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None
) -> Schedule:
    """Interleaved 1F1B with the adjusted warm-up. `costs` and `memory` matter only where the closed form does not
    hold."""
    return _interleaved(routes, costs, memory, forwards_per_place=1)


def _interleaved(
    routes: Routes, costs: Durations | None, memory: MemoryLimit | None, *, forwards_per_place: int
) -> Schedule:
    if memory is None:
        order = order_in_rounds(routes, routes.plan.modules.keys(), forwards_per_place)
        if order is not None:
            return schedule_of_groups(Dependencies(routes), order)
    return list_schedule(routes, costs, in_flight=microbatches_in_flight(routes), memory=memory)


def order_in_rounds(
    routes: Routes, modules: Set[str], forwards_per_place: int
) -> list[tuple[tuple[int, ...], Ints]] | None:
    """Actions of each group of these modules, as if there were no others; None where the closed form does not hold.

    `forwards_per_place`: how many more forwards than the next place a group begins with."""
    groups = groups_in_rounds(routes.plan, modules)
    if groups is None or not cuts_alike(routes, modules):
        return None
    after = stages_after(routes)
    stages_of_replica: dict[tuple[str, int], list[StageCells]] = defaultdict(list)
    for stage in routes.stages:
        if stage.module in modules:
            stages_of_replica[stage.module, stage.replica].append(stage)

    order: list[tuple[tuple[int, ...], Ints]] = []
    in_flight: dict[StageKey, int] = {}
    for replica, stages in reversed(stages_of_replica.items()):
        keys = [StageKey(*stage[:3]) for stage in stages]
        if len(groups[replica]) == len(stages):
            for key, stage in reversed(list(zip(keys, stages, strict=True))):
                num_after = max((in_flight[target] for target in after[key] if target in in_flight), default=0)
                in_flight[key] = 1 + num_after
                order.append((stage.planned.ranks, one_group(routes, [stage], num_after)))
        else:
            num_after = max((in_flight[target] for target in after[keys[-1]] if target in in_flight), default=0)
            rounds = _Rounds(num_microbatches(routes, stages[0]), len(groups[replica]), len(stages), num_after)
            for place, group in enumerate(groups[replica]):
                num_warm_up = rounds.lead + forwards_per_place * (rounds.num_places - 1 - place)
                order.append((group, rounds.merge(routes, stages[place :: rounds.num_places], num_warm_up)))
            in_flight |= dict.fromkeys(keys, rounds.in_flight_on_entry(forwards_per_place))
    return order


class _Run(NamedTuple):
    """Consecutive microbatches [first, last) that go through one chunk before the group turns to the next."""

    first: int
    last: int
    num_turns: int
    """Number of microbatches per round: at least the number of places, so that a microbatch is back at the first place
    in time."""


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
        needed = np.minimum(np.arange(num_microbatches) + num_after, num_microbatches - 1)
        self.lead = int((forwards[needed] - backwards).max())
        """Number of forward turns by which the last place is ahead of its backwards."""

    def _turns_of_chunk(self, chunk: int) -> Ints:
        """The turn of each microbatch's forward; it is the turn of its backward in the chunk as far from the last."""
        return np.concatenate(
            [run.first * self.num_chunks + chunk * run.num_turns + np.arange(run.last - run.first) for run in self.runs]
        )

    def in_flight_on_entry(self, forwards_per_place: int) -> int:
        """The most microbatches that the first stage has begun and not finished."""
        ahead = self.lead + forwards_per_place * (self.num_places - 1)
        forwards, backwards = self._turns_of_chunk(0), self._turns_of_chunk(self.num_chunks - 1)
        begun = np.searchsorted(forwards, ahead + backwards, side="right")
        return int((begun - np.arange(len(begun))).max())

    def merge(self, routes: Routes, chunks: Sequence[StageCells], num_warm_up: int) -> Ints:
        """Actions of a group with these chunks, in order."""
        last = self.runs[-1]
        forwards = np.full(last.first * self.num_chunks + self.num_chunks * last.num_turns, NOTHING)
        backwards = forwards.copy()
        for chunk, stage in enumerate(chunks):
            forwards[self._turns_of_chunk(chunk)] = forward_turns(routes, stage, last.last)
            backwards[self._turns_of_chunk(self.num_chunks - 1 - chunk)] = backward_turns(routes, stage, last.last)
        return alternate(forwards, backwards, num_warm_up)
