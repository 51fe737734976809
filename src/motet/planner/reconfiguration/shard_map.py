"""Maps ranks to the shards of the model that they hold, and plans the copies for a new plan (thesis 2.5).

A layer is a row of equal units, as many as all tensor-parallel sizes divide: rank t of T holds the t-th of T runs.
A layer's parameters, and its optimizer state if it is trainable, travel together. Which node takes which place of a new
plan is chosen so that the fewest bytes move (exactly): an assignment problem between nodes and places, with one between
the devices of a node and those of a place inside it. `motet.planner.reconfiguration.copies` chooses the sources.

Limits: parameters that tensor parallelism does not cut (norms, some embeddings, projectors) count as if it did. Whoever
has any share of a layer has them complete. A head with tied weights counts its own parameters only. Fully sharded
stages count as if every layer were cut evenly; their ranks ascend, so the best order of the devices of such a stage is
not searched.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd, lcm
from typing import Literal, NamedTuple

import numpy as np

from motet.plan import LayerRange, ModulePlan, Plan, Stage
from motet.planner.reconfiguration.copies import Ranges, plan_copies

LayerBytes = Mapping[str, Sequence[float]]
"""Bytes of parameters and optimizer state, by module and layer; 0 for frozen layers, which are built, not copied."""
StateBytes = Mapping[str, Sequence[Sequence[float]]]
"""Bytes of the optimizer state, by module, layer and parameter; frozen parameters have no entry."""


class Part(NamedTuple):
    """The slice [first / of, last / of) of what tensor parallelism cuts."""

    first: int = 0
    last: int = 1
    of: int = 1


What = Literal["all", "values", "states"]
"""Parameters and their optimizer states; or, with ZeRO-1, only one of them."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy of consecutive layers from one rank to another."""

    what: What = "all"
    module: str
    layers: LayerRange
    source: int
    target: int
    part: Part
    """The slice of each layer."""
    num_bytes: float


class Unit(NamedTuple):
    module: str
    layer: int
    share: int


class ShardMap:
    """The units that ranks hold. `plans`: all plans whose stages are compared, as they share the size of a unit."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.units_per_layer = lcm(
            *(_num_shares(plan.modules[name], stage) for plan in plans for name, _, _, stage in plan.stages())
        )

    def of_stage(self, name: str, module: ModulePlan, stage: Stage, place: int) -> list[Unit]:
        """Units of the rank at this place of the stage's group, under the name of the module that has the data."""
        owner, units = module.data_module(name), self.units_of(module, stage, place)
        return [Unit(owner, layer, u) for layer in self.layers_of(module, stage) for u in units]

    def units_of(self, module: ModulePlan, stage: Stage, place: int) -> range:
        """Shares of each of the stage's layers on the rank at this place."""
        num_shares = _num_shares(module, stage)
        size = self.units_per_layer // num_shares
        # The fully sharded shares of one tensor-parallel shard are adjacent.
        member, shard = divmod(place, stage.tp_size)
        share = shard * (num_shares // stage.tp_size) + member if module.fully_sharded else shard
        return range(share * size, (share + 1) * size)

    def layers_of(self, module: ModulePlan, stage: Stage) -> set[int]:
        """The stage's layers, and the embedding that its head is tied to."""
        layers = set(range(*stage.layers))
        return layers | {words for words, head in module.tied if head in layers}

    def weights(self, plan: Plan, layer_bytes: LayerBytes | None) -> dict[Unit, float]:
        """Returns the bytes of every unit. `layer_bytes`: None if all layers are equal."""
        result: dict[Unit, float] = {}
        for name, module in plan.modules.items():
            of_layers = [1.0] * module.num_layers if layer_bytes is None else list(layer_bytes[name])
            for words, head in module.tied if layer_bytes is not None else ():
                of_layers[head] = max(0.0, of_layers[head] - of_layers[words])
            for layer, num_bytes in enumerate(of_layers):
                result |= {Unit(name, layer, u): num_bytes / self.units_per_layer for u in range(self.units_per_layer)}
        return result

    def by_rank(self, plan: Plan) -> list[frozenset[Unit]]:
        held: list[set[Unit]] = [set() for _ in range(plan.num_ranks)]
        for name, _, _, stage in plan.stages():
            for place, rank in enumerate(stage.ranks):
                held[rank].update(self.of_stage(name, plan.modules[name], stage, place))
        return [frozenset(units) for units in held]


def _num_shares(module: ModulePlan, stage: Stage) -> int:
    return stage.tp_size * (stage.cp_size if module.fully_sharded else 1)


Node = tuple[frozenset[Unit], ...]
"""The units of each of its devices."""


def best_places(nodes: Sequence[Node], places: Sequence[Node], weights: Mapping[Unit, float]) -> list[tuple[int, ...]]:
    """Assigns nodes to places so that the fewest bytes move.

    Returns a row (node, device, device, ...) for each place: the node that takes it and, for each device of the place,
    the node's device."""
    from scipy.optimize import linear_sum_assignment  # Takes most of a second to import.

    # Many nodes, and many places, are equal.
    kinds_of_nodes, kinds_of_places = list(dict.fromkeys(nodes)), list(dict.fromkeys(places))
    table = [[_best_devices(node, place, weights) for place in kinds_of_places] for node in kinds_of_nodes]
    rows = [table[kinds_of_nodes.index(node)] for node in nodes]
    columns = [kinds_of_places.index(place) for place in places]
    kept = np.array([[row[column][0] for row in rows] for column in columns])
    _, taken_by = linear_sum_assignment(kept, maximize=True)
    return [(node, *rows[node][column][1]) for node, column in zip(taken_by.tolist(), columns, strict=True)]


def _best_devices(node: Node, place: Node, weights: Mapping[Unit, float]) -> tuple[float, tuple[int, ...]]:
    """Returns the most bytes that stay in place, and the node's device for each device of the place."""
    from scipy.optimize import linear_sum_assignment  # Takes most of a second to import.

    kept = np.array([[sum(weights[unit] for unit in held & needed) for held in node] for needed in place])
    rows, columns = linear_sum_assignment(kept, maximize=True)
    return float(kept[rows, columns].sum()), tuple(columns.tolist())


def missing_layers(held: Iterable[frozenset[Unit]], needed: Iterable[frozenset[Unit]]) -> list[tuple[str, int]]:
    """Returns the layers of which no rank holds some needed unit."""
    lacking = frozenset().union(*needed) - frozenset().union(*held)
    return sorted({(unit.module, unit.layer) for unit in lacking})


class State(NamedTuple):
    """The optimizer state of one parameter, where not every replica of the parameter keeps it (ZeRO-1)."""

    module: str
    layer: int
    number: int
    """Index among the layer's parameters."""


HeldStates = Mapping[int, Mapping[State, Ranges]]
"""Units of each state that each rank holds."""


class StatesToCopy(NamedTuple):
    held: HeldStates
    needed: HeldStates
    unit_bytes: Mapping[State, float]


def layer_copies(
    held: Sequence[frozenset[Unit]],
    needed: Sequence[frozenset[Unit]],
    weights: Mapping[Unit, float],
    *,
    units_per_layer: int,
    devices_per_node: int,
    states: StatesToCopy | None = None,
) -> tuple[Copy, ...]:
    """Plans the copies of what each rank lacks. `held`, `needed`: by rank; every needed unit must be held by some rank.
    `states`: None: a layer's states travel with it, and `weights` count both; else `weights` count parameters only."""
    kept = states or StatesToCopy({}, {}, {})
    made, missing = plan_copies(
        {rank: {**_ranges(units), **kept.held.get(rank, {})} for rank, units in enumerate(held)},
        {rank: {**_ranges(units), **kept.needed.get(rank, {})} for rank, units in enumerate(needed)},
        {**{(unit.module, unit.layer): num_bytes for unit, num_bytes in weights.items()}, **kept.unit_bytes},
        devices_per_node=devices_per_node,
    )
    assert not missing, missing
    total: dict[tuple[What, str, int, int, Part, int], float] = defaultdict(float)
    for copy in made:
        if copy.source == copy.target:
            continue
        module, layer, *number = copy.name
        what: What = "all" if states is None else "states" if number else "values"
        divisor = gcd(copy.start, copy.length, units_per_layer)
        part = Part(copy.start // divisor, (copy.start + copy.length) // divisor, units_per_layer // divisor)
        total[what, module, copy.source, copy.target, part, layer] += copy.num_bytes
    return tuple(_joined([(*key, num_bytes) for key, num_bytes in sorted(total.items())]))


_Name = tuple[str, int] | State


def _ranges(units: frozenset[Unit]) -> dict[_Name, Ranges]:
    """Returns the consecutive runs of units of each layer."""
    shares: dict[tuple[str, int], list[int]] = defaultdict(list)
    for unit in sorted(units):
        shares[unit.module, unit.layer].append(unit.share)
    result: dict[_Name, Ranges] = {}
    for name, ascending in shares.items():
        runs = (list(run) for _, run in groupby(enumerate(ascending), key=lambda pair: pair[1] - pair[0]))
        result[name] = tuple((run[0][1], run[-1][1] + 1) for run in runs)
    return result


def _joined(single: Sequence[tuple[What, str, int, int, Part, int, float]]) -> list[Copy]:
    """Joins consecutive layers between the same ranks. `single`: sorted (what, module, source, target, part, layer,
    bytes)."""
    result: list[Copy] = []
    for what, module, source, target, part, layer, num_bytes in single:
        new = Copy(
            what=what,
            module=module,
            layers=(layer, layer + 1),
            source=source,
            target=target,
            part=part,
            num_bytes=num_bytes,
        )
        last = result[-1] if result else None
        if last is not None and replace(new, layers=(last.layers[0], layer), num_bytes=last.num_bytes) == last:
            new = replace(new, layers=(last.layers[0], layer + 1), num_bytes=last.num_bytes + num_bytes)
            result.pop()
        result.append(new)
    return result
