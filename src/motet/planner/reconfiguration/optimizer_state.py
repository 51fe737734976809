"""Which optimizer states ranks keep under ZeRO-1, and what must be copied of them
(`motet.planner.reconfiguration.state_keepers`).

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
from motet.planner.reconfiguration.state_keepers import Holder, choose_keepers
from motet.planner.templates.pipelines import Templates

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
