"""List scheduling by critical paths, with backwards split into halves, for stages on any ranks.

Chains that go round their groups several times with unequal runs, and encoders between them, leave interleaved 1F1B
with bubbles even where every group has equally much work. Here the action with the longest path to the end of the
iteration goes first, by `list_schedule.Policy`; weight halves fill what is left. Two weights decide how much sooner
earlier microbatches and backwards go. Which are best depends on the plan: several are tried on a virtual clock, on
which messages take no time, each is improved (`latest_first`), and the shortest counts, for each pipeline by itself. A
microbatch without an input gradient has its whole backward deferred.

Limits: no proof of any kind. Forwards may run far ahead, as far as the memory allows: activations of many microbatches
are held. Of large problems fewer policies are tried (`MAX_TRIED`).
"""

from collections.abc import Iterator
from math import inf

import numpy as np

from motet.schedule.action import Durations, unit_duration
from motet.schedule.generators.latest_first import LatestFirst
from motet.schedule.generators.list_schedule import ListClock, MemoryLimit, Policy, Ranks
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule

POLICIES = tuple(
    Policy(earlier, backward)
    for earlier, backward in (
        *((1.0, -0.3), (1.5, -1.0), (0.5, 0.0), (4.0, 0.0), (0.0, 0.3), (1.0, 0.0), (0.5, -0.3), (8.0, 1.0)),
        *((0.5, 0.3), (2.0, 0.0), (1.0, 0.3), (2.0, 0.3), (0.5, 1.0), (4.0, 3.0), (0.0, 0.0), (0.0, 1.0)),
    )
)
"""Those that were best on a few of Cornstarch's models come first, unlike ones next to each other."""
NUM_IMPROVED = 1
"""How often each schedule is improved: a second time rarely gains anything."""
PER_POLICY = 1 + NUM_IMPROVED
"""Schedules of each policy."""
MAX_TRIED = 12_000
"""Cells of a pipeline that are scheduled at most, in all tries together."""
MAX_IDLE_TRIES = 4
"""Policies in a row that make no pipeline's schedule shorter, after which no others are tried for it."""
LEAST_GAIN = 1e-3
"""Share by which a schedule must become shorter to count for that."""


def critical_path(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """`costs`: durations that paths are measured by; by default a backward takes twice as long as a forward."""
    ranks = Ranks(routes)
    clock = ListClock(routes, ranks, costs or unit_duration, memory, splits=True)
    num_cells = np.bincount(np.array(clock.pipeline)[routes.cell_stage], minlength=clock.num_pipelines)
    num_tries = np.maximum(1, MAX_TRIED // np.maximum(1, num_cells)).tolist()
    lists: list[list[int]] = [[] for _ in ranks.stages_of_unit]
    best_s, last_gain = [inf] * clock.num_pipelines, [0] * clock.num_pipelines
    left = set(range(clock.num_pipelines))
    for number, tried in enumerate(_tries(clock), start=1):
        better = {p for p in left if clock.ended_s[p] < best_s[p]}
        for unit, stages in enumerate(ranks.stages_of_unit):
            if stages and clock.pipeline[stages[0]] in better:
                lists[unit] = tried[unit]
        for p in better:
            if clock.ended_s[p] < best_s[p] * (1 - LEAST_GAIN):
                last_gain[p] = number
            best_s[p] = clock.ended_s[p]
        # Each pipeline has the same tries, whether others are simulated too or not.
        left = {p for p in left if number < num_tries[p] and number < last_gain[p] + MAX_IDLE_TRIES * PER_POLICY}
        if not left:
            break
    return ranks.schedule(routes, lists)


def _tries(clock: ListClock) -> Iterator[list[list[int]]]:
    """The actions of each unit under each policy, and their improvements."""
    reversed_clock = LatestFirst(clock)
    for policy in POLICIES:
        yield clock.run(policy)
        for _ in range(NUM_IMPROVED):
            yield clock.run(most_urgent_first=reversed_clock.by_latest_start(clock.ends_s))
