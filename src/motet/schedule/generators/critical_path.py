"""List scheduling by critical paths, with backwards split into halves, for stages on any ranks.

Chains that go round their groups several times with unequal runs, and encoders between them, leave interleaved 1F1B
with bubbles even where every group has equally much work. Here the action with the longest path to the end of the
iteration goes first, by `list_schedule.Policy`; weight halves fill what is left. Two weights decide how much sooner
earlier microbatches and backwards go. Which are best depends on the plan: several are tried on a virtual clock, on
which messages take no time, each is improved (`latest_first`), and the shortest counts, for each pipeline by itself. A
microbatch without an input gradient has its whole backward deferred.

`iterated_critical_path` then disturbs each pipeline's best schedule and improves it again, several times (iterated
local search: Lourenço, Martin and Stützle 2003). On its clock it is never longer; it takes several times as long to
make.

Limits: no proof of any kind. Forwards may run far ahead, as far as the memory allows: activations of many microbatches
are held. Fewer policies are tried for large problems (`MAX_TRIED`), and where several in a row gain nothing
(`MAX_IDLE_POLICIES`).
"""

from collections.abc import Iterator, Set
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
MAX_IDLE_POLICIES = 4
"""Policies in a row that do not shorten a pipeline's schedule, after which no others are tried for it."""
LEAST_GAIN = 1e-3
"""Share by which a schedule must become shorter to count for that."""
NUM_RESTARTS = 40
"""How often `iterated_critical_path` disturbs the best schedule of each pipeline, at most."""
MAX_RESTARTED = 20_000
"""Cells of a pipeline that are disturbed at most, in all restarts together."""
DISTURBANCES = (1.0, 3.0)
"""Standard deviations, in turn, of how far ends of actions are moved, in mean durations of the pipeline's actions."""


def critical_path(
    routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None, num_restarts: int = 0
) -> Schedule:
    """`costs`: durations that paths are measured by; by default a backward takes twice as long as a forward.
    `num_restarts`: how often each pipeline's best schedule is disturbed and improved again, at most."""
    ranks = Ranks(routes)
    clock = ListClock(routes, ranks, costs or unit_duration, memory, splits=True)
    best, reversed_clock = _Best(clock), LatestFirst(clock)
    num_cells = np.maximum(1, np.bincount(best.pipeline[routes.cell_stage], minlength=clock.num_pipelines))
    # Each pipeline has the same tries, whether others are simulated too or not.
    num_tries = np.maximum(1, MAX_TRIED // num_cells).tolist()
    last_gain, left = [0] * clock.num_pipelines, set(range(clock.num_pipelines))
    for number, lists in enumerate(_under_policies(clock, reversed_clock), start=1):
        for p in best.take(lists, left):
            last_gain[p] = number
        left = {p for p in left if number < num_tries[p] and number < last_gain[p] + MAX_IDLE_POLICIES * PER_POLICY}
        if not left:
            break
    num_of_pipeline = np.minimum(num_restarts, MAX_RESTARTED // num_cells).tolist()
    for number in range(max(num_of_pipeline)):
        left = {p for p, most in enumerate(num_of_pipeline) if number < most}
        best.take(clock.run(most_urgent_first=reversed_clock.by_latest_start(best.disturbed(number))), left)
        best.take(clock.run(most_urgent_first=reversed_clock.by_latest_start(clock.ends_s)), left)
    return ranks.schedule(routes, best.lists)


def iterated_critical_path(
    routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None
) -> Schedule:
    """`critical_path`, whose best schedule is disturbed and improved again many times (iterated local search)."""
    return critical_path(routes, costs, memory=memory, num_restarts=NUM_RESTARTS)


class _Best:
    """The shortest schedule of each pipeline so far."""

    def __init__(self, clock: ListClock) -> None:
        self._clock = clock
        self.pipeline = np.array(clock.pipeline)
        """Of each stage."""
        of_action = self.pipeline[np.array(clock.cell_stage)[clock.actions % clock.num_cells]]
        self._actions = [clock.actions[of_action == p] for p in range(clock.num_pipelines)]
        self._seconds = np.array(clock.tables.seconds)
        self.lists: list[list[int]] = [[] for _ in clock.stages_of_unit]
        """The actions of each unit."""
        self._ended_s = [inf] * clock.num_pipelines
        self._ends_s = np.zeros(len(self._seconds))

    def take(self, lists: list[list[int]], pipelines: Set[int]) -> list[int]:
        """Keeps the clock's last schedule for those of these pipelines that it is shorter for; returns those that
        gained much."""
        clock, ended_s = self._clock, self._clock.ended_s
        better = {p for p in pipelines if ended_s[p] < self._ended_s[p]}
        gained = [p for p in better if ended_s[p] < self._ended_s[p] * (1 - LEAST_GAIN)]
        for unit, stages in enumerate(clock.stages_of_unit):
            if stages and clock.pipeline[stages[0]] in better:
                self.lists[unit] = lists[unit]
        for p in better:
            self._ended_s[p] = ended_s[p]
            self._ends_s[self._actions[p]] = np.array(clock.ends_s)[self._actions[p]]
        return gained

    def disturbed(self, number: int) -> list[float]:
        """Ends of all actions, moved at random by about `DISTURBANCES` of the pipeline's mean action."""
        ends_s = self._ends_s.copy()
        for actions in self._actions:
            if len(actions):
                noise = np.random.default_rng(number).standard_normal(len(actions))
                ends_s[actions] += DISTURBANCES[number % len(DISTURBANCES)] * self._seconds[actions].mean() * noise
        moved: list[float] = ends_s.tolist()
        return moved


def _under_policies(clock: ListClock, reversed_clock: LatestFirst) -> Iterator[list[list[int]]]:
    """The actions of each unit under each policy, and their improvements."""
    for policy in POLICIES:
        yield clock.run(policy)
        for _ in range(NUM_IMPROVED):
            yield clock.run(most_urgent_first=reversed_clock.by_latest_start(clock.ends_s))
