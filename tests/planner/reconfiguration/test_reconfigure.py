"""Losses and joins in any order: the guarantee holds, every node is used, nothing moves that is already in place."""

from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from random import Random

import pytest
from drawn_templates import draw_templates, plan_of
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.cluster.pipelines_on_nodes import nodes_of_pipelines
from motet.errors import UserError
from motet.plan import Plan
from motet.planner.reconfiguration.reconfigure import Reconfiguration, reconfigure
from motet.planner.templates.pipelines import Templates

SPACE = 8
"""Shares of a layer that every tensor-parallel size here divides."""

State = dict[tuple[str, int], set[Fraction]]
"""Which eighths of which layers a rank holds."""


def state_of(plan: Plan, rank: int) -> State:
    state: State = defaultdict(set)
    for name, _, _, stage in plan.stages_of_rank(rank):
        place, size = stage.ranks.index(rank), SPACE // stage.tp_size
        for layer in range(*stage.layers):
            state[name, layer] |= {Fraction(u, SPACE) for u in range(place * size, (place + 1) * size)}
    return state


def states_after(before: Plan, result: Reconfiguration) -> list[State]:
    """What every rank holds once the copies are made; fails for a copy of what the source lacks or the target has."""
    assert result.plan is not None
    states: list[State] = [defaultdict(set) if rank is None else state_of(before, rank) for rank in result.old_ranks]
    given = [{key: set(shares) for key, shares in state.items()} for state in states]
    for copy in result.copies:
        shares = {
            Fraction(u, SPACE)
            for u in range(SPACE)
            if Fraction(copy.part.first, copy.part.of) <= Fraction(u, SPACE) < Fraction(copy.part.last, copy.part.of)
        }
        for layer in range(*copy.layers):
            assert shares <= given[copy.source][copy.module, layer], "the source does not hold it"
            assert not shares & states[copy.target][copy.module, layer], "it is already in place"
            states[copy.target][copy.module, layer] |= shares
    return states


def check_next(before: Plan, templates: Templates, result: Reconfiguration, num_nodes: int) -> Plan:
    plan = result.plan
    assert plan is not None
    pipelines = nodes_of_pipelines(plan, templates.devices_per_node)
    assert len(pipelines) >= templates.failures + 1
    assert sorted(node for nodes in pipelines for node in nodes) == list(range(num_nodes))
    assert sum(plan.replica_microbatches) == sum(before.replica_microbatches)
    states = states_after(before, result)
    for rank in range(plan.num_ranks):
        for key, shares in state_of(plan, rank).items():
            assert shares <= states[rank][key], "the rank lacks what its stage needs"
    return plan


def play(seed: int, num_events: int = 5) -> Counter[str]:
    """A random job that loses and gains nodes while the guarantee can be kept; the steps that were taken."""
    random = Random(seed)
    failures, fewest = random.randint(0, 3), random.randint(1, 4)
    most_total = random.randint((failures + 1) * fewest, (failures + 1) * fewest + 6)
    templates = draw_templates(
        random,
        failures=failures,
        min_nodes=fewest,
        max_nodes=most_total - failures * fewest,
        devices_per_node=random.choice([1, 2, 4]),
    )
    sizes = [fewest] * random.randint(failures + 1, most_total // fewest)
    for _ in range(most_total - sum(sizes)):
        sizes[random.choice([r for r, size in enumerate(sizes) if size < templates.max_nodes])] += 1
    plan = plan_of(templates, sizes, len(sizes) + random.choice([0, 1, 2, 50]))
    num_nodes, steps = most_total, Counter[str]()
    for _ in range(num_events):
        can_lose = min(failures, num_nodes - templates.min_total_nodes)
        out = random.sample(range(num_nodes), random.randint(0, can_lose)) if can_lose > 0 else []
        warned = random.randint(0, len(out))
        lost, leaving = out[warned:], out[:warned]
        joined = random.choice([0, random.randint(0, most_total - num_nodes + len(out))])
        result = reconfigure(plan, templates, lost=lost, leaving=leaving, num_joined=joined)
        num_nodes += joined - len(out)
        assert result.outcome == "continue", result.message
        plan = check_next(plan, templates, result, num_nodes - result.num_spares)
        # Below what a combination of templates can cover nobody waits.
        assert result.num_spares == 0 or num_nodes > most_total
        steps.update(step.kind for step in result.steps)
    return steps


@examples(40)
@given(st.integers(0, 2**32))
def test_any_sequence_within_the_guarantee(seed: int) -> None:
    play(seed)


def test_borrow_and_merge_are_both_reached() -> None:
    steps = sum((play(seed) for seed in range(80)), Counter[str]())
    assert min(steps[kind] for kind in ("simple", "borrow", "merge", "grow", "new", "fill", "give_up")) >= 3, steps


def fewest_bytes(
    before: Plan,
    after: Plan,
    old_ranks: tuple[int | None, ...],
    devices_per_node: int,
    layer_bytes: dict[str, list[float]],
) -> float:
    """By trying every way to put nodes on places and devices of a node on those of a place."""
    held = [defaultdict(set) if rank is None else state_of(before, rank) for rank in old_ranks]
    needed = [state_of(after, rank) for rank in range(after.num_ranks)]

    num_nodes = after.num_ranks // devices_per_node
    inside = list(permutations(range(devices_per_node)))
    return min(
        sum(
            min(
                sum(
                    len(shares - held[node * devices_per_node + device][key]) / SPACE * layer_bytes[key[0]][key[1]]
                    for place_device, device in enumerate(devices)
                    for key, shares in needed[place * devices_per_node + place_device].items()
                )
                for devices in inside
            )
            for place, node in enumerate(nodes)
        )
        for nodes in permutations(range(num_nodes))
    )


@examples(25)
@given(st.integers(0, 2**32))
def test_no_other_places_move_fewer_bytes(seed: int) -> None:
    random = Random(seed)
    size = random.choice([1, 2])
    templates = draw_templates(random, failures=1, min_nodes=1, max_nodes=4, devices_per_node=size)
    layer_bytes = {  # Embeddings may be a hundred times a layer, and frozen layers are not moved.
        name: [random.choice([0.0, 1.0, 1.5, 100.0]) for _ in range(replica.stages[-1].layers[1])]
        for name, replica in templates.by_nodes[1].replicas.items()
    }
    templates = replace(templates, layer_bytes=layer_bytes)
    before = plan_of(templates, [random.randint(1, 2), random.randint(1, 3)])
    num_nodes = before.num_ranks // size
    result = reconfigure(
        before, templates, lost=[random.randrange(num_nodes)] if num_nodes > 2 else [], num_joined=random.randint(0, 1)
    )
    assert result.plan is not None
    expected = fewest_bytes(before, result.plan, result.old_ranks, size, layer_bytes)
    assert sum(copy.num_bytes for copy in result.copies) == pytest.approx(expected)


def three_pipelines(failures: int) -> tuple[Templates, Plan]:
    templates = draw_templates(Random(0), failures=failures, min_nodes=2, max_nodes=4, devices_per_node=1)
    return templates, plan_of(templates, [2, 2, 2])


def test_too_few_nodes_save_and_stop() -> None:
    templates, plan = three_pipelines(failures=2)
    result = reconfigure(plan, templates, lost=[3])
    assert result.outcome == "save_and_stop"
    assert result.plan is None
    assert "5 nodes are left, but 3 pipelines of at least 2" in result.message
    assert "need 6" in result.message


def test_too_few_nodes_and_a_layer_that_nobody_holds() -> None:
    templates, plan = three_pipelines(failures=2)
    result = reconfigure(plan, templates, lost=[0, 2, 4])
    assert result.outcome == "stop"
    assert "resume from the last checkpoint" in result.message
    assert reconfigure(plan, templates, lost=range(6)).outcome == "stop"


def test_a_layer_that_nobody_holds_comes_from_the_checkpoint() -> None:
    templates, plan = three_pipelines(failures=0)
    result = reconfigure(plan, templates, lost=[0, 2, 4])
    assert result.outcome == "restore"
    assert result.plan is not None
    assert result.copies == ()
    assert "layer 0 of llm" in result.message or "layer 0 of vision" in result.message
    # One node of the three in each place is enough.
    assert reconfigure(plan, templates, lost=[0, 2, 5]).outcome == "continue"


def test_a_node_that_no_template_takes_waits() -> None:
    templates = draw_templates(Random(0), failures=1, min_nodes=2, max_nodes=2, devices_per_node=1)
    result = reconfigure(plan_of(templates, [2, 2]), templates, num_joined=1)
    assert result.num_spares == 1
    assert sum(copy.num_bytes for copy in result.copies) == 0
    assert str(result.steps[-1]) == "1 nodes wait"


def test_survivors_that_no_template_takes_are_left_out() -> None:
    """And give what they hold to the others. Templates of n0 nodes alone are all that 2 n0 nodes need for f = 1."""
    templates = draw_templates(Random(0), failures=1, min_nodes=2, max_nodes=2, devices_per_node=1)
    plan = plan_of(templates, [2, 2])
    for lost in range(4):
        result = reconfigure(plan, replace(templates, failures=0), lost=[lost])
        assert result.plan is not None
        assert result.plan.num_ranks == 2
        assert sorted(rank for rank in result.old_ranks if rank is not None) == [i for i in range(4) if i != lost]
        check_next(plan, replace(templates, failures=0), result, 2)


def test_nodes_that_leave_hand_over_what_nobody_else_holds() -> None:
    templates, plan = three_pipelines(failures=0)
    result = reconfigure(plan, templates, leaving=[0, 2, 4])
    assert result.outcome == "continue"
    assert result.old_ranks == (1, 3, 5, 0, 2, 4)
    assert {copy.source for copy in result.copies} & {3, 4, 5}
    check_next(plan, templates, result, 3)


def test_nothing_happened() -> None:
    templates, plan = three_pipelines(failures=1)
    result = reconfigure(plan, templates)
    assert result.plan == plan
    assert result.old_ranks == tuple(range(6))
    assert result.copies == ()


def test_pipelines_that_share_a_node() -> None:
    templates, plan = three_pipelines(failures=1)
    with pytest.raises(UserError, match="node 0 belongs to replicas 0 and 1"):
        reconfigure(plan, replace(templates, devices_per_node=4), lost=[0])


@pytest.mark.parametrize("seed", range(24))
def test_more_nodes_than_the_templates_are_made_for(seed: int) -> None:
    """And any losses: nothing breaks, and what cannot go on says so."""
    random = Random(seed)
    failures, fewest = random.randint(0, 2), random.randint(1, 4)
    most = random.randint(0, 3) + fewest
    templates = draw_templates(
        random,
        failures=failures,
        min_nodes=fewest,
        max_nodes=most,
        devices_per_node=random.choice([1, 3]),
    )
    num_microbatches = failures + 1 + random.choice([0, 1, 2, 50])
    plan = plan_of(templates, [fewest] * failures + [most], num_microbatches)
    num_nodes = failures * fewest + most
    for _ in range(6):
        lost = random.sample(range(num_nodes), random.randint(0, min(num_nodes, random.choice([1, 2, num_nodes]))))
        result = reconfigure(plan, templates, lost=lost, num_joined=random.randint(0, 6))
        if result.plan is None:
            assert result.outcome in ("save_and_stop", "stop")
            return
        num_nodes = result.plan.num_ranks // templates.devices_per_node
        if result.outcome == "continue":
            check_next(plan, templates, result, num_nodes)
        plan = result.plan
