"""When each step of a program begins and ends, if no two computations share a processor and no two links a cable.

Then each step's begin follows from the ends of steps that come before it in the program's order, so one pass over that
order is enough and no queue of events is needed:

* a compute action begins when its ranks' last actions have ended and all that it reads has arrived;
* a message when the last actions before it on its sender and on its receiver have ended, and the message before it on
  the same link;
* a reduction when the last actions before it on all that take part have ended, and their reductions before it.

`motet.simulator.events` has the same rules for what shares resources.
"""

from dataclasses import dataclass

import numpy as np

from motet.arrays import Floats, Ints, Rows
from motet.schedule.lower import Program
from motet.simulator.step_costs import StepCosts


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds since the iteration's begin, by place in `Program.actions`, by message, by reduction."""

    action_start: Floats
    action_end: Floats
    message_start: Floats
    message_end: Floats
    reduction_start: Floats
    reduction_end: Floats

    @property
    def end_s(self) -> float:
        """When all has ended."""
        ends = (self.action_end, self.message_end, self.reduction_end)
        return max((float(end.max()) for end in ends if len(end)), default=0.0)


def run_in_order(program: Program, seconds: StepCosts) -> Times:
    return _Pass(program, seconds).run()


class _Pass:
    def __init__(self, program: Program, seconds: StepCosts) -> None:
        self.program, self.seconds = program, seconds
        lanes = program.lanes
        self.free_s = [0.0] * len(lanes.actions)
        """For each lane, the end of its last action so far."""
        num_ranks = len(lanes.of_rank)
        links, link = np.unique(program.message_sender * num_ranks + program.message_receiver, return_inverse=True)
        self.link = link.tolist()
        self.link_free_s = [0.0] * len(links)
        self.arrived_s = [0.0] * (2 * program.dependencies.routes.num_routes)
        self.reduction_times: list[tuple[float, float]] = []
        self.reductions_free_s = np.zeros(num_ranks)

    def run(self) -> Times:
        program, free_s, arrived_s, link_free_s = self.program, self.free_s, self.arrived_s, self.link_free_s
        lanes, routes = program.lanes, program.dependencies.routes
        stage = routes.cell_stage[program.actions % max(1, routes.num_cells)]
        lane_of = lanes.of_stage.values[lanes.of_stage.starts[stage]].tolist()
        others = _other_lanes(lanes.of_stage, stage)
        reads = program.dependencies.carried_reads.selected(program.actions)
        read, read_starts = reads.values.tolist(), reads.starts.tolist()
        compute_s, message_s = self.seconds.compute_s.tolist(), self.seconds.message_s.tolist()
        value, link = program.message_value.tolist(), self.link
        sender = lanes.of_rank[program.message_sender].tolist()
        receiver = lanes.of_rank[program.message_receiver].tolist()
        message_starts = program.message_starts.tolist()
        reduction_after = [*program.reduction_after.tolist(), -1]
        starts: list[float] = []
        ends: list[float] = []
        message_start: list[float] = []
        message_end: list[float] = []
        next_reduction = 0
        first_read = first_message = 0
        for place, lane in enumerate(lane_of):
            now = free_s[lane]
            if place in others:
                now = max(now, *(free_s[other] for other in others[place]))
            last_read = read_starts[place + 1]
            while first_read < last_read:
                if arrived_s[read[first_read]] > now:
                    now = arrived_s[read[first_read]]
                first_read += 1
            starts.append(now)
            now += compute_s[place]
            ends.append(now)
            free_s[lane] = now
            if place in others:
                for other in others[place]:
                    free_s[other] = now
            last_message = message_starts[place + 1]
            while first_message < last_message:
                m = first_message
                begin, received = free_s[sender[m]], free_s[receiver[m]]
                if received > begin:
                    begin = received
                if link_free_s[link[m]] > begin:
                    begin = link_free_s[link[m]]
                message_start.append(begin)
                begin += message_s[m]
                message_end.append(begin)
                link_free_s[link[m]] = begin
                if begin > arrived_s[value[m]]:
                    arrived_s[value[m]] = begin
                first_message += 1
            while reduction_after[next_reduction] == place:
                self._reduce(next_reduction)
                next_reduction += 1
        while next_reduction < len(program.reductions):  # If there are no actions at all.
            self._reduce(next_reduction)
            next_reduction += 1
        reductions = np.array(self.reduction_times, dtype=float).reshape(-1, 2)
        return Times(
            np.array(starts, dtype=float),
            np.array(ends, dtype=float),
            np.array(message_start, dtype=float),
            np.array(message_end, dtype=float),
            reductions[:, 0],
            reductions[:, 1],
        )

    def _reduce(self, i: int) -> None:
        ranks = np.array(self.program.participants(self.program.reductions[i]), dtype=np.int64)
        lanes = np.unique(self.program.lanes.of_rank[ranks]).tolist()
        begin = max(float(self.reductions_free_s[ranks].max()), *(self.free_s[lane] for lane in lanes))
        end = begin + float(self.seconds.reduce_s[i])
        self.reductions_free_s[ranks] = end
        self.reduction_times.append((begin, end))


def _other_lanes(of_stage: Rows, stage: Ints) -> dict[int, list[int]]:
    """For each action whose group has several lanes, all of them but the first."""
    shared = np.flatnonzero(of_stage.lengths[stage] > 1)
    return {place: of_stage[stage[place]].tolist()[1:] for place in shared.tolist()}
