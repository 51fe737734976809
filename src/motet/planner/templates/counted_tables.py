"""As `node_tables`, for one interval, where memory depends on how many stages follow.

In 1F1B a stage keeps the activations of as many microbatches as there are stages from it to the last, so what fits at
the end of a pipeline may not fit at its beginning. Stages are counted from the last one back, and the tables are by
their number, device after device: slower, so it is used only where the number matters.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from motet.planner.templates.node_tables import INFINITE, Group, Kind, Limits, Segments, StageCosts
from motet.ragged_arrays import Bools, Floats


@dataclass(frozen=True, eq=False)
class CountedTables:
    """[number of stages][a, u]: the least cost of the layers from u on, on the devices from a to the last; kinds as in
    `node_tables`."""

    segments: Segments
    devices_per_node: int
    most_in_flight: int
    stages: dict[tuple[Group, int], StageCosts]
    """By group and number of layers."""
    last_stages: dict[tuple[Group, int], StageCosts]
    """Of those that are the last ones on their node."""
    after: list[Floats]
    slowest: list[Floats]

    def fits(self, group: Group, length: int, number: int) -> Bools:
        """[u]: whether a stage fits where it is the `number`-th from the end."""
        in_flight = np.diagonal(self.segments.in_flight[group], length)
        fitting: Bools = in_flight >= min(number, self.most_in_flight)
        return fitting

    def from_each_device(self) -> tuple[Floats, Floats]:
        """[1, a], with whatever number of stages is best; (all stages after k*, k* among them)."""
        after = np.min([table[:-1, 0] for table in self.after], axis=0)
        slowest = np.min([table[:-1, 0] for table in self.slowest], axis=0)
        return after[None], slowest[None]


def counted_tables(
    segments: Segments, limits: Limits, *, num_devices: int, devices_per_node: int, most_in_flight: int
) -> CountedTables:
    """`limits`: of one interval. `most_in_flight`: the number of microbatches."""
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
        # So many stages begin no earlier and no later than there.
        devices = max(0, num_devices - number * largest), num_devices - number + 1
        layers = max(0, num_layers - number * most_layers), num_layers - number + 1
        for (group, length), costs in stages.items():
            fits = tables.fits(group, length, number)
            if fits.any():
                last = last_stages[group, length]
                window = _window(group.size, length, devices, layers, num_devices, num_layers)
                _lower(after, costs.after, last.after, tables.after[-1], fits, window, devices_per_node)
                _lower(slowest, costs.slowest, last.slowest, tables.after[-1], fits, window, devices_per_node)
                _lower(slowest, costs.before, last.before, tables.slowest[-1], fits, window, devices_per_node)
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


def _window(
    size: int, length: int, devices: tuple[int, int], layers: tuple[int, int], num_devices: int, num_layers: int
) -> _Window:
    a, a_end = devices[0], min(devices[1], num_devices - size + 1)
    u, u_end = layers[0], min(layers[1], num_layers - length + 1)
    return _Window(size, length, a, max(a, a_end), u, max(u, u_end))


def _lower(
    table: Floats, cost: Floats, last_cost: Floats, rest: Floats, fits: Bools, window: _Window, devices_per_node: int
) -> None:
    """table[a, u] = min(itself, cost[u] + rest[a + size, u + length]) where the stage stays in its node; `last_cost`:
    where it ends with it."""
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
    """The stages (first layer, end, group) of the best way to put the whole chain on the devices from `first` on."""
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
