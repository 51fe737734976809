"""What a simulation tells: times, the timeline, each rank's memory, and where the idle time comes from.

Numbers are kept in arrays; spans and curves are made when they are asked for.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from motet.arrays import Floats
from motet.schedule.action import Compute
from motet.schedule.lower import Message, Program
from motet.schedule.routes import Cell
from motet.simulator.alike import Folding
from motet.simulator.clock import Times
from motet.simulator.costs import Costs
from motet.simulator.memory import MemoryCurve, memory_curves
from motet.simulator.step_costs import StepCosts
from motet.timeline import Span, Timeline


@dataclass(frozen=True, eq=False)
class SimulationResult:
    program: Program
    costs: Costs
    seconds: StepCosts
    times: Times
    folding: Folding | None = None
    """Which pipelines stand for others, if not each for itself."""

    @property
    def num_ranks(self) -> int:
        return len(self.program.lanes.of_rank)

    @property
    def _first_s(self) -> float:
        starts = (self.times.action_start, self.times.message_start, self.times.reduction_start)
        return min((float(start.min()) for start in starts if len(start)), default=0.0)

    @cached_property
    def gathers(self) -> tuple[tuple[float, float], ...]:
        """When the new parameters of each reduction's layers are gathered: after the optimizer's step, one after the
        other on each rank, in the order in which the layers are needed next."""
        free = np.full(self.num_ranks, self.times.end_s + self.costs.fixed_s, dtype=float)
        result = [(0.0, 0.0)] * len(self.program.reductions)
        for i, reduce in reversed(list(enumerate(self.program.reductions))):
            ranks = np.array(self.program.participants(reduce), dtype=np.int64)
            begin = float(free[ranks].max())
            end = begin + float(self.seconds.gather_s[i])
            result[i] = (begin, end)
            if end > begin:
                free[ranks] = end
        return tuple(result)

    @cached_property
    def iteration_time_s(self) -> float:
        """From the first step's begin until the last rank is ready for the next iteration."""
        computed = self.times.end_s + self.costs.fixed_s
        return max(computed, max((end for begin, end in self.gathers if end > begin), default=0.0)) - self._first_s

    @cached_property
    def busy_s(self) -> Floats:
        """For each rank, the time for which it computes."""
        routes = self.program.dependencies.routes
        stage = routes.cell_stage[self.program.actions % max(1, routes.num_cells)]
        busy = np.bincount(stage, self.times.action_end - self.times.action_start, minlength=len(routes.stages))
        result = np.full(self.num_ranks, self.costs.fixed_s, dtype=float)
        for stage_cells, seconds in zip(routes.stages, busy.tolist(), strict=True):
            result[list(stage_cells.planned.ranks)] += seconds
        return result if self.folding is None else result[self.folding.rank_of]

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute, 0 to 1."""
        available = self.num_ranks * self.iteration_time_s
        return 1.0 - float(self.busy_s.sum()) / available if available else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        program, times = self.program, self.times
        actions = program.dependencies.actions(program.actions)
        spans: list[list[Span]] = []
        for action, begin, end in zip(actions, times.action_start.tolist(), times.action_end.tolist(), strict=True):
            copies = [Compute(action.kind, cell) for cell in self._copies(action.cell)]
            spans.append(
                [
                    Span(rank, str(copy), copy.kind.value, begin, end)
                    for copy in copies
                    for rank in program.participants(copy)
                ]
            )
        for message, begin, end in zip(
            program.messages, times.message_start.tolist(), times.message_end.tolist(), strict=True
        ):
            copied = [Span(copy.sender, str(copy), "message", begin, end) for copy in self._message_copies(message)]
            spans.append(copied)
        reduction_times = zip(times.reduction_start.tolist(), times.reduction_end.tolist(), strict=True)
        for reduce, (begin, end) in zip(program.reductions, reduction_times, strict=True):
            spans.append([Span(rank, str(reduce), "reduce", begin, end) for rank in program.participants(reduce)])
        in_order = [span for i in program.order_of_steps.tolist() for span in spans[i]]
        last = times.end_s
        if self.costs.fixed_s:
            in_order += [
                Span(rank, "optimizer", "optimizer", last, last + self.costs.fixed_s) for rank in range(self.num_ranks)
            ]
        for reduce, (begin, end) in zip(program.reductions, self.gathers, strict=True):
            if end > begin:
                name = str(reduce).replace(".R[", ".G[")
                in_order += [Span(rank, name, "gather", begin, end) for rank in program.participants(reduce)]
        return Timeline(tuple(in_order), self.num_ranks)

    def _copies(self, cell: Cell) -> list[Cell]:
        """The cells that this one stands for."""
        if self.folding is None:
            return [cell]
        replicas = self.folding.copies[cell.module, cell.replica]
        return [cell._replace(replica=replica) for _, replica in replicas]

    def _message_copies(self, message: Message) -> list[Message]:
        """The copies of both ends are in the same order, as pipelines come one after the other."""
        routes = self.program.dependencies.routes
        sends, receives = (message.target, message.source) if message.gradient else (message.source, message.target)
        sender = routes.stage(sends).ranks.index(message.sender)
        receiver = routes.stage(receives).ranks.index(message.receiver)
        result = []
        for source, target in zip(self._copies(message.source), self._copies(message.target), strict=True):
            begin, end = (target, source) if message.gradient else (source, target)
            ranks = routes.stage(begin).ranks[sender], routes.stage(end).ranks[receiver]
            result.append(Message(source, target, message.gradient, *ranks))
        return result

    @cached_property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """For each rank."""
        if self.folding is None:
            return tuple(memory_curves(self.program, self.costs, self.seconds, self.times).values())
        curves = memory_curves(self.program, self.costs, self.seconds, self.times, set(self.folding.rank_of.tolist()))
        return tuple(curves[rank] for rank in self.folding.rank_of.tolist())

    @cached_property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        peaks = {id(curve): curve.peak_bytes for curve in self.memory}
        return tuple(peaks[id(curve)] for curve in self.memory)
