"""Under ZeRO-1: after every loss f + 1 pipelines keep each state again, and copies have the bytes that they lack."""

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
from drawn_templates import draw_templates, plan_of
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.cluster.pipelines_on_nodes import nodes_of_pipelines
from motet.plan import Plan
from motet.planner.reconfiguration.reconfigure import Reconfiguration, reconfigure
from motet.planner.reconfiguration.shard_map import State
from motet.planner.reconfiguration.state_owners import OwnedStates, initial_owners
from motet.planner.templates.pipelines import Templates

SPACE = 8
"""Shares of a layer that every tensor-parallel size here divides."""

Kept = dict[State, set[int]]
"""Which eighths of which states a rank keeps."""


def with_states(random: Random, templates: Templates) -> Templates:
    """Layers of one to three parameters, or frozen; a third of what is copied is the parameters themselves."""
    replicas = next(iter(templates.by_nodes.values())).replicas
    states = {
        name: [
            [random.choice([1.0, 2.0, random.uniform(1, 9)]) for _ in range(random.choice([0, 1, 3]))]
            for _ in range(replica.stages[-1].layers[1])
        ]
        for name, replica in replicas.items()
    }
    layers = {name: [1.5 * sum(of_layer) for of_layer in of_layers] for name, of_layers in states.items()}
    return replace(templates, layer_bytes=layers, state_bytes=states, state_copies=templates.failures + 1)


def kept_by(plan: Plan, kept: OwnedStates) -> list[Kept]:
    """By rank; every keeper is a tensor-parallel group."""
    result: list[Kept] = [defaultdict(set) for _ in range(plan.num_ranks)]
    for state, groups in kept.items():
        for ranks in groups:
            size = SPACE // len(ranks)
            for place, rank in enumerate(ranks):
                result[rank][state] |= set(range(place * size, (place + 1) * size))
    return result


def moved(result: Reconfiguration, what: str) -> float:
    return sum(copy.num_bytes for copy in result.copies if copy.what == what)


def check(before: Plan, kept: OwnedStates, templates: Templates, result: Reconfiguration) -> None:
    assert result.plan is not None
    assert result.owned is not None
    assert templates.state_bytes is not None
    pipelines = nodes_of_pipelines(result.plan, templates.devices_per_node)
    pipeline_of = {node: r for r, nodes in enumerate(pipelines) for node in nodes}
    for groups in result.owned.values():
        keeping = [{pipeline_of[rank // templates.devices_per_node] for rank in ranks} for ranks in groups]
        assert all(len(each) == 1 for each in keeping)
        assert len(set.union(*keeping)) == len(groups) == min(templates.failures + 1, len(pipelines))
    old = kept_by(before, kept)
    held: list[Kept] = [old[rank] if rank is not None else defaultdict(set) for rank in result.old_ranks]
    lacking = 0.0
    for rank, needed in enumerate(kept_by(result.plan, result.owned)):
        for state, units in needed.items():
            num_bytes = templates.state_bytes[state.module][state.layer][state.number]
            lacking += len(units - held[rank][state]) / SPACE * num_bytes
    assert moved(result, "states") == pytest.approx(lacking)
    assert moved(result, "all") == 0


def play(seed: int) -> tuple[float, float]:
    """A job that loses and gains nodes, never more than f at once; bytes that moved, and those without ZeRO-1."""
    random = Random(seed)
    failures, fewest = random.randint(1, 3), random.randint(1, 3)
    most_total = random.randint((failures + 1) * fewest, (failures + 1) * fewest + 6)
    drawn = draw_templates(
        random,
        failures=failures,
        min_nodes=fewest,
        max_nodes=most_total - failures * fewest,
        devices_per_node=random.choice([1, 2, 4]),
    )
    templates = with_states(random, drawn)
    sizes = [fewest] * random.randint(failures + 1, most_total // fewest)
    plan, num_nodes = plan_of(templates, sizes), sum(sizes)
    kept = initial_owners(plan, templates)
    shared_bytes = whole_bytes = 0.0
    for _ in range(4):
        can_lose = min(failures, num_nodes - templates.min_total_nodes)
        lost = random.sample(range(num_nodes), random.randint(0, can_lose)) if can_lose > 0 else []
        joined = random.randint(0, most_total - num_nodes + len(lost))
        result = reconfigure(plan, templates, lost=lost, num_joined=joined, owned=kept)
        whole = reconfigure(plan, templates, lost=lost, num_joined=joined)
        assert result.outcome == "continue", result.message
        assert kept is not None
        assert result.plan == whole.plan
        check(plan, kept, templates, result)
        # A third of what moves where all keep all is parameters.
        assert moved(result, "values") == pytest.approx(moved(whole, "all") / 3)
        shared_bytes += moved(result, "states") + moved(result, "values")
        whole_bytes += moved(whole, "all")
        if not lost and not joined:
            assert not result.copies
        assert result.plan is not None
        plan, kept = result.plan, result.owned
        num_nodes = plan.num_ranks // templates.devices_per_node
    return shared_bytes, whole_bytes


@examples(25)
@given(st.integers(0, 2**32))
def test_any_sequence_of_losses(seed: int) -> None:
    play(seed)


def test_all_keepers_of_a_state_are_lost() -> None:
    """More than f nodes at once: others hold the layer, but the last checkpoint has to be loaded."""
    drawn = draw_templates(Random(1), failures=1, min_nodes=1, max_nodes=2, devices_per_node=1)
    lengths = {"vision": 2, "llm": 3}
    templates = replace(
        drawn,
        layer_bytes={name: [3.0] * length for name, length in lengths.items()},
        state_bytes={name: [[2.0]] * length for name, length in lengths.items()},
        state_copies=2,
    )
    plan = plan_of(templates, [1, 1, 1, 1])
    kept = initial_owners(plan, templates)
    assert kept is not None
    lost = {ranks[0] for ranks in kept[State("llm", 0, 0)]}
    assert len(lost) == 2
    result = reconfigure(plan, templates, lost=lost, owned=kept)
    assert result.outcome == "restore"
    assert "the optimizer's state of layer 0 of llm" in result.message
    assert result.owned is not None
    assert reconfigure(plan, templates, lost=lost).outcome == "continue"
