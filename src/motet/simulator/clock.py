"""Times of a program's steps where computations share no processor and links share no cable.

Each step's begin then follows from the ends of earlier steps in the program's order, so one pass over that order
suffices:

* a compute action begins when its ranks' last actions have ended and all that it reads has arrived;
* a message begins when the last actions before it on its sender and on its receiver have ended, and the message before
  it on the same link;
* a reduction begins when the last actions before it on all participants have ended, and their earlier reductions.

`motet.simulator.event_loop` applies the same rules to shared resources.
"""

from dataclasses import dataclass

import numpy as np

from motet.ragged_arrays import Floats
from motet.schedule.lower import Program
from motet.simulator.costs import StepCosts

NONE, MANY = -1, -2


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds since the begin of the iteration, by place in `Program.actions`, by message and by reduction."""

    action_start: Floats
    action_end: Floats
    message_start: Floats
    message_end: Floats
    reduction_start: Floats
    reduction_end: Floats

    @property
    def end_s(self) -> float:
        """End of the last step."""
        ends = (self.action_end, self.message_end, self.reduction_end)
        return max((float(end.max()) for end in ends if len(end)), default=0.0)


def run_in_order(program: Program, seconds: StepCosts) -> Times:
    return _Pass(program, seconds).run()


class _Pass:
    def __init__(self, program: Program, seconds: StepCosts) -> None:
        self.program, self.seconds = program, seconds
        self.free_s = [0.0] * len(program.lanes.actions)
        """End of the last action of each lane so far."""
        self.arrived_s = [0.0] * (2 * program.dependencies.routes.num_routes)
        self.reduction_times: list[tuple[float, float]] = []
        self.reductions_free_s = np.zeros(len(program.lanes.of_rank))

    def run(self) -> Times:
        program, free_s, arrived_s = self.program, self.free_s, self.arrived_s
        lanes, routes = program.lanes, program.dependencies.routes
        stage = routes.cell_stage[program.actions % max(1, routes.num_cells)]
        reads = program.dependencies.carried_reads.selected(program.actions)
        # Most actions read at most one value and run on one lane; a negative number marks the others.
        read = reads.only(none=NONE, many=MANY)
        read[lanes.of_stage.lengths[stage] > 1] = MANY
        message_starts = program.message_starts.tolist()
        value, link, message_s = program.message_value.tolist(), program.message_link.tolist(), self.seconds.message_s
        receiver = lanes.of_rank[program.links[:, 1]].tolist()
        link_free_s = [0.0] * len(receiver)
        reduction_after = [*program.reduction_after.tolist(), -1]
        starts: list[float] = []
        ends: list[float] = []
        message_start: list[float] = []
        message_end: list[float] = []
        next_reduction = first_message = 0
        per_action = zip(
            lanes.of_stage.values[lanes.of_stage.starts[stage]].tolist(),
            read.tolist(),
            self.seconds.compute_s.tolist(),
            message_starts[1:],
            strict=True,
        )
        of_messages = zip(value, link, message_s.tolist(), strict=True)
        for place, (lane, only_read, action_s, last_message) in enumerate(per_action):
            now = free_s[lane]
            if only_read >= 0:
                if arrived_s[only_read] > now:
                    now = arrived_s[only_read]
            elif only_read == MANY:
                group = lanes.of_stage[stage[place]].tolist()
                now = max(now, *(free_s[other] for other in group), *(arrived_s[v] for v in reads[place].tolist()))
                for other in group:
                    free_s[other] = now + action_s
            starts.append(now)
            now += action_s
            ends.append(now)
            free_s[lane] = now
            # The sender of a new value is free now.
            for _ in range(first_message, last_message):
                carried, on, seconds = next(of_messages)
                begin = now
                if free_s[receiver[on]] > begin:
                    begin = free_s[receiver[on]]
                if link_free_s[on] > begin:
                    begin = link_free_s[on]
                message_start.append(begin)
                begin += seconds
                message_end.append(begin)
                link_free_s[on] = begin
                if begin > arrived_s[carried]:
                    arrived_s[carried] = begin
            first_message = last_message
            while reduction_after[next_reduction] == place:
                self._reduce(next_reduction)
                next_reduction += 1
        while next_reduction < len(program.reductions):  # If there are no actions at all.
            self._reduce(next_reduction)
            next_reduction += 1
        reductions = np.array(self.reduction_times, dtype=float).reshape(-1, 2)
        return Times(
            action_start=np.array(starts, dtype=float),
            action_end=np.array(ends, dtype=float),
            message_start=np.array(message_start, dtype=float),
            message_end=np.array(message_end, dtype=float),
            reduction_start=reductions[:, 0],
            reduction_end=reductions[:, 1],
        )

    def _reduce(self, i: int) -> None:
        ranks = np.array(self.program.participants(self.program.reductions[i]), dtype=np.int64)
        lanes = np.unique(self.program.lanes.of_rank[ranks]).tolist()
        begin = max(float(self.reductions_free_s[ranks].max()), *(self.free_s[lane] for lane in lanes))
        end = begin + float(self.seconds.reduce_s[i])
        self.reductions_free_s[ranks] = end
        self.reduction_times.append((begin, end))
