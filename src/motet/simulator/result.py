"""The result of a simulation: times, the timeline, the memory of each rank, and the causes of its bubbles.

Numbers are kept in arrays; spans and curves are made on demand.

Causes of bubbles (Optimus, Table 1 and Figure 2):

| cause | when |
|---|---|
| warm-up | before the rank's first action; all along, if it has none |
| cool-down | between the rank's last action and the last one of all ranks |
| imbalance | between its actions, while it waits for other stages (the paper's "other") |
| tensor parallelism | within its actions, while members of the group wait for each other's tensors |
| reduction | after the last action of all ranks, until all gradients are summed (the paper's reduce-scatter) |
| gather | after the optimizer step, while new parameters are gathered (the paper's all-gather) |

The part of a reduction or a message that computation hides is not counted. The paper's all-gather stands at the begin
of an iteration, which makes no difference from step to step. Limits: context parallelism counts as tensor parallelism,
and both are known only for cost models that tell them apart (`GroupCosts`).
"""

from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from motet.ragged_arrays import Floats
from motet.schedule.action import Compute
from motet.schedule.lower import Message, Program
from motet.schedule.routes import Cell
from motet.simulator.clock import Times
from motet.simulator.costs import Costs, GroupCosts, StepCosts
from motet.simulator.memory import memory_curves, most_saved, peak_by_kind
from motet.simulator.replica_folding import Folding
from motet.timeline import MemoryCurve, Span, Timeline


@dataclass(frozen=True, eq=False, kw_only=True)
class TimeShares:
    """Seconds of each rank by cause, which add up to the iteration's time."""

    compute: Floats
    optimizer: Floats
    warm_up: Floats
    cool_down: Floats
    imbalance: Floats
    tensor_parallel: Floats
    reduction: Floats
    gather: Floats

    def means_s(self) -> dict[str, float]:
        """Means over all ranks."""
        return {name: float(seconds.mean()) if len(seconds) else 0.0 for name, seconds in asdict(self).items()}


@dataclass(frozen=True, eq=False)
class SimulationResult:
    program: Program
    costs: Costs
    seconds: StepCosts
    times: Times
    folding: Folding | None = None
    """Pipelines that represent others; None: all are simulated."""

    @property
    def num_ranks(self) -> int:
        return len(self.program.lanes.of_rank)

    @property
    def _first_s(self) -> float:
        starts = (self.times.action_start, self.times.message_start, self.times.reduction_start)
        return min((float(start.min()) for start in starts if len(start)), default=0.0)

    @cached_property
    def gathers(self) -> tuple[tuple[float, float], ...]:
        """Begin and end of the gather of new parameters, for each reduction.

        Gathers follow the optimizer step, one after another on each rank, in the order in which layers are needed."""
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
        """Time from the first step's begin until the last rank is ready for the next iteration."""
        computed = self.times.end_s + self.costs.fixed_s
        return max(computed, max((end for begin, end in self.gathers if end > begin), default=0.0)) - self._first_s

    @cached_property
    def busy_s(self) -> Floats:
        """Time for which each rank computes."""
        busy = self._sum_by_rank(self.times.action_end - self.times.action_start) + self.costs.fixed_s
        return busy if self.folding is None else busy[self.folding.rank_of]

    @cached_property
    def time_shares(self) -> TimeShares:
        """The time of each rank by cause."""
        times, lanes = self.times, self.program.lanes
        last_action_s = float(times.action_end.max()) if len(times.action_end) else 0.0
        num_lanes = len(lanes.actions)
        first, last = np.full(num_lanes, last_action_s), np.full(num_lanes, last_action_s)
        place = np.empty(self.program.dependencies.num_actions, dtype=np.int64)
        place[self.program.actions] = np.arange(len(self.program.actions))
        for lane, actions in enumerate(lanes.actions):
            if len(actions):
                first[lane], last[lane] = times.action_start[place[actions[0]]], times.action_end[place[actions[-1]]]
        rank_of = np.arange(self.num_ranks) if self.folding is None else self.folding.rank_of
        lane_of = lanes.of_rank[rank_of]
        fixed = np.full(self.num_ranks, self.costs.fixed_s, dtype=float)
        busy = self.busy_s - fixed
        communication = self._group_communication_s()[rank_of]
        # Rounding may leave differences slightly below 0.
        gathered_s = self.iteration_time_s + self._first_s - times.end_s - self.costs.fixed_s
        return TimeShares(
            compute=busy - communication,
            optimizer=fixed,
            warm_up=first[lane_of] - self._first_s,
            cool_down=last_action_s - last[lane_of],
            imbalance=np.maximum(0.0, last[lane_of] - first[lane_of] - busy),
            tensor_parallel=communication,
            reduction=np.full(self.num_ranks, times.end_s - last_action_s),
            gather=np.full(self.num_ranks, max(0.0, gathered_s)),
        )

    def _group_communication_s(self) -> Floats:
        """Seconds of each rank in group communication, scaled with disturbances."""
        if not isinstance(self.costs, GroupCosts):
            return np.zeros(self.num_ranks)
        actions = self.program.dependencies.actions(self.program.actions)
        parts = np.array([self.costs.group_communication_s(action) for action in actions], dtype=float)
        whole = np.array([self.costs.compute_s(action) for action in actions], dtype=float)
        took = self.times.action_end - self.times.action_start
        return self._sum_by_rank(np.divide(parts * took, whole, out=np.zeros_like(parts), where=whole > 0))

    def _sum_by_rank(self, of_actions: Floats) -> Floats:
        """Sums over the actions of each rank that is simulated itself."""
        routes = self.program.dependencies.routes
        stage = routes.cell_stage[self.program.actions % max(1, routes.num_cells)]
        sums = np.bincount(stage, of_actions, minlength=len(routes.stages))
        result = np.zeros(self.num_ranks)
        for stage_cells, seconds in zip(routes.stages, sums.tolist(), strict=True):
            result[list(stage_cells.planned.ranks)] += seconds
        return result

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they do not compute, 0 to 1."""
        available = self.num_ranks * self.iteration_time_s
        return 1.0 - float(self.busy_s.sum()) / available if available else 0.0

    @cached_property
    def alike_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that compute the same at the same time, ordered by first rank."""
        groups: dict[int, list[int]] = {}
        stands_for = range(self.num_ranks) if self.folding is None else self.folding.rank_of
        for rank, lane in enumerate(self.program.lanes.of_rank[stands_for].tolist()):
            groups.setdefault(lane, []).append(rank)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def timeline(self) -> Timeline:
        return self.timeline_of(range(self.num_ranks))

    def timeline_of(self, ranks: Container[int]) -> Timeline:
        """The spans of these ranks, with their original numbers."""
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
                    if rank in ranks
                ]
            )
        for message, begin, end in zip(
            program.messages, times.message_start.tolist(), times.message_end.tolist(), strict=True
        ):
            sent = [copy for copy in self._message_copies(message) if copy.sender in ranks]
            spans.append([Span(copy.sender, str(copy), "message", begin, end) for copy in sent])
        reduction_times = zip(times.reduction_start.tolist(), times.reduction_end.tolist(), strict=True)
        for reduce, (begin, end) in zip(program.reductions, reduction_times, strict=True):
            members = [rank for rank in program.participants(reduce) if rank in ranks]
            spans.append([Span(rank, str(reduce), "reduce", begin, end) for rank in members])
        in_order = [span for i in program.order_of_steps.tolist() for span in spans[i]]
        last = times.end_s
        if self.costs.fixed_s:
            in_order += [
                Span(rank, "optimizer", "optimizer", last, last + self.costs.fixed_s)
                for rank in range(self.num_ranks)
                if rank in ranks
            ]
        for reduce, (begin, end) in zip(program.reductions, self.gathers, strict=True):
            if end > begin:
                name = str(reduce).replace(".R[", ".G[")
                members = [rank for rank in program.participants(reduce) if rank in ranks]
                in_order += [Span(rank, name, "gather", begin, end) for rank in members]
        return Timeline(tuple(in_order), self.num_ranks)

    def _copies(self, cell: Cell) -> list[Cell]:
        """The cells that this one represents."""
        if self.folding is None:
            return [cell]
        replicas = self.folding.copies[cell.module, cell.replica]
        return [cell._replace(replica=replica) for _, replica in replicas]

    def _message_copies(self, message: Message) -> list[Message]:
        """The messages that this one represents. Copies of both ends are in the same order."""
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
        """Memory over time of each rank."""
        if self.folding is None:
            return tuple(memory_curves(self.program, self.costs, self.seconds, self.times).values())
        curves = memory_curves(self.program, self.costs, self.seconds, self.times, set(self.folding.rank_of.tolist()))
        return tuple(curves[rank] for rank in self.folding.rank_of.tolist())

    def peak_memory_by_kind(self, ranks: Iterable[int]) -> dict[int, dict[str, int]]:
        """What each of these ranks holds when it holds most (`motet.simulator.memory.peak_by_kind`)."""
        stands_for = {rank: rank if self.folding is None else int(self.folding.rank_of[rank]) for rank in ranks}
        found = peak_by_kind(self.program, self.costs, self.seconds, self.times, set(stands_for.values()))
        return {rank: found[other] for rank, other in stands_for.items()}

    def most_saved(self, ranks: Iterable[int]) -> dict[int, int]:
        """The most activations and logits that each of these ranks keeps at once."""
        stands_for = {rank: rank if self.folding is None else int(self.folding.rank_of[rank]) for rank in ranks}
        found = most_saved(self.program, self.costs, self.times, set(stands_for.values()))
        return {rank: found[other] for rank, other in stands_for.items()}

    @cached_property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        peaks = {id(curve): curve.peak_bytes for curve in self.memory}
        return tuple(peaks[id(curve)] for curve in self.memory)
