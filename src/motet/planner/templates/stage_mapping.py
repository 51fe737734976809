"""Which devices of a pipeline's nodes hold which layers: the exact optimum of T1 + T2 + T3 (thesis 2.4.1.2).

For stages with t_0, t_1, ... seconds (forward and backward of one microbatch), the last slowest of them k*, X = t_k*,
and N_b microbatches,

    T = sum of all t + (N_b - S + k* - 1) X + sum of t from k* on
      = (N_b - 1) X + (sum of t before k*) + (sum of 2 t - X from k* on).

The thesis keeps one best solution of each sub-problem, which is not exact, because a solution with more of one term may
have less of another. With X given, T is a sum over stages, and one best is enough: so we look for the best X. Intervals
of X give lower bounds, those below the best known T are split, and the values that remain are solved exactly. (That is
the Pareto set of T1, slowest stage and T3, one slowest stage at a time.)

Several modules: encoders on devices of their own, one module after the other in the order given, each contiguous; a
node may hold stages of two modules. T1 is then the longest path, and T3 counts the stages that lie on every path: those
of the last module, which all others enter, and those of the encoder if there is only one.

Messages between stages count in the fill, each way once, by where the cut lies: inside a node or at its end. In the
further microbatches they are taken to travel while stages compute. 1F1B may wait for them, for up to a message and its
answer in each microbatch where all stages are equally slow; how much depends on all stages that follow, which is no sum
over stages (benchmarks/templates.py: how far that is from the simulation). What a stage gathers for another that shares
out its tokens otherwise depends on both stages' groups, and costs nothing here.

A stage may be on several kinds of groups of one size (tensor and context parallelism); each chooses by itself.

`num_microbatches` None is the thesis' N_b = 4 S. It compares unequal amounts of work (fewer stages, fewer
microbatches), so it prefers tensor parallelism; planners give the number. With fewer microbatches than stages the
formula does not hold; one more than there may be stages is assumed then.
Memory: a stage keeps what it saves of as many microbatches as 1F1B has in flight there, one for each stage from it to
the last. The best mapping without regard to that is taken if it fits; else stages are counted (`counted_tables`). An
encoder's stages must fit with as many in flight as the pipeline can have stages.
Limits: all devices are used, no stage spans nodes; an encoder that enters at a later layer (cross-attention) counts as
if it entered at the first; what encoders hand to the last module goes to another node, if there are several.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from motet.plan import LayerRange
from motet.planner.templates.node_tables import (
    CountedTables,
    Group,
    Kind,
    Limits,
    NodeTables,
    Segments,
    counted_tables,
    from_each_device,
    node_tables,
    spans,
    suffixes,
    trace,
    trace_counted,
)
from motet.ragged_arrays import Floats

# What mapping layers to devices is given, and which runs of layers fit on them
# (`motet.planner.templates.stage_mapping`).


class CutCosts(NamedTuple):
    """By the layer before which a stage ends, and for the whole chain's end: seconds until what it has made of one
    microbatch is where the next stage is, and until the gradients of it are back."""

    within: Sequence[float]
    """The next stage is on the same node."""
    between: Sequence[float]
    """It is on the next one. At the chain's end: the last module may be on another node, as there are several."""


@dataclass(frozen=True, kw_only=True)
class ChainCosts:
    """One module's layers, for each number of devices that a stage may have under one context-parallel size."""

    seconds: Mapping[int, Sequence[float]]
    """Forward and backward of one microbatch, as far as there is one (frozen layers), on so many devices."""
    static_bytes: Mapping[int, Sequence[float]] | None = None
    """On each of so many devices, whatever is in flight; None: nothing."""
    saved_bytes: Mapping[int, Sequence[float]] | None = None
    """On each of so many devices, for each microbatch in flight."""
    fixed_bytes: Mapping[int, float] | None = None
    """On each of so many devices, whatever layers a stage has; None: nothing."""
    cut_s: CutCosts | None = None
    """None: nothing."""
    cp_size: int = 1
    others: tuple["ChainCosts", ...] = ()
    """The same layers' under other context-parallel sizes: each stage may choose."""

    @property
    def layers(self) -> range:
        return range(len(next(iter(self.seconds.values()))))

    @property
    def all(self) -> tuple["ChainCosts", ...]:
        """Under each context-parallel size."""
        return self, *self.others

    def groups(self) -> Iterator[tuple[Group, "ChainCosts"]]:
        """All that a stage may have, and the costs that say what it takes there."""
        for costs in self.all:
            for size in costs.seconds:
                yield Group(size, costs.cp_size), costs


@dataclass(frozen=True, kw_only=True)
class MappingProblem:
    modules: Mapping[str, ChainCosts]
    """Encoders first; all of them enter the last."""
    devices_per_node: int
    num_microbatches: int | None
    device_bytes: float = inf


def segments_of(
    problem: MappingProblem, costs: ChainCosts, least_in_flight: int, *, num_nodes: int, is_on_every_path: bool
) -> Segments:
    """The stages that fit with so many microbatches in flight."""
    num_layers = len(costs.layers)
    by_group, cut_s, in_flight = {}, {}, {}
    for group, of_group in costs.groups():
        # Rounded, so that runs of the same layers at other places take exactly as long.
        table = _rounded(_sums(of_group.seconds[group.size]))
        table[np.tril_indices(num_layers + 1)] = inf
        in_flight[group] = in_flight_of(problem, of_group, group.size)
        table[in_flight[group] < least_in_flight] = inf
        by_group[group] = table
        if of_group.cut_s is not None:
            last_s = (of_group.cut_s.between if num_nodes > 1 else of_group.cut_s.within)[-1]
            cut_s[group] = np.array([[*cut[:-1], last_s] for cut in of_group.cut_s])
    return Segments(num_layers, by_group, in_flight, cut_s, is_on_every_path)


def in_flight_of(problem: MappingProblem, costs: ChainCosts, size: int) -> Floats:
    """[u, v]: how many microbatches may be in flight in a stage with these layers; less than 1: it does not fit."""
    if costs.static_bytes is None or costs.saved_bytes is None:
        return np.full((len(costs.layers) + 1, len(costs.layers) + 1), inf)
    fixed = 0.0 if costs.fixed_bytes is None else costs.fixed_bytes[size]
    left = problem.device_bytes - fixed - _sums(costs.static_bytes[size])
    with np.errstate(divide="ignore", invalid="ignore"):
        fitting = np.floor(left / np.maximum(_sums(costs.saved_bytes[size]), 0.0) * (1 + 1e-12))
    return np.where(left < 0, 0.0, np.where(np.isnan(fitting), inf, fitting))


def _sums(values: Sequence[float]) -> Floats:
    """[u, v]: of those from u to before v."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table: Floats = sums[None, :] - sums[:, None]
    return table


def _rounded(seconds: Floats) -> Floats:
    """To 40 of a float's 53 bits, of the largest. All are 0 if no sample has the module's modality."""
    largest = seconds.max()
    if largest == 0:
        return seconds
    unit = 2.0 ** (np.ceil(np.log2(largest)) - 40)
    return np.round(seconds / unit) * unit


BATCH = 16
"""Intervals of X that are bounded at once."""
FIRST_RATIO = 1.06
"""Of the ends of an interval of X, before it is split."""


class MappedStage(NamedTuple):
    module: str
    layers: LayerRange
    first_device: int
    num_devices: int
    cp_size: int = 1


@dataclass(frozen=True)
class StageMapping:
    stages: tuple[MappedStage, ...]
    objective_s: float
    """T1 + T2 + T3."""
    fill_s: float
    """T1."""
    slowest_s: float


def map_stages(problem: MappingProblem, num_nodes: int) -> StageMapping | None:
    """The best way to put all modules on so many nodes; None if there is none."""
    found = _Search(problem, num_nodes).run()
    if found is None or _fits(problem, found):
        return found
    return _CountedSearch(problem, num_nodes).run()


def _fits(problem: MappingProblem, mapping: StageMapping) -> bool:
    """Whether every stage of the last module has room for what is in flight there."""
    last = [stage for stage in mapping.stages if stage.module == list(problem.modules)[-1]]
    limit = problem.num_microbatches or len(last)
    of_cp = {costs.cp_size: costs for costs in problem.modules[last[0].module].all}
    return all(
        in_flight_of(problem, of_cp[cp_size], size)[layers] >= min(number, limit)
        for number, (_, layers, _, size, cp_size) in enumerate(reversed(last), start=1)
    )


Interval = tuple[int, int]
"""[first, end) of the values that X may have."""


class _Search:
    """Best first among intervals of X."""

    def __init__(self, problem: MappingProblem, num_nodes: int) -> None:
        self.problem, self.num_nodes = problem, num_nodes
        *self.encoders, self.last = problem.modules
        num_layers = sum(len(costs.layers) for costs in problem.modules.values())
        self.most_stages = min(num_nodes * problem.devices_per_node, num_layers)
        self.segments = {
            name: segments_of(
                problem,
                costs,
                1 if name == self.last else self._most_in_flight,
                num_nodes=num_nodes,
                is_on_every_path=name == self.last or len(self.encoders) == 1,
            )
            for name, costs in problem.modules.items()
        }
        finite = [table[np.isfinite(table)] for each in self.segments.values() for table in each.by_group.values()]
        self.values: Floats = np.unique(np.concatenate(finite))
        self.best_s, self.best_x = inf, inf

    def run(self) -> StageMapping | None:
        queue: list[tuple[float, Interval]] = []
        untried = int(np.searchsorted(self.values, self._least_slowest_s()))
        untried_s = 0.0 if untried < len(self.values) else inf
        """A bound on T for all values from `untried` on."""
        is_quick = False
        while min(untried_s, queue[0][0] if queue else inf) < self.best_s:
            if queue and queue[0][0] < untried_s:
                intervals: list[Interval] = []
                while queue and len(intervals) < BATCH:
                    intervals += _split(heappop(queue)[1], max(2, BATCH - len(intervals)))
            elif is_quick:
                untried_s = max(untried_s, self._quick_bounds([(untried, len(self.values))])[0])
                is_quick = False
                continue
            else:
                intervals = self._first_intervals(untried)
                untried = intervals[-1][1]
                untried_s, is_quick = self._quick_bound_s(untried), True
            for bound, (first, end) in zip(self._bounds(intervals), intervals, strict=True):
                if end - first > 1 and bound < self.best_s:
                    heappush(queue, (bound, (first, end)))
                elif bound < self.best_s:
                    self.best_s, self.best_x = bound, float(self.values[first])
        return self._traced() if self.best_s < inf else None

    def _least_slowest_s(self) -> float:
        """No slowest stage takes less: every layer is in some stage, and all devices share the work."""
        layers = work = 0.0
        for costs in self.problem.modules.values():
            seconds = np.stack([np.asarray(of_group.seconds[group.size]) for group, of_group in costs.groups()])
            sizes = np.array([group.size for group, _ in costs.groups()])[:, None]
            layers = max(layers, float(seconds.min(axis=0).max()))
            work += float((seconds * sizes).min(axis=0).sum())
        return max(layers, work / (self.num_nodes * self.problem.devices_per_node)) * (1 - 1e-9)

    def _quick_bound_s(self, first: int) -> float:
        """On T where X is at least the value at `first`: from k* on, no stage takes less than nothing."""
        if first == len(self.values):
            return inf
        stages = 3 * self.num_nodes if self.num_microbatches is None else self.num_microbatches - self.most_stages
        return (stages + 1) * float(self.values[first])

    @property
    def _most_in_flight(self) -> int:
        return min(self.problem.num_microbatches or self.most_stages, self.most_stages)

    @property
    def num_microbatches(self) -> int | None:
        given = self.problem.num_microbatches
        return None if given is None else max(given, self.most_stages + 1)

    def _first_intervals(self, first: int) -> list[Interval]:
        limits = self.values[first] * FIRST_RATIO ** np.arange(1, BATCH + 1)
        ends = np.searchsorted(self.values, limits)
        return [(int(a), int(b)) for a, b in pairwise([first, *np.unique(ends[ends > first])])]

    def _limits(self, low: Floats, high: Floats) -> Limits:
        return Limits(low, high, 4.0 if self.problem.num_microbatches is None else 0.0)

    def _constant(self) -> float:
        """How often X counts once, in T."""
        return -1.0 if self.num_microbatches is None else self.num_microbatches - 1.0

    def _bounds(self, intervals: Sequence[Interval]) -> list[float]:
        """On T for X in each interval; exact where it is one value."""
        return self._quick_bounds(intervals)

    def _quick_bounds(self, intervals: Sequence[Interval]) -> list[float]:
        """Without regard to what is in flight."""
        low = np.array([self.values[first] for first, _ in intervals])
        high = np.array([self.values[end - 1] for _, end in intervals])
        tables = self._tables(low, high)
        rests = suffixes(tables[self.last], self.num_nodes)
        if self.encoders:
            least = self._combined(tables, *from_each_device(tables[self.last], rests, self.num_nodes))[0]
        else:
            least = rests.slowest[-1][:, 0]
        return [float(t) for t in self._constant() * low + least]

    def _tables(self, low: Floats, high: Floats) -> dict[str, NodeTables]:
        limits = self._limits(low, high)
        return {
            name: node_tables(segments, limits, self.problem.devices_per_node)
            for name, segments in self.segments.items()
        }

    def _combined(self, tables: Mapping[str, NodeTables], after: Floats, slowest: Floats) -> tuple[Floats, "_Borders"]:
        """The least T of all modules together, without its constant; and what it was found from. `after`, `slowest`:
        [batch, a] of the last module on the devices from a on."""
        size = self.problem.devices_per_node
        paths: list[Floats] = []
        slow_paths: list[Floats] = []
        for i, name in enumerate(self.encoders):
            before, with_slowest = spans(tables[name], self.num_nodes)
            if i == 0:
                paths.append(before[:, 0])
                slow_paths.append(with_slowest[:, 0])
            else:
                slow_here = _longer_path(paths[-1], with_slowest, size)
                slow_paths.append(np.minimum(_longer_path(slow_paths[-1], before, size), slow_here))
                paths.append(_longer_path(paths[-1], before, size))
        totals = np.stack([paths[-1][:, :-1] + slowest, slow_paths[-1][:, :-1] + after], axis=1)
        return totals.reshape(len(totals), -1).min(axis=1), _Borders(totals, paths, slow_paths)

    def _traced(self) -> StageMapping:
        best_x = np.array([self.best_x])
        tables = self._tables(best_x, best_x)
        first, kind, stages = 0, "slowest", []
        if self.encoders:
            borders = self._combined(tables, *self._last_from_each_device(tables[self.last]))[1]
            totals = borders.totals
            in_encoder, first = (int(i) for i in np.unravel_index(int(totals[0].argmin()), totals.shape[1:]))
            kind = "after" if in_encoder else "slowest"
            for name, begin, end, of_encoder in self._traced_borders(tables, borders, first, bool(in_encoder)):
                stages += self._placed(name, begin, trace(tables[name], self._parts(begin, end), of_encoder))
        stages += self._placed(self.last, first, self._traced_last(tables[self.last], first, kind))
        return StageMapping(tuple(stages), self.best_s, self._fill_s(stages), self.best_x)

    def _last_from_each_device(self, tables: NodeTables) -> tuple[Floats, Floats]:
        return from_each_device(tables, suffixes(tables, self.num_nodes), self.num_nodes)

    def _traced_last(self, tables: NodeTables, first: int, kind: str) -> list[tuple[int, int, Group]]:
        return trace(tables, self._parts(first, self.num_nodes * self.problem.devices_per_node), kind)

    def _parts(self, first: int, end: int) -> list[int]:
        """How many of these devices each node has."""
        size = self.problem.devices_per_node
        borders = [first, *range(first - first % size + size, end, size), end]
        return [b - a for a, b in pairwise(borders)]

    def _placed(self, name: str, first: int, stages: Sequence[tuple[int, int, Group]]) -> list[MappedStage]:
        devices = accumulate((group.size for _, _, group in stages), initial=first)
        return [
            MappedStage(name, (u, v), device, *group) for (u, v, group), device in zip(stages, devices, strict=False)
        ]

    def _traced_borders(
        self, tables: Mapping[str, NodeTables], borders: "_Borders", end: int, in_encoder: bool
    ) -> list[tuple[str, int, int, Kind]]:
        """(encoder, first device, end, where k* is), if the devices of the last encoder end at `end`."""
        found: list[tuple[str, int, int, Kind]] = []
        size = self.problem.devices_per_node
        for i in range(len(self.encoders) - 1, 0, -1):
            before, with_slowest = (table[0] for table in spans(tables[self.encoders[i]], self.num_nodes))
            options: list[tuple[Floats, Floats, Kind, bool]] = [(borders.paths[i - 1], before, "before", False)]
            if in_encoder:
                options = [
                    (borders.slow_paths[i - 1], before, "before", True),
                    (borders.paths[i - 1], with_slowest, "slowest", False),
                ]
            _, begin, kind, in_encoder = min(
                (float(max(paths[0, p], here[p % size, end - p])), p, kind, is_earlier)
                for paths, here, kind, is_earlier in options
                for p in range(end)
            )
            found.insert(0, (self.encoders[i], begin, end, kind))
            end = begin
        return [(self.encoders[0], 0, end, "slowest" if in_encoder else "before"), *found]

    def _fill_s(self, stages: Sequence[MappedStage]) -> float:
        """The longest path."""
        sums = dict.fromkeys(self.problem.modules, 0.0)
        for name, (u, v), first, size, cp_size in stages:
            segments, group = self.segments[name], Group(size, cp_size)
            sums[name] += float(segments.by_group[group][u, v])
            if group in segments.cut_s:
                is_last = (first + size) % self.problem.devices_per_node == 0
                sums[name] += float(segments.cut_s[group][int(is_last), v])
        return max((sums[name] for name in self.encoders), default=0.0) + sums[self.last]


class _CountedSearch(_Search):
    """Where what is in flight decides which stages of the last module fit."""

    def run(self) -> StageMapping | None:
        is_possible = self._counted_bound((0, len(self.values))) < inf
        return super().run() if is_possible else None

    def _bounds(self, intervals: Sequence[Interval]) -> list[float]:
        return [
            self._counted_bound(interval) if bound < self.best_s else bound
            for interval, bound in zip(intervals, self._quick_bounds(intervals), strict=True)
        ]

    def _counted_bound(self, interval: Interval) -> float:
        low, high = np.array([self.values[interval[0]]]), np.array([self.values[interval[1] - 1]])
        after, slowest = self._counted(self._limits(low, high)).from_each_device()
        least = slowest[0, 0]
        if self.encoders:
            least = self._combined(self._tables(low, high), after, slowest)[0][0]
        return float(self._constant() * low[0] + least)

    def _counted(self, limits: Limits) -> CountedTables:
        return counted_tables(
            self.segments[self.last],
            limits,
            num_devices=self.num_nodes * self.problem.devices_per_node,
            devices_per_node=self.problem.devices_per_node,
            most_in_flight=self._most_in_flight,
        )

    def _last_from_each_device(self, tables: NodeTables) -> tuple[Floats, Floats]:
        return self._counted(tables.limits).from_each_device()

    def _traced_last(self, tables: NodeTables, first: int, kind: str) -> list[tuple[int, int, Group]]:
        return trace_counted(self._counted(tables.limits), first, kind)


class _Borders(NamedTuple):
    totals: Floats
    """[batch, k* in the last module or in an encoder, first device of the last module]"""
    paths: list[Floats]
    """Of each encoder: [batch, end], the longest path through it and those before it, if its devices end there."""
    slow_paths: list[Floats]
    """The same, if k* is in one of them."""


def _longer_path(paths: Floats, before: Floats, size: int) -> Floats:
    """[b, q]: the least over p of max(paths[b, p], the encoder's sum on the devices [p, q))"""
    batch, num_ends = paths.shape
    result = np.full((batch, num_ends), inf)
    for p in range(num_ends - 1):
        lengths = np.maximum(paths[:, p, None], before[:, p % size, : num_ends - p])
        np.minimum(result[:, p:], lengths, out=result[:, p:])
    return result


def _split(interval: Interval, num_parts: int) -> list[Interval]:
    first, end = interval
    borders = np.unique(np.linspace(first, end, min(num_parts, end - first) + 1).astype(int)).tolist()
    return list(pairwise(borders))
