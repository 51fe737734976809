"""What each rank holds of the model's state, and who sends what to whom so that a new plan can start (thesis 2.5).

Every layer is a row of equal units, as many as all tensor-parallel sizes divide: rank t of T holds the t-th of T runs.
A layer's parameters, and its optimizer state if it is trainable, travel together.

Who takes which place is chosen so that the fewest bytes move, exactly: an assignment problem between nodes and places,
with one between the devices of a node and those of a place inside it. Who sends is chosen so that the rank that sends
most sends as little as possible: from the largest piece to the smallest the least loaded holder, then pieces are passed
on along chains of holders while that helps (exact for pieces of equal size, as Harvey et al. 2003 show for
semi-matchings). A holder in the target's own node goes first: it needs no network.

Limits: parameters that tensor parallelism does not cut (norms, some embeddings, projectors) count as if it did. Whoever
has any share of a layer has them complete. Fully sharded stages count as if every layer were cut evenly; their ranks
ascend, so among the devices of such a stage the best order is not looked for.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from motet.arrays import Floats
from motet.plan import LayerRange, ModulePlan, Plan, Stage

LayerBytes = Mapping[str, Sequence[float]]
"""Of each layer of each module: parameters and, if it is trainable, optimizer state."""


class Part(NamedTuple):
    """[first / of, last / of) of what tensor parallelism cuts."""

    first: int = 0
    last: int = 1
    of: int = 1


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Parameters, and optimizer state where they are trainable, from one rank to another."""

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
        num_shares = _num_shares(module, stage)
        size = self.units_per_layer // num_shares
        # Shares of a tensor-parallel shard lie one after the other.
        member, shard = divmod(place, stage.tp_size)
        share = shard * (num_shares // stage.tp_size) + member if module.fully_sharded else shard
        owner = module.data_module(name)
        units = range(share * size, (share + 1) * size)
        return [Unit(owner, layer, u) for layer in range(*stage.layers) for u in units]

    def weights(self, plan: Plan, layer_bytes: LayerBytes | None) -> dict[Unit, float]:
        """Bytes of every unit. `layer_bytes`: None if all layers are equal."""
        return {
            Unit(name, layer, u): (layer_bytes[name][layer] if layer_bytes is not None else 1.0) / self.units_per_layer
            for name, module in plan.modules.items()
            for layer in range(module.num_layers)
            for u in range(self.units_per_layer)
        }

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


@dataclass
class _Piece:
    """Units of one layer that one target lacks and the same ranks hold."""

    target: int
    units: tuple[Unit, ...]
    holders: tuple[int, ...]
    num_bytes: float


def copies(
    held: Sequence[frozenset[Unit]],
    needed: Sequence[frozenset[Unit]],
    weights: Mapping[Unit, float],
    *,
    units_per_layer: int,
    devices_per_node: int,
) -> tuple[Copy, ...]:
    """What each rank lacks, from ranks that hold it. `held`, `needed`: by rank; somebody holds every unit needed."""
    pieces = _pieces(held, needed, weights, devices_per_node)
    sources = balanced_sources(
        [piece.num_bytes for piece in pieces], [piece.holders for piece in pieces], num_ranks=len(held)
    )
    single = []
    for piece, source in zip(pieces, sources, strict=True):
        first = piece.units[0]
        part = _part(first.share, piece.units[-1].share + 1, units_per_layer)
        single.append((first.module, source, piece.target, part, first.layer, piece.num_bytes))
    return tuple(_joined(sorted(single)))


def _pieces(
    held: Sequence[frozenset[Unit]],
    needed: Sequence[frozenset[Unit]],
    weights: Mapping[Unit, float],
    devices_per_node: int,
) -> list[_Piece]:
    holders: dict[Unit, list[int]] = defaultdict(list)
    for rank, units in enumerate(held):
        for unit in units:
            holders[unit].append(rank)
    pieces = []
    for target, units in enumerate(needed):
        node = target // devices_per_node
        with_holders = []
        for unit in sorted(units - held[target]):
            near = tuple(rank for rank in holders[unit] if rank // devices_per_node == node)
            with_holders.append((unit, near or tuple(holders[unit])))
        for run in _runs(with_holders):
            same = tuple(unit for unit, _ in run)
            pieces.append(_Piece(target, same, run[0][1], sum(weights[unit] for unit in same)))
    return pieces


def _runs(units: Sequence[tuple[Unit, tuple[int, ...]]]) -> list[list[tuple[Unit, tuple[int, ...]]]]:
    """Consecutive units of one layer with the same holders."""
    keyed = enumerate(units)
    return [
        [entry for _, entry in group]
        for _, group in groupby(keyed, key=lambda e: (e[1][0].module, e[1][0].layer, e[1][0].share - e[0], e[1][1]))
    ]


def _part(first: int, last: int, of: int) -> Part:
    """In lowest terms."""
    divisor = int(np.gcd.reduce([first, last, of]))
    return Part(first // divisor, last // divisor, of // divisor)


def _joined(single: Sequence[tuple[str, int, int, Part, int, float]]) -> list[Copy]:
    """Consecutive layers between the same ranks become one copy. `single`: (module, source, target, part, layer, bytes)
    of each, sorted."""
    result: list[Copy] = []
    for module, source, target, part, layer, num_bytes in single:
        last = result[-1] if result else None
        new = Copy(
            module=module, layers=(layer, layer + 1), source=source, target=target, part=part, num_bytes=num_bytes
        )
        if last is not None and (last.module, last.source, last.target, last.part, last.layers[1]) == (
            module,
            source,
            target,
            part,
            layer,
        ):
            result[-1] = Copy(
                module=module,
                layers=(last.layers[0], layer + 1),
                source=source,
                target=target,
                part=part,
                num_bytes=last.num_bytes + num_bytes,
            )
        else:
            result.append(new)
    return result


def balanced_sources(sizes: Sequence[float], holders: Sequence[Sequence[int]], *, num_ranks: int) -> list[int]:
    """For each piece, which of its holders sends it."""
    load: Floats = np.zeros(num_ranks)
    source = [-1] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], len(holders[i]))):
        source[i] = min(holders[i], key=lambda rank: (load[rank], rank))
        load[source[i]] += sizes[i]
    sent: dict[int, set[int]] = defaultdict(set)
    for i, rank in enumerate(source):
        sent[rank].add(i)
    while sent:
        chain = _relieving_chain(max(sent, key=lambda rank: load[rank]), sizes, holders, source, sent, load)
        if chain is None:
            break
        for i, rank in chain:
            sent[source[i]].remove(i)
            load[source[i]] -= sizes[i]
            source[i] = rank
            sent[rank].add(i)
            load[rank] += sizes[i]
    return source


def _relieving_chain(
    fullest: int,
    sizes: Sequence[float],
    holders: Sequence[Sequence[int]],
    source: Sequence[int],
    sent: Mapping[int, set[int]],
    load: Floats,
) -> list[tuple[int, int]] | None:
    """Pieces to pass on, each to the next holder, after which every rank concerned sends less than the fullest did."""
    came_by: dict[int, tuple[int, int]] = {}
    """For each rank reached: the piece that it would take, and its size before."""
    queue, seen = [fullest], {fullest}
    while queue:
        rank = queue.pop(0)
        for i in sorted(sent.get(rank, ()), key=lambda i: sizes[i]):
            for other in holders[i]:
                if other in seen or sizes[i] <= 0:
                    continue
                # Passed on along the chain, `other` takes piece i and may give one of its own.
                seen.add(other)
                came_by[other] = (i, rank)
                if load[other] + sizes[i] < load[fullest] * (1 - 1e-12):
                    return _chain(other, fullest, came_by, sizes, load)
                queue.append(other)
    return None


def _chain(
    end: int, fullest: int, came_by: Mapping[int, tuple[int, int]], sizes: Sequence[float], load: Floats
) -> list[tuple[int, int]] | None:
    chain: list[tuple[int, int]] = []
    given = 0.0
    rank = end
    while rank != fullest:
        i, before = came_by[rank]
        if load[rank] + sizes[i] - given >= load[fullest] * (1 - 1e-12):
            return None
        chain.append((i, rank))
        given, rank = sizes[i], before
    return chain
