"""What each rank holds of the model's state, and who sends what to whom so that a new plan can start (thesis 2.5).

Every layer is a row of equal units, as many as all tensor-parallel sizes divide: rank t of T holds the t-th of T runs.
A layer's parameters, and its optimizer state if it is trainable, travel together.

Who takes which place is chosen so that the fewest bytes move, exactly: an assignment problem between nodes and places,
with one between the devices of a node and those of a place inside it. Who sends is chosen by
`motet.planner.reconfiguration.copies`, as in the recovery itself.

Limits: parameters that tensor parallelism does not cut (norms, some embeddings, projectors) count as if it did. Whoever
has any share of a layer has them complete. A layer whose words are tied to the head counts as if it had nothing else.
Fully sharded stages count as if every layer were cut evenly; their ranks ascend, so among the devices of such a stage
the best order is not looked for.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import lcm
from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from motet.plan import LayerRange, ModulePlan, Plan, Stage
from motet.planner.reconfiguration.copies import Ranges
from motet.planner.reconfiguration.copies import copies as copies_of_ranges

LayerBytes = Mapping[str, Sequence[float]]
"""Of each layer of each module: what is copied of it, its parameters and optimizer state. Nothing of frozen layers: who
needs one builds it with its parameters."""


StateBytes = Mapping[str, Sequence[Sequence[float]]]
"""By module and layer, of each of its parameters' states; nothing of what is frozen."""


class Part(NamedTuple):
    """[first / of, last / of) of what tensor parallelism cuts."""

    first: int = 0
    last: int = 1
    of: int = 1


What = Literal["all", "values", "states"]
"""Parameters, and optimizer states where they are trainable; or, with ZeRO-1, either of them."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Of layers, from one rank to another."""

    what: What = "all"
    module: str
    layers: LayerRange
    source: int
    target: int
    part: Part
    """Of each layer."""
    num_bytes: float


class Unit(NamedTuple):
    module: str
    layer: int
    share: int


class Holdings:
    """Which units ranks hold under a plan."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        """`plans`: all whose stages are to be compared."""
        self.units_per_layer = lcm(
            *(_num_shares(plan.modules[name], stage) for plan in plans for name, _, _, stage in plan.stages())
        )

    def of_stage(self, name: str, module: ModulePlan, stage: Stage, place: int) -> list[Unit]:
        """What the rank at this place of the stage's group holds. Modules that repeat another are their own."""
        owner, units = module.data_module(name), self.units_of(module, stage, place)
        return [Unit(owner, layer, u) for layer in self.layers_of(module, stage) for u in units]

    def units_of(self, module: ModulePlan, stage: Stage, place: int) -> range:
        """Of each of the stage's layers, on the rank at this place."""
        num_shares = _num_shares(module, stage)
        size = self.units_per_layer // num_shares
        # Shares of a tensor-parallel shard lie one after the other.
        member, shard = divmod(place, stage.tp_size)
        share = shard * (num_shares // stage.tp_size) + member if module.fully_sharded else shard
        return range(share * size, (share + 1) * size)

    def layers_of(self, module: ModulePlan, stage: Stage) -> set[int]:
        """Whoever has a head that is tied to the words has these."""
        layers = set(range(*stage.layers))
        return layers | {words for words, head in module.tied if head in layers}

    def weights(self, plan: Plan, layer_bytes: LayerBytes | None) -> dict[Unit, float]:
        """Bytes of every unit. `layer_bytes`: None if all layers are equal."""
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
    """Into how many shares of equal size the stage's group divides each layer."""
    return stage.tp_size * (stage.cp_size if module.fully_sharded else 1)


Node = tuple[frozenset[Unit], ...]
"""What each of its devices holds."""


def best_places(nodes: Sequence[Node], places: Sequence[Node], weights: Mapping[Unit, float]) -> list[tuple[int, ...]]:
    """For each place: the node that takes it, and for each device of the place the node's device.

    Returns rows (node, device, device, ...). The bytes that nodes lack at their places are the fewest possible."""
    kinds_of_nodes, kinds_of_places = list(dict.fromkeys(nodes)), list(dict.fromkeys(places))
    # Most nodes, and most places, are alike.
    table = [[_best_devices(node, place, weights) for place in kinds_of_places] for node in kinds_of_nodes]
    rows = [table[kinds_of_nodes.index(node)] for node in nodes]
    columns = [kinds_of_places.index(place) for place in places]
    kept = np.array([[row[column][0] for row in rows] for column in columns])
    _, taken_by = linear_sum_assignment(kept, maximize=True)
    return [(node, *rows[node][column][1]) for node, column in zip(taken_by.tolist(), columns, strict=True)]


def _best_devices(node: Node, place: Node, weights: Mapping[Unit, float]) -> tuple[float, tuple[int, ...]]:
    """The most bytes that the node's devices can keep at the place; for each device of the place, the node's device."""
    kept = np.array([[sum(weights[unit] for unit in held & needed) for held in node] for needed in place])
    rows, columns = linear_sum_assignment(kept, maximize=True)
    return float(kept[rows, columns].sum()), tuple(columns.tolist())


def missing_layers(held: Iterable[frozenset[Unit]], needed: Iterable[frozenset[Unit]]) -> list[tuple[str, int]]:
    """Layers that are needed and of which nobody holds some unit."""
    lacking = frozenset().union(*needed) - frozenset().union(*held)
    return sorted({(unit.module, unit.layer) for unit in lacking})


class State(NamedTuple):
    """The optimizer's, of one parameter, where not all who hold the parameter keep it (ZeRO-1)."""

    module: str
    layer: int
    number: int
    """Among the layer's parameters."""


HeldStates = Mapping[int, Mapping[State, Ranges]]
"""By rank, the units of each state."""


class StatesToCopy(NamedTuple):
    held: HeldStates
    needed: HeldStates
    unit_bytes: Mapping[State, float]


def copies(
    held: Sequence[frozenset[Unit]],
    needed: Sequence[frozenset[Unit]],
    weights: Mapping[Unit, float],
    *,
    units_per_layer: int,
    devices_per_node: int,
    states: StatesToCopy | None = None,
) -> tuple[Copy, ...]:
    """What each rank lacks, from ranks that hold it. `held`, `needed`: by rank; somebody holds every unit needed.
    `states`: None: whoever holds a layer has its states, and `weights` are of both; else of parameters alone."""
    kept = StatesToCopy({}, {}, {}) if states is None else states
    made, missing = copies_of_ranges(
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
        part = _part(copy.start, copy.start + copy.length, units_per_layer)
        total[what, module, copy.source, copy.target, part, layer] += copy.num_bytes
    return tuple(_joined([(*key, num_bytes) for key, num_bytes in sorted(total.items())]))


_Name = tuple[str, int] | State


def _ranges(units: frozenset[Unit]) -> dict[_Name, Ranges]:
    """Of each layer, the runs of units."""
    shares: dict[tuple[str, int], list[int]] = defaultdict(list)
    for unit in sorted(units):
        shares[unit.module, unit.layer].append(unit.share)
    return {name: tuple(_runs(of_layer)) for name, of_layer in shares.items()}


def _runs(ascending: Sequence[int]) -> Iterator[tuple[int, int]]:
    for _, group in groupby(enumerate(ascending), key=lambda pair: pair[1] - pair[0]):
        run = [share for _, share in group]
        yield run[0], run[-1] + 1


def _part(first: int, last: int, of: int) -> Part:
    """In lowest terms."""
    divisor = int(np.gcd.reduce([first, last, of]))
    return Part(first // divisor, last // divisor, of // divisor)


def _joined(single: Sequence[tuple[What, str, int, int, Part, int, float]]) -> list[Copy]:
    """Consecutive layers between the same ranks become one copy. `single`: (what, module, source, target, part, layer,
    bytes) of each, sorted."""
    result: list[Copy] = []
    between = None
    for what, module, source, target, part, layer, num_bytes in single:
        if result and between == (what, module, source, target, part) and result[-1].layers[1] == layer:
            last = result[-1]
            result[-1] = replace(last, layers=(last.layers[0], layer + 1), num_bytes=last.num_bytes + num_bytes)
            continue
        between = what, module, source, target, part
        result.append(
            Copy(
                what=what,
                module=module,
                layers=(layer, layer + 1),
                source=source,
                target=target,
                part=part,
                num_bytes=num_bytes,
            )
        )
    return result
