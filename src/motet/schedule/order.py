"""The order in which a schedule's actions end on a virtual clock, or the news that they wait for each other.

By their ends and not by their starts, because then a rank posts its receive for what ends while it computes before it
begins to compute, and the transfer is hidden. For the same reason every transfer takes time on this clock, less than
any difference between durations: moments are (seconds, ticks), and a transfer takes a tick. So does an action of no
duration, which keeps it behind what it waits for.

Each lane is run until it is blocked, then the lanes that wait for what it has done: no queue of events is needed, as
every action's end follows from those of the actions before it, in whatever order one looks at them.
"""

from dataclasses import dataclass

import numpy as np

from motet.arrays import Bools, Floats, Ints, Rows, starts_of
from motet.schedule.action import Durations, Kind, unit_duration
from motet.schedule.dependencies import KINDS, NOTHING, Dependencies
from motet.schedule.schedule import Schedule, grid


class CyclicScheduleError(ValueError):
    """A schedule whose actions wait for each other. The message shows each rank's place."""


@dataclass(frozen=True, eq=False)
class Lanes:
    """Ranks that execute the same list of actions are one lane: what is done by all of them is looked at once."""

    actions: tuple[Ints, ...]
    """For each lane, the numbers of its actions."""
    of_rank: Ints
    of_stage: Rows
    """For each stage of the routes, the lanes of its ranks: one, unless groups overlap."""


def lanes_of(schedule: Schedule, dependencies: Dependencies) -> Lanes:
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
    """The durations of the actions of these numbers, by number; 0 for the others."""
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
    sequence = np.concatenate(lanes.actions)
    clock = _Clock(schedule, lanes, dependencies, is_sent, sequence)
    clock.seconds = seconds_of_actions(clock.present, dependencies, duration_s).tolist()
    clock.run()
    present = clock.present
    end_s, ticks = np.array(clock.end_s)[present], np.array(clock.ticks)[present]
    min_rank = np.array([min(stage.planned.ranks) for stage in dependencies.routes.stages], dtype=np.int64)
    rank = min_rank[dependencies.routes.cell_stage[present % dependencies.routes.num_cells]]
    return present[np.lexsort((rank, ticks, end_s))]


def check_acyclic(schedule: Schedule, dependencies: Dependencies) -> None:
    """Raises `CyclicScheduleError` as `order_actions` does. Independent of how long anything takes."""
    nothing_sent = np.zeros(2 * dependencies.routes.num_routes, dtype=bool)
    order_actions(schedule, lanes_of(schedule, dependencies), dependencies, nothing_sent, unit_duration)


class _Clock:
    def __init__(
        self, schedule: Schedule, lanes: Lanes, dependencies: Dependencies, is_sent: Bools, sequence: Ints
    ) -> None:
        self.schedule, self.lanes, self.dependencies = schedule, lanes, dependencies
        is_present = np.zeros(dependencies.num_actions, dtype=bool)
        is_present[sequence] = True
        self.present = np.flatnonzero(is_present)
        self.sequence = sequence.tolist()
        self.bounds = starts_of(np.array([len(actions) for actions in lanes.actions], dtype=np.int64)).tolist()
        stage = dependencies.routes.cell_stage[sequence % max(1, dependencies.routes.num_cells)]
        is_shared = lanes.of_stage.lengths[stage] > 1
        self.any_shared = bool(is_shared.any())
        self.is_shared = is_shared.tolist()
        """For each place of the sequence, whether other lanes take part."""
        self.awaited, self.awaited_starts = self._awaited(sequence, is_sent)
        self.seconds: list[float] = []
        self.end_s = [-1.0] * dependencies.num_actions
        """Of each action; negative until it has ended."""
        self.ticks = [0] * dependencies.num_actions
        self.place = self.bounds[:-1]
        self.free_s = [0.0] * len(lanes.actions)
        self.free_ticks = [0] * len(lanes.actions)
        self.arrived: dict[int, set[int]] = {}
        """For each action that several lanes do together, the lanes that have reached it."""
        self.parked: dict[int, list[int]] = {}
        """For each action that has not ended, the lanes that wait for it."""

    def _awaited(self, sequence: Ints, is_sent: Bools) -> tuple[list[int], list[int]]:
        """For each place of the sequence, the actions whose ends it waits for: twice their number, plus 1 if a transfer
        lies between."""
        dependencies = self.dependencies
        writes, reads = (
            dependencies.carried_writes.selected(self.present),
            dependencies.carried_reads.selected(sequence),
        )
        num_carried = 2 * dependencies.routes.num_routes
        writer = np.full(num_carried + 3 * dependencies.routes.num_cells, NOTHING)
        writer[writes.values] = np.repeat(self.present, writes.lengths)
        kept = dependencies.kept_write[self.present]
        writer[kept[kept != NOTHING]] = self.present[kept != NOTHING]
        kept_read = dependencies.kept_read[sequence]
        for place, values in ((np.repeat(np.arange(len(sequence)), reads.lengths), reads.values), _without(kept_read)):
            if (missing := np.flatnonzero(writer[values] == NOTHING)).size:
                action = dependencies.actions(sequence[place[missing[:1]]])[0]
                value = dependencies.value(int(values[missing[0]]))
                raise CyclicScheduleError(f"{action} reads {value}, which no action writes")
        if not self._keeps_order(sequence, writer, kept_read):
            keeps = kept_read != NOTHING
            kept_rows = Rows(starts_of(keeps), kept_read[keeps])
            reads = reads.joined(kept_rows)
            is_sent = np.concatenate([is_sent, np.zeros(3 * dependencies.routes.num_cells, dtype=bool)])
        return (2 * writer[reads.values] + is_sent[reads.values]).tolist(), reads.starts.tolist()

    def _keeps_order(self, sequence: Ints, writer: Ints, kept_read: Ints) -> bool:
        """Whether what stays on a rank is everywhere written before it is read: then nothing has to wait for it."""
        if self.any_shared:
            return False  # They may still, but a place for each action is not enough to see it.
        place = np.empty(self.dependencies.num_actions, dtype=np.int64)
        place[sequence] = np.arange(len(sequence))
        lane = np.repeat(np.arange(len(self.lanes.actions)), [len(actions) for actions in self.lanes.actions])
        read_at = np.flatnonzero(kept_read != NOTHING)
        written_at = place[writer[kept_read[read_at]]]
        return bool(((written_at < read_at) & (lane[written_at] == lane[read_at])).all())

    def run(self) -> None:
        awake = list(range(len(self.place)))
        while awake:
            self._run_lane(awake.pop(), awake)
        if any(place < bound for place, bound in zip(self.place, self.bounds[1:], strict=True)):
            positions = [place - bound for place, bound in zip(self.place, self.bounds, strict=False)]
            marks = {rank: positions[lane] for rank, lane in enumerate(self.lanes.of_rank.tolist())}
            raise CyclicScheduleError(
                "the schedule's actions wait for each other:\n" + grid(self.schedule.ranks, marks)
            )

    def _run_lane(self, lane: int, awake: list[int]) -> None:
        """Runs the lane until it is blocked; puts into `awake` the lanes that waited for what it did."""
        end_s, ticks, seconds, parked = self.end_s, self.ticks, self.seconds, self.parked
        awaited, starts = self.awaited, self.awaited_starts
        free_s, free_ticks = self.free_s[lane], self.free_ticks[lane]
        for place in range(self.place[lane], self.bounds[lane + 1]):
            action = self.sequence[place]
            if self.is_shared[place]:
                self.place[lane], self.free_s[lane], self.free_ticks[lane] = place, free_s, free_ticks
                self._run_shared(lane, action, place, awake)
                return
            for code in awaited[starts[place] : starts[place + 1]]:
                before_s = end_s[code >> 1]
                if before_s >= free_s:
                    before_ticks = ticks[code >> 1] + (code & 1)
                    if before_s > free_s or before_ticks > free_ticks:
                        free_s, free_ticks = before_s, before_ticks
                elif before_s < 0.0:
                    # What has been waited for until here is waited for once more when it goes on.
                    self.place[lane], self.free_s[lane], self.free_ticks[lane] = place, free_s, free_ticks
                    parked.setdefault(code >> 1, []).append(lane)
                    return
            started_s = free_s
            free_s += seconds[action]
            if free_s == started_s:
                free_ticks += 1
            end_s[action], ticks[action] = free_s, free_ticks
            if action in parked:
                awake += parked.pop(action)
        self.place[lane] = self.bounds[lane + 1]

    def _run_shared(self, lane: int, action: int, place: int, awake: list[int]) -> None:
        """Runs an action that several lanes do together, when the last of them has reached it."""
        lanes = self.lanes.of_stage[self.dependencies.routes.cell_stage[action % self.dependencies.routes.num_cells]]
        arrived = self.arrived.setdefault(action, set())
        arrived.add(lane)
        if len(arrived) < len(lanes):
            return
        moments = [(self.free_s[other], self.free_ticks[other]) for other in arrived]
        for code in self.awaited[self.awaited_starts[place] : self.awaited_starts[place + 1]]:
            if self.end_s[code >> 1] < 0.0:
                self.parked.setdefault(code >> 1, []).append(lane)
                return
            moments.append((self.end_s[code >> 1], self.ticks[code >> 1] + (code & 1)))
        started_s, num_ticks = max(moments)
        end_s = started_s + self.seconds[action]
        num_ticks += end_s == started_s
        self.end_s[action], self.ticks[action] = end_s, num_ticks
        for other in arrived:
            self.place[other] += 1
            self.free_s[other], self.free_ticks[other] = end_s, num_ticks
        awake += [*sorted(arrived), *self.parked.pop(action, [])]


def _without(values: Ints) -> tuple[Ints, Ints]:
    """The places at which something stands, and what stands there."""
    places = np.flatnonzero(values != NOTHING)
    return places, values[places]
