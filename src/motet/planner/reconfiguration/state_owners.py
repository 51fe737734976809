"""Chooses which pipelines own the optimizer state of each parameter, so that ZeRO-1 survives failures.

Plain ZeRO-1 (Rajbhandari et al. 2020, "ZeRO", section 5.1) gives the state of a parameter to one of its replicas, and a
loss takes it along. Here f + 1 pipelines own it. Pipelines have nodes of their own, so any f lost nodes leave one of
these pipelines whole. Replicas that have a state already are preferred, so that little moves; the rest is balanced in
bytes, from the largest parameter to the smallest.

`choose_state_owners` is pure and serves recoveries (`motet.resilience.state_transfer`), which pass what ranks really
hold. The functions below it predict the same for plans, from sizes alone.

Limits: a parameter's state is divided only as tensor parallelism divides the parameter, so the owner of a large
embedding may have more than others. In plans, a layer's parameters are its linears, its embedding and one more for the
rest, so the predicted bytes are not exact; tensor parallelism is taken to cut all of them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from motet.plan import Plan
from motet.planner.reconfiguration.copies import Ranges, local_parts, match_parts
from motet.planner.reconfiguration.shard_map import HeldStates, ShardMap, State, StateBytes, StatesToCopy, Unit
from motet.planner.templates.pipelines import Templates

SLACK = 1.1
"""Owners' bytes may differ by this factor before a state moves for balance alone."""


@dataclass(frozen=True, kw_only=True)
class ParameterReplica:
    """One replica of a parameter: a tensor-parallel group, or one rank that holds it whole."""

    ranks: tuple[int, ...]
    pipeline: int
    num_bytes: float
    """Bytes of the optimizer state on each rank."""
    lacking_bytes: float
    """Bytes of the state that all these ranks together would have to receive."""


ReplicasByParameter = Mapping[str, Sequence[ParameterReplica]]
StateOwners = ReplicasByParameter
"""Replicas that keep the optimizer state of each parameter."""


def choose_state_owners(replicas: ReplicasByParameter, number: int) -> StateOwners:
    """Chooses `number` replicas of each parameter, in different pipelines; all of them where there are fewer."""
    load: dict[int, float] = defaultdict(float)
    chosen: dict[str, list[ParameterReplica]] = {}
    for name in sorted(replicas, key=lambda name: (-max(h.num_bytes for h in replicas[name]), name)):
        rest = list(replicas[name])
        chosen[name] = []
        while rest and len(chosen[name]) < number:
            best = min(rest, key=lambda h: (h.lacking_bytes, _fullest(load, h) + h.num_bytes, h.ranks))
            _add(load, best, +1)
            chosen[name].append(best)
            rest = [h for h in rest if h.pipeline != best.pipeline]
    _balance(chosen, replicas, load)
    return chosen


def _balance(chosen: dict[str, list[ParameterReplica]], replicas: ReplicasByParameter, load: dict[int, float]) -> None:
    """Moves states away from the ranks that own most, as long as that helps."""
    owned: dict[int, set[str]] = defaultdict(set)
    for name, owners in chosen.items():
        for owner in owners:
            for rank in owner.ranks:
                owned[rank].add(name)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank in sorted(load, key=lambda rank: (-load[rank], rank)):
            while (move := _best_move(rank, owned[rank], chosen, replicas, load)) is not None:
                name, old, new = move
                chosen[name][chosen[name].index(old)] = new
                for holder, sign in ((old, -1), (new, +1)):
                    _add(load, holder, sign)
                    for member in holder.ranks:
                        (owned[member].add if sign > 0 else owned[member].remove)(name)
                has_moved = True


def _best_move(
    rank: int,
    owned: set[str],
    chosen: ReplicasByParameter,
    replicas: ReplicasByParameter,
    load: Mapping[int, float],
) -> tuple[str, ParameterReplica, ParameterReplica] | None:
    """Returns a parameter whose state the rank owns, its present owner and the better one; None if there is none."""
    best = None
    for name in owned:
        old = next(owner for owner in chosen[name] if rank in owner.ranks)
        taken = {owner.pipeline for owner in chosen[name] if owner is not old}
        for new in replicas[name]:
            after = _fullest(load, new) + new.num_bytes
            if new.pipeline in taken or rank in new.ranks or after * SLACK > load[rank]:
                continue
            # First moves that copy nothing; then few large ones.
            order = (new.lacking_bytes > 0, -new.num_bytes, after, name, new.ranks)
            if best is None or order < best[0]:
                best = order, (name, old, new)
    return None if best is None else best[1]


def _fullest(load: Mapping[int, float], holder: ParameterReplica) -> float:
    return max(load.get(rank, 0.0) for rank in holder.ranks)


def _add(load: dict[int, float], holder: ParameterReplica, sign: int) -> None:
    for rank in holder.ranks:
        load[rank] += sign * holder.num_bytes


OwnedStates = Mapping[State, Sequence[tuple[int, ...]]]
"""Groups of ranks that own each state, each group in the order of its shares."""


@dataclass(frozen=True)
class _Group:
    """Ranks that hold one replica of a layer, and the units of each."""

    pipeline: int
    ranks: tuple[int, ...]
    units: tuple[range, ...]


def initial_owners(plan: Plan, templates: Templates) -> OwnedStates | None:
    """Returns the owners at the start of a training; None without ZeRO-1."""
    return None if templates.state_bytes is None else next_owners(plan, ShardMap([plan]), templates, held=None)


def next_owners(plan: Plan, shard_map: ShardMap, templates: Templates, *, held: HeldStates | None) -> OwnedStates:
    """Returns the owners under a plan. `held`: states that its ranks already have; None: nothing has to be copied."""
    assert templates.state_bytes is not None
    groups, states = _groups(plan, shard_map), list(_states(templates.state_bytes))
    replicas: dict[str, list[ParameterReplica]] = {}
    for state, num_bytes in states:
        unit = num_bytes / shard_map.units_per_layer
        replicas[_name(state)] = [
            ParameterReplica(
                ranks=group.ranks,
                pipeline=group.pipeline,
                num_bytes=unit * len(group.units[0]),
                lacking_bytes=0.0 if held is None else unit * _num_lacking(state, group, held),
            )
            for group in groups[state.module, state.layer]
        ]
    chosen = choose_state_owners(replicas, templates.state_copies)
    return {state: [owner.ranks for owner in chosen[_name(state)]] for state, _ in states}


def _name(state: State) -> str:
    return f"{state.module}.{state.layer}.{state.number}"


def _states(state_bytes: StateBytes) -> Iterator[tuple[State, float]]:
    for module, layers in state_bytes.items():
        for layer, parameters in enumerate(layers):
            for number, num_bytes in enumerate(parameters):
                yield State(module, layer, number), num_bytes


def states_to_copy(
    plan: Plan, shard_map: ShardMap, state_bytes: StateBytes, owned: OwnedStates, held: HeldStates
) -> StatesToCopy:
    """Returns what the owners under a plan need. `held`: by rank of the plan, and further ranks that only send."""
    unit_bytes = {state: num_bytes / shard_map.units_per_layer for state, num_bytes in _states(state_bytes)}
    return StatesToCopy(held, states_by_rank(plan, shard_map, owned), unit_bytes)


def without_states(weights: Mapping[Unit, float], shard_map: ShardMap, state_bytes: StateBytes) -> dict[Unit, float]:
    """Subtracts the optimizer states from the bytes of units."""
    return {
        unit: max(0.0, num_bytes - sum(state_bytes[unit.module][unit.layer]) / shard_map.units_per_layer)
        for unit, num_bytes in weights.items()
    }


def _num_lacking(state: State, group: _Group, held: HeldStates) -> int:
    lacking = 0
    for rank, units in zip(group.ranks, group.units, strict=True):
        _, parts = match_parts(local_parts(((units.start, units.stop),)), held.get(rank, {}).get(state, ()))
        lacking += sum(b - a for a, b, _ in parts)
    return lacking


def states_by_rank(plan: Plan, shard_map: ShardMap, owned: OwnedStates) -> dict[int, dict[State, Ranges]]:
    """Returns the units of each state by rank. `owned`: the owners under this plan."""
    groups = {
        (*layer, group.ranks): group for layer, of_layer in _groups(plan, shard_map).items() for group in of_layer
    }
    result: dict[int, dict[State, Ranges]] = defaultdict(dict)
    for state, owners in owned.items():
        for ranks in owners:
            group = groups[state.module, state.layer, ranks]
            for rank, units in zip(ranks, group.units, strict=True):
                result[rank][state] = ((units.start, units.stop),)
    return result


def lost_states(owned: OwnedStates, held: HeldStates, shard_map: ShardMap) -> list[State]:
    """Returns the states of which some unit is on none of these ranks."""
    there: dict[State, set[int]] = defaultdict(set)
    for of_rank in held.values():
        for state, ranges in of_rank.items():
            there[state].update(unit for a, b in ranges for unit in range(a, b))
    return [state for state in owned if len(there[state]) < shard_map.units_per_layer]


def _groups(plan: Plan, shard_map: ShardMap) -> dict[tuple[str, int], list[_Group]]:
    """Returns the groups by module and layer. A rank with a tied embedding beside its own layer is in two groups."""
    result: dict[tuple[str, int], list[_Group]] = defaultdict(list)
    for name, r, _, stage in plan.stages():
        module = plan.modules[name]
        # Members of a context-parallel group hold the same parameters, unless the module is fully sharded.
        size = len(stage.ranks) if module.fully_sharded else stage.tp_size
        for first in range(0, len(stage.ranks), size):
            ranks = stage.ranks[first : first + size]
            units = tuple(shard_map.units_of(module, stage, first + i) for i in range(size))
            for layer in shard_map.layers_of(module, stage):
                group = _Group(r, ranks, units)
                if group not in result[module.data_module(name), layer]:
                    result[module.data_module(name), layer].append(group)
    return result
