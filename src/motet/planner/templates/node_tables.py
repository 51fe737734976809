"""Dynamic-programming tables of the cheapest stages on nodes and parts of nodes: the sub-problems of `stage_mapping`.

No stage spans nodes and every device is used, so a chain of layers separates at node borders: first all ways to fill c
devices of one node with the layers [u, v), then node after node. Everything is computed for a whole batch of limits X
on the slowest stage at once, as arrays [batch, u, v].

Given the seconds X of the slowest stage, T1 + T2 + T3 is a sum over stages (`stage_mapping`): t for stages before the
slowest stage k*, 2 t - X for k* and later stages, and `per_stage` X for every stage. So runs are of three kinds:

* `before`: all stages are before k*;
* `after`: all stages are after k*, and faster;
* `slowest`: k* is among the stages.

`NodeTables` ignore how many microbatches are in flight. In 1F1B a stage keeps the activations of as many microbatches
as there are stages from it to the last, so what fits at the end of a pipeline may not fit at its beginning.
`CountedTables` number the stages from the last one back, device by device: slower, and used only where it matters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from motet.ragged_arrays import Bools, Floats

INFINITE = np.inf


@dataclass(frozen=True, eq=False)
class Limits:
    """A batch of intervals [low, high] in which the slowest stage's seconds lie."""

    low: Floats
    high: Floats
    per_stage: float
    """Multiples of X that each stage adds: 4 if there are four microbatches per stage, else 0."""

    @cached_property
    def exact(self) -> Bools:
        """Intervals of one value, where k* must be the last stage that is so slow."""
        return self.low == self.high


class Group(NamedTuple):
    """The devices of a stage: `size` in total, in tensor-parallel groups of size / cp_size."""

    size: int
    cp_size: int = 1


class StageCosts(NamedTuple):
    """Costs [batch, first layer] of all stages of one group and length, by kind; infinite where none is possible."""

    before: Floats
    after: Floats
    slowest: Floats


@dataclass(frozen=True, eq=False)
class Segments:
    """The stages that a chain of layers can be cut into."""

    num_layers: int
    by_group: Mapping[Group, Floats]
    """[u, v]: seconds of the layers [u, v) on this group, forward and backward; infinite where they do not fit."""
    in_flight: Mapping[Group, Floats]
    """[u, v]: microbatches in flight for which the stage has memory; infinite where it keeps nothing of them."""
    cut_s: Mapping[Group, Floats]
    """[is the node's last stage, v]: seconds of the fill spent on messages after a stage that ends before layer v, and
    on their gradients. At the end of the chain both rows are equal."""
    is_on_every_path: bool = True
    """Else T3 does not count these stages: they cost t wherever k* is."""

    def groups(self, size: int) -> list[Group]:
        return [group for group in self.by_group if group.size == size]

    def longest(self, group: Group, limit: float) -> int:
        """Returns the layers of the longest stage that takes at most `limit` seconds."""
        lengths = (self.by_group[group] <= limit).sum(axis=1)
        return int(lengths.max())

    def costs_of_size(self, size: int, length: int, limits: Limits, *, at_end: bool) -> StageCosts:
        """Costs on the best group of `size` devices, which for the slowest stage is not always the fastest group."""
        of_groups = [self.costs(group, length, limits, at_end=at_end) for group in self.groups(size)]
        if len(of_groups) == 1:
            return of_groups[0]
        return StageCosts(*(np.minimum.reduce(kind) for kind in zip(*of_groups, strict=True)))

    def costs(self, group: Group, length: int, limits: Limits, *, at_end: bool) -> StageCosts:
        """Costs of all stages of this group and length. `at_end`: they are the last stages of their nodes."""
        seconds = np.diagonal(self.by_group[group], length)[None]
        low, high = limits.low[:, None], limits.high[:, None]
        allowed = seconds <= high
        once = seconds + limits.per_stage * low
        if group in self.cut_s:
            once = once + self.cut_s[group][int(at_end), length:]
        twice = once + (seconds - low if self.is_on_every_path else 0.0)
        return StageCosts(
            np.where(allowed, once, INFINITE),
            np.where(allowed & (~limits.exact[:, None] | (seconds < high)), twice, INFINITE),
            np.where(allowed & (seconds >= low), twice, INFINITE),
        )


@dataclass(frozen=True, eq=False)
class NodeTables:
    """By kind, [c][batch, u, w]: the least cost of the layers [u, u + w) on exactly c devices of one node.

    `w` goes as far as a node can hold layers within the limits."""

    segments: Segments
    limits: Limits
    stages: Mapping[int, list[StageCosts]]
    """Stage costs by number of devices; entry d - 1 is for stages of d layers."""
    last_stages: Mapping[int, list[StageCosts]]
    """The same for the last stages of nodes."""
    before: list[Floats]
    after: list[Floats]
    slowest: list[Floats]

    @property
    def num_layers(self) -> int:
        return self.before[0].shape[1] - 1


def node_tables(segments: Segments, limits: Limits, devices_per_node: int) -> NodeTables:
    num_layers, batch = segments.num_layers, len(limits.low)
    highest = float(limits.high.max())
    longest: dict[int, int] = {}
    for group in segments.by_group:
        if group.size <= devices_per_node:
            longest[group.size] = max(longest.get(group.size, 0), segments.longest(group, highest))

    def of_all(*, at_end: bool) -> dict[int, list[StageCosts]]:
        return {
            size: [segments.costs_of_size(size, d, limits, at_end=at_end) for d in range(1, end + 1)]
            for size, end in longest.items()
        }

    stages = of_all(at_end=False)
    last_stages = of_all(at_end=True) if segments.cut_s else stages
    width = [0]
    for c in range(1, devices_per_node + 1):
        # No group may be as small as c devices.
        fitting = (min(num_layers, end + width[c - size]) for size, end in longest.items() if size <= c)
        width.append(max(fitting, default=0))
    nothing = np.full((batch, num_layers + 1, max(width) + 1), INFINITE)
    empty = nothing.copy()
    empty[:, :, 0] = 0.0
    before, after, slowest = [empty], [empty], [nothing]
    for c in range(1, devices_per_node + 1):
        tables = [nothing.copy() for _ in range(3)]
        for size, costs in stages.items():
            if size > c:
                continue
            rest = c - size
            for length, cost in enumerate(costs if rest else last_stages[size], start=1):
                _lower(tables[0], length, cost.before, before[rest], width[rest])
                _lower(tables[1], length, cost.after, after[rest], width[rest])
                _lower(tables[2], length, cost.slowest, after[rest], width[rest])
                if rest:
                    _lower(tables[2], length, cost.before, slowest[rest], width[rest])
        before.append(tables[0])
        after.append(tables[1])
        slowest.append(tables[2])
    return NodeTables(segments, limits, stages, last_stages, before, after, slowest)


def _lower(table: Floats, length: int, cost: Floats, rest: Floats, width: int) -> None:
    """table[b, u, w] = min(itself, cost[b, u] + rest[b, u + length, w - length]); `width`: the longest run of `rest`"""
    num_starts = table.shape[1] - length
    width = min(width, table.shape[2] - 1 - length)
    lowered = table[:, :num_starts, length : length + width + 1]
    np.minimum(lowered, cost[:, :, None] + rest[:, length:, : width + 1], out=lowered)


@dataclass(frozen=True, eq=False)
class Suffixes:
    """[k][batch, u]: the least cost of the layers from u on, on k whole nodes."""

    after: list[Floats]
    slowest: list[Floats]


def suffixes(tables: NodeTables, num_nodes: int) -> Suffixes:
    """Computes the suffixes of a chain that ends with the last node."""
    batch, num_layers = len(tables.limits.low), tables.num_layers
    last = np.full((batch, num_layers + 1), INFINITE)
    slowest = [last.copy()]
    last[:, num_layers] = 0.0
    after = [last]
    for _ in range(num_nodes):
        slowest.append(np.minimum(_then(tables.before[-1], slowest[-1]), _then(tables.slowest[-1], after[-1])))
        after.append(_then(tables.after[-1], after[-1]))
    return Suffixes(after, slowest)


def _then(table: Floats, rest: Floats) -> Floats:
    """[b, u]: the least over w of table[b, u, w] + rest[b, u + w]"""
    width = table.shape[2] - 1
    padded = np.concatenate([rest, np.full((len(rest), width), INFINITE)], axis=1)
    least: Floats = (table + sliding_window_view(padded, width + 1, axis=1)).min(axis=2)
    return least


def from_each_device(tables: NodeTables, rests: Suffixes, num_nodes: int) -> tuple[Floats, Floats]:
    """Returns [batch, a]: the least cost of the whole chain on the devices from a on; kinds (after, slowest)."""
    size = len(tables.before) - 1
    after, slowest = [], []
    for a in range(num_nodes * size):
        part, rest = -a % size, num_nodes - -(-a // size)
        if not part:
            after.append(rests.after[rest][:, 0])
            slowest.append(rests.slowest[rest][:, 0])
            continue
        width = tables.after[part].shape[2]
        rest_after, rest_slowest = rests.after[rest][:, :width], rests.slowest[rest][:, :width]
        after.append((tables.after[part][:, 0] + rest_after).min(axis=1))
        slowest.append(
            np.minimum(
                (tables.before[part][:, 0] + rest_slowest).min(axis=1),
                (tables.slowest[part][:, 0] + rest_after).min(axis=1),
            )
        )
    return np.stack(after, axis=1), np.stack(slowest, axis=1)


def device_spans(tables: NodeTables, num_nodes: int) -> tuple[Floats, Floats]:
    """Returns [batch, o, n]: the least cost of the whole chain on n consecutive devices, the first of them the o-th of
    its node; kinds (before, slowest)."""
    size, num_layers = len(tables.before) - 1, tables.num_layers
    batch, num_devices = len(tables.limits.low), num_nodes * size
    to_before, to_after, to_slowest = (
        [_by_end(table) for table in kind] for kind in (tables.before, tables.after, tables.slowest)
    )
    before = np.full((batch, size, num_devices + 1), INFINITE)
    slowest = before.copy()
    for o in range(size):
        for n in range(1, size - o + 1):
            before[:, o, n], slowest[:, o, n] = to_before[n][:, 0, -1], to_slowest[n][:, 0, -1]
    # [batch, o, v]: the layers [0, v) fill the first node to its end and the next k nodes.
    filled = np.stack([to_before[size - o][:, 0] for o in range(size)], axis=1)
    with_slowest = np.stack([to_slowest[size - o][:, 0] for o in range(size)], axis=1)
    ends = [
        np.stack([kind[c][:, :, num_layers] for c in range(size)], axis=1) for kind in (to_before, to_after, to_slowest)
    ]
    for k in range(num_nodes):
        here = _ends(filled, ends[0])
        here_slowest = np.minimum(_ends(filled, ends[2]), _ends(with_slowest, ends[1]))
        for o in range(size):
            first = size - o + k * size
            stop = min(first + size, num_devices + 1)
            if first < stop:
                before[:, o, first:stop] = np.minimum(before[:, o, first:stop], here[:, o, : stop - first])
                slowest[:, o, first:stop] = np.minimum(slowest[:, o, first:stop], here_slowest[:, o, : stop - first])
        filled, with_slowest = (
            _onward(filled, to_before[-1]),
            np.minimum(_onward(filled, to_slowest[-1]), _onward(with_slowest, to_after[-1])),
        )
    return before, slowest


def _by_end(table: Floats) -> Floats:
    """[b, u, v] of a table [b, u, v - u]"""
    batch, num_layers, width = len(table), table.shape[1] - 1, table.shape[2] - 1
    result = np.full((batch, num_layers + 1, num_layers + 1), INFINITE)
    for w in range(width + 1):
        starts = np.arange(num_layers + 1 - w)
        result[:, starts, starts + w] = table[:, starts, w]
    return result


def _onward(filled: Floats, table: Floats) -> Floats:
    """[b, o, v]: the least of filled[b, o, u] + table[b, u, v]"""
    least: Floats = (filled[:, :, :, None] + table[:, None]).min(axis=2)
    return least


def _ends(filled: Floats, ends: Floats) -> Floats:
    """[b, o, c]: the least of filled[b, o, u] + ends[b, c, u]"""
    least: Floats = (filled[:, :, None, :] + ends[:, None]).min(axis=3)
    return least


Kind = str
"""before, after or slowest."""


def trace(tables: NodeTables, parts: list[int], kind: Kind) -> list[tuple[int, int, Group]]:
    """Returns the stages (first layer, end, group) of the cheapest way to put the whole chain on consecutive parts of
    nodes, with `parts` devices each. `tables` must have one interval; a solution must exist."""
    num_layers = tables.num_layers
    end = np.full((1, num_layers + 1), INFINITE)
    slowest = [end.copy()]
    end[:, num_layers] = 0.0
    before, after = [end], [end]
    for part in reversed(parts):
        slowest.append(np.minimum(_then(tables.before[part], slowest[-1]), _then(tables.slowest[part], after[-1])))
        before.append(_then(tables.before[part], before[-1]))
        after.append(_then(tables.after[part], after[-1]))
    rests = {"before": before, "after": after, "slowest": slowest}
    stages: list[tuple[int, int, Group]] = []
    u = 0
    for i, part in enumerate(parts):
        behind = len(parts) - i - 1
        options = [(kind, kind)] if kind != "slowest" else [("before", "slowest"), ("slowest", "after")]
        totals = []
        for here, there in options:
            table = getattr(tables, here)[part][0, u, : num_layers - u + 1]
            total = table + rests[there][behind][0, u : u + len(table)]
            totals.append((float(total.min()), u + int(total.argmin()), here, there))
        _, v, here, kind = min(totals)
        stages += _trace_part(tables, part, here, u, v)
        u = v
    return stages


def _trace_part(tables: NodeTables, part: int, kind: Kind, u: int, v: int) -> list[tuple[int, int, Group]]:
    stages: list[tuple[int, int, Group]] = []
    while part:
        options = {
            "before": [("before", tables.before)],
            "after": [("after", tables.after)],
            "slowest": [("before", tables.slowest), ("slowest", tables.after)],
        }[kind]
        found = []
        for size in tables.stages:
            costs = (tables.last_stages if size == part else tables.stages)[size]
            for length, cost in enumerate(costs[: v - u] if size <= part else [], start=1):
                for stage_kind, rest in options:
                    total = getattr(cost, stage_kind)[0, u] + rest[part - size][0, u + length, v - u - length]
                    found.append((float(total), size, length, stage_kind))
        _, size, length, stage_kind = min(found)
        stages.append((u, u + length, _best_group(tables, size, length, stage_kind, u, at_end=size == part)))
        kind = "after" if stage_kind == "slowest" else kind
        u, part = u + length, part - size
    return stages


def _best_group(tables: NodeTables, size: int, length: int, kind: Kind, u: int, *, at_end: bool) -> Group:
    """Returns the group of the cheapest stage of this size and length that begins at layer u."""

    def cost(group: Group) -> float:
        of_kind: Floats = getattr(tables.segments.costs(group, length, tables.limits, at_end=at_end), kind)
        return float(of_kind[0, u])

    return min(tables.segments.groups(size), key=cost)


@dataclass(frozen=True, eq=False)
class CountedTables:
    """By kind, [number of stages][a, u]: the least cost of the layers from u on, on the devices from a to the last, for
    one interval."""

    segments: Segments
    devices_per_node: int
    most_in_flight: int
    stages: dict[tuple[Group, int], StageCosts]
    """Stage costs by group and number of layers."""
    last_stages: dict[tuple[Group, int], StageCosts]
    """The same for the last stages of nodes."""
    after: list[Floats]
    slowest: list[Floats]

    def fits(self, group: Group, length: int, number: int) -> Bools:
        """Returns [u]: whether the stage fits as the `number`-th from the end."""
        in_flight = np.diagonal(self.segments.in_flight[group], length)
        fitting: Bools = in_flight >= min(number, self.most_in_flight)
        return fitting

    def from_each_device(self) -> tuple[Floats, Floats]:
        """Returns [1, a] for the best number of stages; kinds (after, slowest)."""
        after = np.min([table[:-1, 0] for table in self.after], axis=0)
        slowest = np.min([table[:-1, 0] for table in self.slowest], axis=0)
        return after[None], slowest[None]


def counted_tables(
    segments: Segments, limits: Limits, *, num_devices: int, devices_per_node: int, most_in_flight: int
) -> CountedTables:
    """Makes the tables for `limits` of one interval. `most_in_flight`: the number of microbatches."""
    num_layers, high = segments.num_layers, float(limits.high[0])
    stages, last_stages = (
        {
            (group, length): segments.costs(group, length, limits, at_end=at_end)
            for group in segments.by_group
            if group.size <= devices_per_node
            for length in range(1, segments.longest(group, high) + 1)
        }
        for at_end in (False, True)
    )
    nothing = np.full((num_devices + 1, num_layers + 1), INFINITE)
    end = nothing.copy()
    end[-1, -1] = 0.0
    tables = CountedTables(segments, devices_per_node, most_in_flight, stages, last_stages, [end], [nothing])
    largest = max((group.size for group, _ in stages), default=0)
    most_layers = max((length for _, length in stages), default=0)
    for number in range(1, min(num_devices, num_layers) + 1):
        after, slowest = nothing.copy(), nothing.copy()
        # The first devices and layers at which so many stages can begin.
        first_devices = max(0, num_devices - number * largest), num_devices - number + 1
        first_layers = max(0, num_layers - number * most_layers), num_layers - number + 1
        for (group, length), costs in stages.items():
            fits = tables.fits(group, length, number)
            if fits.any():
                last = last_stages[group, length]
                size, (a, a_end), (u, u_end) = group.size, first_devices, first_layers
                a_end, u_end = min(a_end, num_devices - size + 1), min(u_end, num_layers - length + 1)
                window = _Window(size, length, a, max(a, a_end), u, max(u, u_end))
                _lower_counted(after, costs.after, last.after, tables.after[-1], fits, window, devices_per_node)
                _lower_counted(slowest, costs.slowest, last.slowest, tables.after[-1], fits, window, devices_per_node)
                _lower_counted(slowest, costs.before, last.before, tables.slowest[-1], fits, window, devices_per_node)
        if not (np.isfinite(after).any() or np.isfinite(slowest).any()):
            break
        tables.after.append(after)
        tables.slowest.append(slowest)
    return tables


class _Window(NamedTuple):
    """The first devices [a, a_end) and layers [u, u_end) at which a stage of this size and length may begin."""

    size: int
    length: int
    a: int
    a_end: int
    u: int
    u_end: int


def _lower_counted(
    table: Floats, cost: Floats, last_cost: Floats, rest: Floats, fits: Bools, window: _Window, devices_per_node: int
) -> None:
    """table[a, u] = min(itself, cost[u] + rest[a + size, u + length]) where the stage does not span nodes. `last_cost`
    is for stages that end with their node."""
    size, length, a, a_end, u, u_end = window
    behind = rest[a + size : a_end + size, u + length : u_end + length]
    lowered = np.where(fits, cost[0], INFINITE)[u:u_end] + behind
    ends = slice((-size - a) % devices_per_node, None, devices_per_node)
    lowered[ends] = np.where(fits, last_cost[0], INFINITE)[u:u_end] + behind[ends]
    for offset in range(devices_per_node - size + 1, devices_per_node):
        lowered[(offset - a) % devices_per_node :: devices_per_node] = INFINITE
    here = table[a:a_end, u:u_end]
    np.minimum(here, lowered, out=here)


def trace_counted(tables: CountedTables, first: int, kind: Kind) -> list[tuple[int, int, Group]]:
    """Returns the stages (first layer, end, group) of the cheapest way to put the chain on the devices from `first`."""
    of_kind = tables.after if kind == "after" else tables.slowest
    number = min(range(len(of_kind)), key=lambda number: float(of_kind[number][first, 0]))
    stages: list[tuple[int, int, Group]] = []
    a, u = first, 0
    while number:
        options = [("after", tables.after, "after")]
        if kind == "slowest":
            options = [("before", tables.slowest, "slowest"), ("slowest", tables.after, "after")]
        found = []
        for group, length in tables.stages:
            size = group.size
            is_last = (a + size) % tables.devices_per_node == 0
            costs = (tables.last_stages if is_last else tables.stages)[group, length]
            if a % tables.devices_per_node + size > tables.devices_per_node or u + length > tables.segments.num_layers:
                continue
            if tables.fits(group, length, number)[u]:
                for stage_kind, rest, then in options:
                    if a + size < len(rest[number - 1]):
                        total = getattr(costs, stage_kind)[0, u] + rest[number - 1][a + size, u + length]
                        found.append((float(total), group, length, then))
        _, group, length, kind = min(found)
        stages.append((u, u + length, group))
        a, u, number = a + group.size, u + length, number - 1
    return stages
