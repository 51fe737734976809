"""Which optimizer states ranks keep under ZeRO-1, and what must be copied of them
(`motet.planner.reconfiguration.optimizer_state`).

As in a recovery (`motet.resilience.optimizer_state`): f + 1 pipelines keep the state of each parameter, who has one
goes on keeping it, and new keepers get it from those that are left. For plans, that is: before anything is run, from
sizes alone.

Limits: a layer's parameters are its linears, its words and one more for the rest, so what moves for balance is not to
the byte what a recovery moves. As everywhere in plans, tensor parallelism is taken to cut all of them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from motet.plan import Plan
from motet.planner.reconfiguration.copies import Ranges, take, wanted_parts
from motet.planner.reconfiguration.holdings import HeldStates, Holdings, State, StateBytes, StatesToCopy, Unit
from motet.planner.templates.pipelines import Templates

# Who keeps the optimizer's state of which parameter: f + 1 holders, each in another pipeline (ZeRO-1 that survives).
#
# Plain ZeRO-1 (Rajbhandari et al. 2020, "ZeRO", section 5.1) gives the state of a parameter to one of its replicas,
# which a loss takes along. Here f + 1 pipelines have it. Pipelines have nodes of their own, so any f nodes that are
# lost leave one of them whole, and with it all of the state.
#
# Pure, and the same wherever it is computed. Who has a state already is preferred, so that little moves; what is left
# is balanced in bytes, from the largest parameter to the smallest.
#
# Limits: a parameter's state is not divided (but as tensor parallelism divides the parameter itself), so whoever keeps
# that of a large embedding may have more than others.


SLACK = 1.1
"""Holders may differ so much before a state moves for balance alone."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Ranks that hold one parameter together: a tensor-parallel group, or one rank that holds it whole."""

    ranks: tuple[int, ...]
    pipeline: int
    num_bytes: float
    """Of the state, on each rank."""
    lacking_bytes: float
    """What they would have to get from others, all together."""


Keepers = Mapping[str, Sequence[Holder]]
"""By parameter."""


def choose_keepers(holders: Mapping[str, Sequence[Holder]], number: int) -> Keepers:
    """`holders`: by parameter. `number`: f + 1; where there are fewer pipelines, all of them."""
    load: dict[int, float] = defaultdict(float)
    chosen: dict[str, list[Holder]] = {}
    for name in sorted(holders, key=lambda name: (-max(h.num_bytes for h in holders[name]), name)):
        rest = list(holders[name])
        chosen[name] = []
        while rest and len(chosen[name]) < number:
            best = min(rest, key=lambda h: (h.lacking_bytes, _fullest(load, h) + h.num_bytes, h.ranks))
            _add(load, best, +1)
            chosen[name].append(best)
            rest = [h for h in rest if h.pipeline != best.pipeline]
    _balance(chosen, holders, load)
    return chosen


def _balance(chosen: dict[str, list[Holder]], holders: Mapping[str, Sequence[Holder]], load: dict[int, float]) -> None:
    """Passes states on from those that keep most, as long as that helps."""
    kept: dict[int, set[str]] = defaultdict(set)
    for name, keepers in chosen.items():
        for keeper in keepers:
            for rank in keeper.ranks:
                kept[rank].add(name)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank in sorted(load, key=lambda rank: (-load[rank], rank)):
            while (move := _best_move(rank, kept[rank], chosen, holders, load)) is not None:
                name, old, new = move
                chosen[name][chosen[name].index(old)] = new
                for holder, sign in ((old, -1), (new, +1)):
                    _add(load, holder, sign)
                    for member in holder.ranks:
                        (kept[member].add if sign > 0 else kept[member].remove)(name)
                has_moved = True


def _best_move(
    rank: int,
    kept: set[str],
    chosen: Mapping[str, Sequence[Holder]],
    holders: Mapping[str, Sequence[Holder]],
    load: Mapping[int, float],
) -> tuple[str, Holder, Holder] | None:
    """A parameter that the rank keeps, with the keeper that it is, and the one that is to be it."""
    best = None
    for name in kept:
        old = next(keeper for keeper in chosen[name] if rank in keeper.ranks)
        taken = {keeper.pipeline for keeper in chosen[name] if keeper is not old}
        for new in holders[name]:
            after = _fullest(load, new) + new.num_bytes
            if new.pipeline in taken or rank in new.ranks or after * SLACK > load[rank]:
                continue
            # Nothing to move comes first; then few large ones.
            order = (new.lacking_bytes > 0, -new.num_bytes, after, name, new.ranks)
            if best is None or order < best[0]:
                best = order, (name, old, new)
    return None if best is None else best[1]


def _fullest(load: Mapping[int, float], holder: Holder) -> float:
    return max(load.get(rank, 0.0) for rank in holder.ranks)


def _add(load: dict[int, float], holder: Holder, sign: int) -> None:
    for rank in holder.ranks:
        load[rank] += sign * holder.num_bytes


KeptStates = Mapping[State, Sequence[tuple[int, ...]]]
"""The groups of ranks that keep each state, in the order of their shares of it."""


@dataclass(frozen=True)
class _Group:
    """Ranks that hold a layer together, and which units of it each holds."""

    pipeline: int
    ranks: tuple[int, ...]
    units: tuple[range, ...]


def first_keepers(plan: Plan, templates: Templates) -> KeptStates | None:
    """Where everybody has what it needs; None without ZeRO-1."""
    return None if templates.state_bytes is None else next_keepers(plan, Holdings([plan]), templates, held=None)


def next_keepers(plan: Plan, holdings: Holdings, templates: Templates, *, held: HeldStates | None) -> KeptStates:
    """`held`: by ranks of this plan; None: nothing has to be copied."""
    assert templates.state_bytes is not None
    groups, states = _groups(plan, holdings), list(_states(templates.state_bytes))
    holders: dict[str, list[Holder]] = {}
    for state, num_bytes in states:
        unit = num_bytes / holdings.units_per_layer
        holders[_name(state)] = [
            Holder(
                ranks=group.ranks,
                pipeline=group.pipeline,
                num_bytes=unit * len(group.units[0]),
                lacking_bytes=0.0 if held is None else unit * _num_lacking(state, group, held),
            )
            for group in groups[state.module, state.layer]
        ]
    chosen = choose_keepers(holders, templates.state_copies)
    return {state: [keeper.ranks for keeper in chosen[_name(state)]] for state, _ in states}


def _name(state: State) -> str:
    return f"{state.module}.{state.layer}.{state.number}"


def _states(state_bytes: StateBytes) -> Iterator[tuple[State, float]]:
    for module, layers in state_bytes.items():
        for layer, parameters in enumerate(layers):
            for number, num_bytes in enumerate(parameters):
                yield State(module, layer, number), num_bytes


def states_to_copy(
    plan: Plan, holdings: Holdings, state_bytes: StateBytes, kept: KeptStates, held: HeldStates
) -> StatesToCopy:
    """For those that keep them under this plan. `held`: by its ranks, and those beyond that only send."""
    unit_bytes = {state: num_bytes / holdings.units_per_layer for state, num_bytes in _states(state_bytes)}
    return StatesToCopy(held, held_states(plan, holdings, kept), unit_bytes)


def without_states(weights: Mapping[Unit, float], holdings: Holdings, state_bytes: StateBytes) -> dict[Unit, float]:
    """Of bytes of parameters and states those of the parameters."""
    return {
        unit: max(0.0, num_bytes - sum(state_bytes[unit.module][unit.layer]) / holdings.units_per_layer)
        for unit, num_bytes in weights.items()
    }


def _num_lacking(state: State, group: _Group, held: HeldStates) -> int:
    lacking = 0
    for rank, units in zip(group.ranks, group.units, strict=True):
        _, parts = take(wanted_parts(((units.start, units.stop),)), held.get(rank, {}).get(state, ()))
        lacking += sum(b - a for a, b, _ in parts)
    return lacking


def held_states(plan: Plan, holdings: Holdings, kept: KeptStates) -> dict[int, dict[State, Ranges]]:
    """What each rank keeps under the plan that `kept` is of."""
    groups = {(*layer, group.ranks): group for layer, of_layer in _groups(plan, holdings).items() for group in of_layer}
    result: dict[int, dict[State, Ranges]] = defaultdict(dict)
    for state, keepers in kept.items():
        for ranks in keepers:
            group = groups[state.module, state.layer, ranks]
            for rank, units in zip(ranks, group.units, strict=True):
                result[rank][state] = ((units.start, units.stop),)
    return result


def lost_states(kept: KeptStates, held: HeldStates, holdings: Holdings) -> list[State]:
    """Those of which these ranks lack some unit, all together."""
    there: dict[State, set[int]] = defaultdict(set)
    for of_rank in held.values():
        for state, ranges in of_rank.items():
            there[state].update(unit for a, b in ranges for unit in range(a, b))
    return [state for state in kept if len(there[state]) < holdings.units_per_layer]


def _groups(plan: Plan, holdings: Holdings) -> dict[tuple[str, int], list[_Group]]:
    """By layer. A rank that has some of a layer in two ways (words that are tied to the head) is in two groups."""
    result: dict[tuple[str, int], list[_Group]] = defaultdict(list)
    for name, r, _, stage in plan.stages():
        module = plan.modules[name]
        # Members of a context-parallel group hold the same, unless they share the parameters.
        size = len(stage.ranks) if module.fully_sharded else stage.tp_size
        for first in range(0, len(stage.ranks), size):
            ranks = stage.ranks[first : first + size]
            units = tuple(holdings.units_of(module, stage, first + i) for i in range(size))
            for layer in holdings.layers_of(module, stage):
                group = _Group(r, ranks, units)
                if group not in result[module.data_module(name), layer]:
                    result[module.data_module(name), layer].append(group)
    return result
