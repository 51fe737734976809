"""Maps the layers of a pipeline to the devices of its nodes: the exact optimum of T1 + T2 + T3 (thesis 2.4.1.2).

For stages with t_0, t_1, ... seconds (forward and backward of one microbatch), the last slowest of them k*, X = t_k*,
and N_b microbatches,

    T = sum of all t + (N_b - S + k* - 1) X + sum of t from k* on
      = (N_b - 1) X + (sum of t before k*) + (sum of 2 t - X from k* on).

The thesis keeps one best solution of each sub-problem, which is not exact, because a solution with more of one term may
have less of another. Given X, T is a sum over stages, and one best solution is enough, so this module searches for the
best X: intervals of X give lower bounds, intervals below the best known T are split, and single values are solved
exactly. (That is the Pareto set of T1, slowest stage and T3, one slowest stage at a time.)

Several modules: encoders have devices of their own, one module after the other, each contiguous; a node may hold stages
of two modules. T1 is then the longest path, and T3 counts the stages that lie on every path: those of the last module,
which all others enter, and those of the encoder if there is only one.

Messages between stages count in the fill, once each way, by whether the cut is inside a node or at its end. Messages of
further microbatches are taken to overlap with computation. 1F1B may wait for them, for up to a message and its answer
per microbatch where all stages are equally slow; that wait depends on all later stages, so it is no sum over stages
(benchmarks/templates.py compares with the simulation). Tokens gathered between stages of different context-parallel
sizes depend on both stages' groups, and cost nothing here.

A stage may be on several kinds of groups of one size (tensor and context parallelism); each stage chooses its own.

`num_microbatches` None is the thesis' N_b = 4 S. It compares unequal amounts of work (fewer stages, fewer
microbatches), so it prefers tensor parallelism; planners give the number. With fewer microbatches than stages the
formula does not hold; one more than the largest number of stages is assumed then.
Memory: a stage keeps the activations of as many microbatches as 1F1B has in flight there, one for each stage from it to
the last. The best mapping that ignores this is taken if it fits; else stages are counted (`counted_tables`). An
encoder's stages must fit with as many microbatches in flight as the pipeline can have stages.
Limits: all devices are used, no stage spans nodes; an encoder that enters at a later layer (cross-attention) counts as
if it entered at the first; encoders' outputs go to another node, if there are several.
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
    device_spans,
    from_each_device,
    node_tables,
    suffixes,
    trace,
    trace_counted,
)
from motet.ragged_arrays import Floats

BATCH = 16
"""Number of intervals of X that are bounded at once."""
FIRST_RATIO = 1.06
"""Ratio of the ends of an interval of X, before it is split."""


class CutCosts(NamedTuple):
    """Message seconds of one microbatch, output and gradient, by the layer before which a stage ends, and for the end
    of the whole chain."""

    within: Sequence[float]
    """The next stage is on the same node."""
    between: Sequence[float]
    """The next stage is on the next node. At the chain's end: the last module may be on another node."""


@dataclass(frozen=True, kw_only=True)
class ChainCosts:
    """Costs of one module's layers by the number of devices of a stage, for one context-parallel size. None: zero."""

    seconds: Mapping[int, Sequence[float]]
    """Forward and backward of one microbatch (no backward of frozen layers that need none)."""
    static_bytes: Mapping[int, Sequence[float]] | None = None
    """Bytes on each device, independent of the microbatches in flight."""
    saved_bytes: Mapping[int, Sequence[float]] | None = None
    """Bytes on each device for each microbatch in flight."""
    fixed_bytes: Mapping[int, float] | None = None
    """Bytes on each device, independent of the stage's layers."""
    cut_s: Mapping[int, CutCosts] | None = None
    """Messages, by the number of devices as well."""
    cp_size: int = 1
    others: tuple["ChainCosts", ...] = ()
    """Costs of the same layers for other context-parallel sizes; each stage chooses one."""

    @property
    def layers(self) -> range:
        return range(len(next(iter(self.seconds.values()))))

    @property
    def all(self) -> tuple["ChainCosts", ...]:
        """Costs by context-parallel size."""
        return self, *self.others

    def groups(self) -> Iterator[tuple[Group, "ChainCosts"]]:
        """Yields every group that a stage may have, with its costs."""
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


def _segments(
    problem: MappingProblem, costs: ChainCosts, least_in_flight: int, *, num_nodes: int, is_on_every_path: bool
) -> Segments:
    """Returns the stages that fit with at least so many microbatches in flight."""
    num_layers = len(costs.layers)
    by_group, cut_s, in_flight = {}, {}, {}
    for group, of_group in costs.groups():
        table = _sums(of_group.seconds[group.size])
        if (largest := table.max()) > 0:  # It is 0 if no sample has the module's modality.
            # To 40 of a float's 53 bits, so that equal runs of layers at different places take exactly as long.
            unit = 2.0 ** (np.ceil(np.log2(largest)) - 40)
            table = np.round(table / unit) * unit
        table[np.tril_indices(num_layers + 1)] = inf
        in_flight[group] = _max_in_flight(problem, of_group, group.size)
        table[in_flight[group] < least_in_flight] = inf
        by_group[group] = table
        if of_group.cut_s is not None:
            cuts = of_group.cut_s[group.size]
            last_s = (cuts.between if num_nodes > 1 else cuts.within)[-1]
            cut_s[group] = np.array([[*cut[:-1], last_s] for cut in cuts])
    return Segments(num_layers, by_group, in_flight, cut_s, is_on_every_path)


def _max_in_flight(problem: MappingProblem, costs: ChainCosts, size: int) -> Floats:
    """Returns [u, v]: the most microbatches in flight for which a stage of these layers has memory; below 1: none."""
    if costs.static_bytes is None or costs.saved_bytes is None:
        return np.full((len(costs.layers) + 1, len(costs.layers) + 1), inf)
    fixed = 0.0 if costs.fixed_bytes is None else costs.fixed_bytes[size]
    left = problem.device_bytes - fixed - _sums(costs.static_bytes[size])
    with np.errstate(divide="ignore", invalid="ignore"):
        fitting = np.floor(left / np.maximum(_sums(costs.saved_bytes[size]), 0.0) * (1 + 1e-12))
    return np.where(left < 0, 0.0, np.where(np.isnan(fitting), inf, fitting))


def _sums(values: Sequence[float]) -> Floats:
    """Returns [u, v]: the sum of the values from u to before v."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table: Floats = sums[None, :] - sums[:, None]
    return table


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
    """Returns the best mapping of all modules to `num_nodes` nodes; None if there is none."""
    found = _Search(problem, num_nodes).run()
    if found is None:
        return None
    last = [stage for stage in found.stages if stage.module == list(problem.modules)[-1]]
    limit = problem.num_microbatches or len(last)
    of_cp = {costs.cp_size: costs for costs in problem.modules[last[0].module].all}
    fits = all(
        _max_in_flight(problem, of_cp[cp_size], size)[layers] >= min(number, limit)
        for number, (_, layers, _, size, cp_size) in enumerate(reversed(last), start=1)
    )
    return found if fits else _CountedSearch(problem, num_nodes).run()


Interval = tuple[int, int]
"""[first, end) of the values that X may have."""


class _Search:
    """Best-first search among intervals of X."""

    def __init__(self, problem: MappingProblem, num_nodes: int) -> None:
        self.problem, self.num_nodes = problem, num_nodes
        *self.encoders, self.last = problem.modules
        num_layers = sum(len(costs.layers) for costs in problem.modules.values())
        self.most_stages = min(num_nodes * problem.devices_per_node, num_layers)
        self.segments = {
            name: _segments(
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
        """A lower bound on T for all values from `untried` on."""
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
        """Returns a lower bound on X: every layer is in some stage, and all devices share the work."""
        layers = work = 0.0
        for costs in self.problem.modules.values():
            seconds = np.stack([np.asarray(of_group.seconds[group.size]) for group, of_group in costs.groups()])
            sizes = np.array([group.size for group, _ in costs.groups()])[:, None]
            layers = max(layers, float(seconds.min(axis=0).max()))
            work += float((seconds * sizes).min(axis=0).sum())
        return max(layers, work / (self.num_nodes * self.problem.devices_per_node)) * (1 - 1e-9)

    def _quick_bound_s(self, first: int) -> float:
        """Returns a lower bound on T where X is at least the value at `first`, as stages from k* on take at least 0."""
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
        """The multiple of X in T that does not depend on the stages."""
        return -1.0 if self.num_microbatches is None else self.num_microbatches - 1.0

    def _bounds(self, intervals: Sequence[Interval]) -> list[float]:
        """Returns lower bounds on T for X in each interval; exact for intervals of one value."""
        return self._quick_bounds(intervals)

    def _quick_bounds(self, intervals: Sequence[Interval]) -> list[float]:
        """The bounds that ignore the microbatches in flight."""
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
        """Returns the least T of all modules together without its constant, and the tables to trace it. `after`,
        `slowest`: [batch, a] of the last module on the devices from a on."""
        size = self.problem.devices_per_node
        paths: list[Floats] = []
        slow_paths: list[Floats] = []
        for i, name in enumerate(self.encoders):
            before, with_slowest = device_spans(tables[name], self.num_nodes)
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
        """Returns the number of these devices on each node."""
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
        """Returns (encoder, first device, end, kind) of each encoder if the devices of the last one end at `end`."""
        found: list[tuple[str, int, int, Kind]] = []
        size = self.problem.devices_per_node
        for i in range(len(self.encoders) - 1, 0, -1):
            before, with_slowest = (table[0] for table in device_spans(tables[self.encoders[i]], self.num_nodes))
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
        """Seconds of the longest path."""
        sums = dict.fromkeys(self.problem.modules, 0.0)
        for name, (u, v), first, size, cp_size in stages:
            segments, group = self.segments[name], Group(size, cp_size)
            sums[name] += float(segments.by_group[group][u, v])
            if group in segments.cut_s:
                is_last = (first + size) % self.problem.devices_per_node == 0
                sums[name] += float(segments.cut_s[group][int(is_last), v])
        return max((sums[name] for name in self.encoders), default=0.0) + sums[self.last]


class _CountedSearch(_Search):
    """The search where the microbatches in flight decide which stages of the last module fit."""

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
    """Longest path [batch, end] through an encoder and those before it, if its devices end there; by encoder."""
    slow_paths: list[Floats]
    """The same if k* is in one of these encoders."""


def _longer_path(paths: Floats, before: Floats, size: int) -> Floats:
    """Returns [b, q]: the least over p of max(paths[b, p], the encoder's sum on the devices [p, q))."""
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
