"""The order in which a schedule's actions end on a virtual clock; detects deadlocks.

By their ends and not by their starts, because then a rank posts its receive for what ends while it computes before it
begins to compute, and the transfer is hidden. For the same reason every transfer takes time on this clock, less than
any difference between durations: moments are (seconds, ticks), and a transfer takes a tick. So does an action of no
duration, which keeps it behind what it waits for.

Each lane is run until it is blocked, then the lanes that wait for what it has done: no queue of events is needed, as
every action's end follows from those of the actions before it, in whatever order one looks at them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from motet.ragged_arrays import Bools, Floats, Ints, Rows, starts_of
from motet.schedule.action import Durations, Kind, unit_duration
from motet.schedule.dependencies import KINDS, NOTHING, Dependencies
from motet.schedule.schedule import Schedule, grid


class CyclicScheduleError(ValueError):
    """A schedule whose actions wait for each other. The message shows each rank's place."""


@dataclass(frozen=True, eq=False)
class Lanes:
    """Ranks that execute the same list of actions are one lane: what is done by all of them is looked at once."""

    actions: tuple[Ints, ...]
    """Numbers of the actions, by lane."""
    of_rank: Ints
    of_stage: Rows
    """Lanes of each stage's ranks: one, unless groups overlap."""


def lanes_of(schedule: Schedule, dependencies: Dependencies) -> Lanes:
    """A lane for each list of actions; ranks whose lists are one object share it."""
    lane_of_list: dict[int, int] = {}
    lists: list[Ints] = []
    of_rank = []
    for numbers in schedule.numbers(dependencies):
        if id(numbers) not in lane_of_list:
            lane_of_list[id(numbers)] = len(lists)
            lists.append(numbers)
        of_rank.append(lane_of_list[id(numbers)])
    of_stage = [sorted({of_rank[rank] for rank in stage.planned.ranks}) for stage in dependencies.routes.stages]
    return Lanes(
        tuple(lists),
        np.array(of_rank, dtype=np.int64),
        Rows(
            starts_of(np.array([len(lanes) for lanes in of_stage], dtype=np.int64)),
            np.array([lane for lanes in of_stage for lane in lanes], dtype=np.int64),
        ),
    )


def seconds_of_actions(numbers: Ints, dependencies: Dependencies, duration_s: Durations) -> Floats:
    """The durations of the actions of these numbers, by number; the others' are anything.

    A cost model's `compute_s` is not asked for each action if the model tells all at once (`ArrayCosts`). Forwards that
    ran in the iteration before take no time."""
    seconds = _seconds(numbers, dependencies, duration_s)
    ran_before = np.flatnonzero(dependencies.routes.cell_ran_before)
    if len(ran_before):
        seconds = seconds.copy()
        seconds[ran_before] = 0.0
    return seconds


def _seconds(numbers: Ints, dependencies: Dependencies, duration_s: Durations) -> Floats:
    costs = getattr(duration_s, "__self__", None)
    if costs is not None and hasattr(costs, "compute_seconds") and duration_s == costs.compute_s:
        all_seconds: Floats = costs.compute_seconds(dependencies)
        return all_seconds
    seconds = np.zeros(dependencies.num_actions)
    if duration_s is unit_duration:
        seconds[:] = 1.0
        whole = KINDS.index(Kind.BACKWARD) * dependencies.routes.num_cells
        seconds[whole : whole + dependencies.routes.num_cells] = 2.0
    else:
        seconds[numbers] = [duration_s(action) for action in dependencies.actions(numbers)]
    return seconds


def order_actions(
    schedule: Schedule, lanes: Lanes, dependencies: Dependencies, is_sent: Bools, duration_s: Durations
) -> Ints:
    """The numbers of the schedule's actions by their ends; ties by rank. `is_sent`: of each value that routes carry.

    Raises `CyclicScheduleError` if actions wait for each other, or for what no action makes."""
    clock = _Clock(schedule, lanes, dependencies, is_sent)
    end_s, ticks = clock.run(seconds_of_actions(clock.present, dependencies, duration_s))
    routes = dependencies.routes
    min_rank = np.array([min(stage.planned.ranks) for stage in routes.stages], dtype=np.int64)
    rank = min_rank[routes.cell_stage[clock.present % max(1, routes.num_cells)]]
    return clock.present[np.lexsort((rank, ticks, end_s))]


def check_acyclic(schedule: Schedule, dependencies: Dependencies) -> None:
    """Raises `CyclicScheduleError` as `order_actions` does. Independent of how long anything takes."""
    nothing_sent = np.zeros(2 * dependencies.routes.num_routes, dtype=bool)
    order_actions(schedule, lanes_of(schedule, dependencies), dependencies, nothing_sent, unit_duration)


def iteration_s(schedule: Schedule, dependencies: Dependencies, duration_s: Durations) -> float:
    """Time at which the last action ends if messages take no time. Raises `CyclicScheduleError` as `order_actions`
    does."""
    return float(times_s(schedule, dependencies, duration_s)[1].max(initial=0.0))


def times_s(schedule: Schedule, dependencies: Dependencies, duration_s: Durations) -> tuple[Floats, Floats]:
    """Start and end of each action by number, if messages take no time; 0 for actions that the schedule does not have.
    Raises `CyclicScheduleError` as `order_actions` does."""
    nothing_sent = np.zeros(2 * dependencies.routes.num_routes, dtype=bool)
    clock = _Clock(schedule, lanes_of(schedule, dependencies), dependencies, nothing_sent)
    seconds = seconds_of_actions(clock.present, dependencies, duration_s)
    end_s = np.zeros(dependencies.num_actions)
    end_s[clock.present], _ = clock.run(seconds)
    start_s = end_s.copy()
    start_s[clock.present] -= seconds[clock.present]
    return start_s, end_s


NONE, MANY, SHARED = -1, -2, -3


class _Clock:
    """Lanes stand one after the other in one sequence, and an action is known by its place there; one that several
    lanes do together, by its place in the first of them (its home)."""

    def __init__(self, schedule: Schedule, lanes: Lanes, dependencies: Dependencies, is_sent: Bools) -> None:
        self.schedule, self.lanes, self.dependencies = schedule, lanes, dependencies
        self.sequence = np.concatenate(lanes.actions)
        self.home_of_action = np.full(dependencies.num_actions, NOTHING)
        self.home_of_action[self.sequence[::-1]] = np.arange(len(self.sequence))[::-1]
        self.present = np.flatnonzero(self.home_of_action != NOTHING)
        self.bounds = starts_of(np.array([len(actions) for actions in lanes.actions], dtype=np.int64)).tolist()
        self.stage = dependencies.routes.cell_stage[self.sequence % max(1, dependencies.routes.num_cells)]
        self.awaited = self._awaited(is_sent)
        """Code of what each position waits for: twice the other's home, plus 1 if a transfer lies between."""
        self.only = self.awaited.only(none=NONE, many=MANY)
        self.only[lanes.of_stage.lengths[self.stage] > 1] = SHARED
        self.place = self.bounds[:-1]
        self.free_s = [0.0] * len(lanes.actions)
        self.free_ticks = [0] * len(lanes.actions)
        self.end_s = [-1.0] * len(self.sequence)
        """End time by home; negative until it has ended."""
        self.ticks = [0] * len(self.sequence)
        self.arrived: dict[int, set[int]] = {}
        """Lanes that have reached each home of an action of several lanes."""
        self.parked = [NONE] * len(self.sequence)
        """A lane that waits for each home that has not ended; `also_parked` names further ones."""
        self.also_parked = [NONE] * len(lanes.actions)

    def _awaited(self, is_sent: Bools) -> Rows:
        dependencies, sequence = self.dependencies, self.sequence
        num_kept = 3 * dependencies.routes.num_cells
        writer = np.full(2 * dependencies.routes.num_routes + num_kept, NOTHING)
        writes = dependencies.carried_writes.selected(self.present)
        writer[writes.values] = np.repeat(self.home_of_action[self.present], writes.lengths)
        kept_write = dependencies.kept_write[self.present]
        writer[kept_write[kept_write != NOTHING]] = self.home_of_action[self.present[kept_write != NOTHING]]
        reads = dependencies.carried_reads.selected(sequence)
        kept_read = dependencies.kept_read[sequence]
        keeps = kept_read != NOTHING
        kept = Rows(starts_of(keeps), kept_read[keeps])
        for rows in (reads, kept):
            if (missing := np.flatnonzero(writer[rows.values] == NOTHING)).size:
                place = np.searchsorted(rows.starts, missing[:1], side="right") - 1
                action, value = dependencies.actions(sequence[place])[0], int(rows.values[missing[0]])
                raise CyclicScheduleError(f"{action} reads {dependencies.value(value)}, which no action writes")
        if not self._keeps_order(writer[kept.values], np.flatnonzero(keeps)):
            reads = reads.joined(kept)
            is_sent = np.concatenate([is_sent, np.zeros(num_kept, dtype=bool)])
        return Rows(reads.starts, 2 * writer[reads.values] + is_sent[reads.values])

    def _keeps_order(self, written_at: Ints, read_at: Ints) -> bool:
        """Whether what stays on a rank is everywhere written before it is read: then nothing has to wait for it."""
        if (self.lanes.of_stage.lengths[self.stage] > 1).any():
            return False  # They may still, but homes are not enough to see it.
        lane = np.repeat(np.arange(len(self.lanes.actions)), np.diff(self.bounds))
        return bool(((written_at < read_at) & (lane[written_at] == lane[read_at])).all())

    def run(self, seconds: Floats) -> tuple[Floats, Ints]:
        """The moments at which the actions that are `present` end. `seconds`: by number."""
        self._run_lanes(seconds[self.sequence].tolist())
        if any(place < bound for place, bound in zip(self.place, self.bounds[1:], strict=True)):
            positions = [place - bound for place, bound in zip(self.place, self.bounds, strict=False)]
            marks = {rank: positions[lane] for rank, lane in enumerate(self.lanes.of_rank.tolist())}
            raise CyclicScheduleError(
                "the schedule's actions wait for each other:\n" + grid(self.schedule.ranks, marks)
            )
        homes = self.home_of_action[self.present]
        return np.array(self.end_s)[homes], np.array(self.ticks)[homes]

    def _run_lanes(self, seconds: list[float]) -> None:
        """Each until it is blocked, then those that waited for what it did. The one loop over all actions: plain."""
        end_s, ticks, parked, also_parked, only = (
            self.end_s,
            self.ticks,
            self.parked,
            self.also_parked,
            self.only.tolist(),
        )
        awake = list(range(len(self.place)))
        while awake:
            lane = awake.pop()
            place, bound = self.place[lane], self.bounds[lane + 1]
            now_s, now_ticks = self.free_s[lane], self.free_ticks[lane]
            code = NONE
            while place < bound:
                code = only[place]
                if code >= 0:
                    other = code >> 1
                    before_s = end_s[other]
                    if before_s >= now_s:
                        before_ticks = ticks[other] + (code & 1)
                        if before_s > now_s or before_ticks > now_ticks:
                            now_s, now_ticks = before_s, before_ticks
                    elif before_s < 0.0:
                        also_parked[lane], parked[other] = parked[other], lane
                        break
                elif code != NONE:
                    self.place[lane], self.free_s[lane], self.free_ticks[lane] = place, now_s, now_ticks
                    if code == SHARED:
                        awake += self._run_shared(lane, place, seconds)
                        break
                    moment = self._latest([lane], place)
                    if moment is None:
                        break
                    now_s, now_ticks = moment
                started_s = now_s
                now_s += seconds[place]
                if now_s == started_s:
                    now_ticks += 1
                end_s[place], ticks[place] = now_s, now_ticks
                waiting = parked[place]
                while waiting >= 0:
                    awake.append(waiting)
                    waiting = also_parked[waiting]
                place += 1
            if code != SHARED:
                self.place[lane], self.free_s[lane], self.free_ticks[lane] = place, now_s, now_ticks

    def _latest(self, lanes: Iterable[int], place: int) -> tuple[float, int] | None:
        """Time at which everything that the action waits for has happened; if it has not: None, and the last lane is
        parked."""
        moments = [(self.free_s[lane], self.free_ticks[lane]) for lane in lanes]
        for code in self.awaited[place].tolist():
            if self.end_s[code >> 1] < 0.0:
                *_, lane = lanes
                self.also_parked[lane], self.parked[code >> 1] = self.parked[code >> 1], lane
                return None
            moments.append((self.end_s[code >> 1], self.ticks[code >> 1] + (code & 1)))
        return max(moments)

    def _run_shared(self, lane: int, place: int, seconds: list[float]) -> list[int]:
        """Runs an action of several lanes when the last of them has reached it; returns the lanes that go on then."""
        home = int(self.home_of_action[self.sequence[place]])
        arrived = self.arrived.setdefault(home, set())
        arrived.add(lane)
        if len(arrived) < len(self.lanes.of_stage[self.stage[place]]):
            return []
        moment = self._latest([*(arrived - {lane}), lane], place)
        if moment is None:
            return []
        end_s = moment[0] + seconds[place]
        num_ticks = moment[1] + (end_s == moment[0])
        self.end_s[home], self.ticks[home] = end_s, num_ticks
        for other in arrived:
            self.place[other] += 1
            self.free_s[other], self.free_ticks[other] = end_s, num_ticks
        woken = sorted(arrived)
        waiting = self.parked[home]
        while waiting >= 0:
            woken.append(waiting)
            waiting = self.also_parked[waiting]
        return woken
