"""Who has a part in the next membership, and under which plan."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from drawn_templates import draw_templates
from drawn_templates import plan_of as plan_with_sizes
from hypothesis import given
from hypothesis import strategies as st
from interrupted_training import config_of
from sampling import examples
from training import plan_of

from motet.plan import Plan
from motet.resilience.membership import Change, Membership, check_record, key
from motet.resilience.succession import Succession


def after(*changes: Change) -> Membership:
    """Two pipelines of two nodes of one process each."""
    plan = plan_of(config_of(Path())).to_json()
    first = Membership(generation=1, nodes=(0, 1, 2, 3), num_admitted=4, plan=plan)
    return SUCCESSION(first, changes)


SUCCESSION = Succession(1, None, first_plan=plan_of(config_of(Path())).to_json())


@pytest.mark.parametrize("node", range(4))
def test_whoever_is_left_out_stays_until_all_leave(node: int) -> None:
    """Others may be waiting for it, and are not told to stop."""
    told = after(Change("leaving", node, "", 0.0))
    assert not told.is_urgent
    assert set(told.leaving) == {node, node ^ 1}
    assert set(told.all_nodes) == {0, 1, 2, 3}


@pytest.mark.parametrize("node", range(4))
def test_whoever_is_left_out_by_a_loss_waits_as_a_spare(node: int) -> None:
    """All are told to stop waiting for it."""
    told = after(Change("lost", node, "", 0.0))
    assert told.is_urgent
    assert set(told.all_nodes) == {0, 1, 2, 3} - {node, node ^ 1}
    assert told.waiting == (node ^ 1,)
    assert told.note == f"1 whole pipeline; the plan has no use for node {node ^ 1}, waiting"


@pytest.mark.parametrize("at_once", [False, True])
def test_two_losses_that_leave_a_holder_of_each_layer_are_survived(at_once: bool) -> None:
    """The spare of the first loss takes the place of the second node."""
    first, second = Change("lost", 0, "", 0.0), Change("lost", 3, "", 0.0)
    told = after(first, second) if at_once else SUCCESSION(after(first), [second])
    assert told.stop is None
    assert set(told.nodes) == {1, 2}


def test_a_second_loss_before_the_first_is_recovered_from() -> None:
    """The spare that takes the first place has nothing yet: node 2 alone holds the first stage."""
    first = SUCCESSION(after(), [Change("joined", 4, "", 0.0)])
    told = SUCCESSION(first, [Change("lost", 0, "", 0.0)])
    assert set(told.nodes) == {1, 2, 3, 4}
    settled = SUCCESSION(told, [Change("lost", 3, "", 0.0)])
    assert set(settled.all_nodes) == {4, 1}
    unsettled = SUCCESSION(told, [Change("lost", 3, "", 0.0)], is_settled=False)
    assert (set(unsettled.nodes), unsettled.leaving, unsettled.staying) == ({4, 1}, (2,), (2,))


def test_a_spare_that_held_something_comes_again_if_what_it_waited_for_is_not_done() -> None:
    told = after(Change("lost", 0, "", 0.0))
    assert (told.nodes, told.waiting) == ((2, 3), (1,))
    told = SUCCESSION(told, [Change("joined", 4, "", 0.0), Change("joined", 5, "", 0.0)], is_settled=False)
    assert {1, 2, 3} <= set(told.all_nodes)


def test_after_a_loss_and_a_join_the_redundancy_is_that_of_the_beginning() -> None:
    told = SUCCESSION(after(Change("lost", 0, "", 0.0)), [Change("joined", 4, "", 0.0)])
    assert told.plan == plan_of(config_of(Path())).to_json()
    assert sorted(told.nodes) == [1, 2, 3, 4]
    assert told.waiting == ()


def test_spares_that_leave_with_others_that_were_warned_stay() -> None:
    told = after(Change("leaving", 0, "", 0.0))
    assert (told.leaving, told.staying) == ((0, 1), (1,))
    told = SUCCESSION(told, [Change("left", node, "", 0.0) for node in told.leaving])
    assert (told.nodes, told.leaving, told.waiting) == ((2, 3), (), (1,))
    told = SUCCESSION(told, [Change("joined", 4, "", 0.0)])
    assert sorted(told.nodes) == [1, 2, 3, 4]


def test_who_joins_takes_the_place_of_a_lost_node() -> None:
    told = after(Change("lost", 0, "", 0.0), Change("joined", 4, "", 0.0))
    assert told.nodes == (4, 1, 2, 3)
    assert told.plan == plan_of(config_of(Path())).to_json()


def test_unequal_pipelines_that_lose_one_keep_their_microbatches() -> None:
    """Of a plan for which there are no templates."""
    plan = plan_with_sizes(TEMPLATES, [1, 2, 1], 9)
    plan = replace(plan, replica_microbatches=(2, 3, 4), num_microbatches=4)
    first = Membership(generation=1, nodes=(0, 1, 2, 3), num_admitted=4, plan=plan.to_json())
    told = Plan.from_json(Succession(1, None)(first, [Change("lost", 3, "", 0.0)]).plan)
    assert (told.replica_microbatches, told.num_microbatches) == ((2, 3), 3)


TEMPLATES = draw_templates(Random(0), failures=1, min_nodes=1, max_nodes=3, devices_per_node=1)


def test_nodes_that_join_wait_where_there_are_no_microbatches_for_them() -> None:
    templates = draw_templates(Random(0), failures=1, min_nodes=1, max_nodes=1, devices_per_node=1)
    first = Membership(generation=1, nodes=(0, 1), num_admitted=2, plan=plan_with_sizes(templates, [1, 1], 3).to_json())
    joined = [Change("joined", node, "", 0.0) for node in (2, 3)]
    told = Succession(1, templates)(first, joined)
    assert (told.nodes, told.waiting) == ((0, 1, 2), (3,))


def test_survivors_that_no_template_takes_hand_over_and_wait() -> None:
    templates = draw_templates(Random(0), failures=1, min_nodes=2, max_nodes=2, devices_per_node=1)
    plan = plan_with_sizes(templates, [2, 2], 4)
    first = Membership(generation=1, nodes=(0, 1, 2, 3), num_admitted=4, plan=plan.to_json())
    told = Succession(1, templates)(first, [Change("lost", 0, "", 0.0)])
    assert (len(told.nodes), len(told.leaving), sorted(told.all_nodes)) == (2, 1, [1, 2, 3])
    assert told.staying == told.leaving
    [spare] = told.leaving
    lost = Change("lost", told.nodes[0], "", 0.0)
    assert spare in Succession(1, templates)(told, [lost]).nodes, "it has not left yet, and takes the place"
    told = Succession(1, templates)(told, [Change("left", spare, "", 0.0)])
    assert (told.leaving, told.staying, told.waiting) == ((), (), (spare,))
    assert spare in Succession(1, templates)(told, [lost]).nodes


@pytest.mark.parametrize("at_once", [True, False])
def test_nodes_that_are_all_warned_save_and_stop(at_once: bool) -> None:
    """The one that is told second hears that the first is leaving when it tells of itself."""
    first = Membership(generation=1, nodes=(0, 1), num_admitted=2, plan=plan_with_sizes(TEMPLATES, [1, 1], 4).to_json())
    successor = Succession(1, TEMPLATES)
    warnings = [Change("leaving", node, "", 0.0) for node in (0, 1)]
    told = successor(first, warnings) if at_once else successor(successor(first, warnings[:1]), warnings[1:])
    assert told.stop == "without the nodes that leave (0, 1) no pipeline is whole"
    assert told.saves_checkpoint
    assert not told.is_urgent
    assert sorted(told.all_nodes) == [0, 1]


def test_a_training_that_is_to_stop_stops_when_who_leaves_has_left() -> None:
    first = Membership(generation=1, nodes=(0, 1), num_admitted=2, plan=plan_with_sizes(TEMPLATES, [1, 1], 4).to_json())
    successor = Succession(1, TEMPLATES, stops_below_guarantee=True)
    told = successor(first, [Change("leaving", 1, "", 0.0)])
    assert (told.nodes, told.leaving, told.saves_checkpoint) == ((0,), (1,), True)
    assert "1 nodes are left" in (told.stop or "")
    last = successor(told, [Change("left", 1, "", 0.0)])
    assert (last.nodes, last.leaving, last.saves_checkpoint, last.stop) == ((0,), (), True, told.stop)


def play(seed: int) -> None:
    """Nodes come, are warned, leave and die in any order, as agents tell of it."""
    random = Random(seed)
    failures, size = random.randint(0, 2), random.choice([1, 2])
    fewest = random.randint(1, 3)
    templates = draw_templates(
        random, failures=failures, min_nodes=fewest, max_nodes=fewest + random.randint(0, 3), devices_per_node=size
    )
    sizes = [random.randint(fewest, templates.max_nodes) for _ in range(failures + 1 + random.randint(0, 1))]
    plan = plan_with_sizes(templates, sizes, len(sizes) + random.choice([0, 1, 50]))
    successor = Succession(size, random.choice([templates, None]), stops_below_guarantee=random.choice([True, False]))
    now = Membership(generation=1, nodes=tuple(range(sum(sizes))), num_admitted=sum(sizes), plan=plan.to_json())
    may_die = random.choice([True, False])
    for _ in range(8):
        changes = [Change("joined", now.num_admitted + i, "", 0.0) for i in range(random.choice([0, 0, 1, 2]))]
        if now.leaving and random.choice([True, False]):
            changes += [Change("left", node, "", 0.0) for node in now.leaving]
        kinds = ["leaving", "lost"] if may_die else ["leaving"]
        touched = random.sample(now.nodes, random.randint(0, min(len(now.nodes), random.choice([1, len(now.nodes)]))))
        if now.stop is None or may_die:
            told = [Change(random.choice(kinds), node, "", 0.0) for node in touched]  # type: ignore[arg-type]
            changes += [change for change in told if change.kind == "lost" or now.stop is None]
        before, now = now, successor(now, changes)
        check(before, changes, now, size, has_templates=successor.templates is not None)
        if not now.saves_checkpoint:
            assert may_die, "nobody has died, and work is lost"
            return


def check(before: Membership, changes: list[Change], now: Membership, size: int, *, has_templates: bool) -> None:
    plan = Plan.from_json(now.plan)
    gone = {c.node for c in changes if c.kind == "lost" or (c.kind == "left" and c.node not in before.staying)}
    come = {change.node for change in changes if change.kind == "joined"}
    check_record(key("membership", now.generation), now.to_json())
    everyone = [*now.nodes, *now.leaving, *now.waiting]
    assert len(set(everyone)) == len(everyone)
    assert set(everyone) <= {*before.nodes, *before.leaving, *before.waiting, *come} - gone
    assert {*before.waiting, *come} <= {*now.nodes, *now.waiting} | gone
    if now.saves_checkpoint:
        assert set(before.nodes) - gone <= set(everyone), "who is healthy is kept"
    assert now.num_admitted == before.num_admitted + len(come)
    if now.saves_checkpoint:
        assert plan.num_ranks == len(now.nodes) * size
        assert sum(plan.replica_microbatches) >= len(plan.replica_microbatches)
    if not now.is_urgent or (has_templates and now.saves_checkpoint):
        # Nobody is out who has not left: whoever is of no use hands over first.
        handed_over = {change.node for change in changes if change.kind == "left"}
        assert set(before.all_nodes) - gone - handed_over <= set(now.all_nodes)
    if now.stop is None:
        warned = {change.node for change in changes if change.kind == "leaving"}
        assert not warned & set(now.nodes)
    if before.stop is not None:
        assert now.stop is not None


def held_under(plan: Plan, nodes: Sequence[int], size: int) -> dict[int, set[tuple[str, int]]]:
    """The layers of each node of a plan that has been recovered to."""
    held: dict[int, set[tuple[str, int]]] = {node: set() for node in nodes}
    for name, module in plan.modules.items():
        for stage in (stage for replica in module.replicas for stage in replica.stages):
            for rank in stage.ranks:
                held[nodes[rank // size]] |= {(name, layer) for layer in range(*stage.layers)}
    return held


@pytest.mark.campaign
@examples(300)
@given(st.integers(0, 2**32))
def test_while_some_living_node_holds_each_layer_training_goes_on(seed: int) -> None:
    """Losses come one after the other or together, before or after the recovery from those before them."""
    random = Random(seed)
    failures, size = random.randint(0, 2), random.choice([1, 2])
    fewest = random.randint(1, 3)
    templates = draw_templates(
        random, failures=failures, min_nodes=fewest, max_nodes=fewest + random.randint(0, 3), devices_per_node=size
    )
    sizes = [random.randint(fewest, templates.max_nodes) for _ in range(failures + 1 + random.randint(0, 1))]
    plan = plan_with_sizes(templates, sizes, len(sizes) + random.choice([0, 1, 50]))
    successor = Succession(size, random.choice([templates, None]), first_plan=plan.to_json())
    now = Membership(generation=1, nodes=tuple(range(sum(sizes))), num_admitted=sum(sizes), plan=plan.to_json())
    held = held_under(plan, now.nodes, size)
    everything = set().union(*held.values())
    for _ in range(6):
        is_settled = random.choice([True, False])
        if is_settled:
            held |= {node: set() for node in now.all_nodes} | held_under(Plan.from_json(now.plan), now.nodes, size)
            # Others have gone on without whoever had no part.
            held = {node: held[node] if node in now.all_nodes else set() for node in held}
        changes = [Change("joined", now.num_admitted + i, "", 0.0) for i in range(random.choice([0, 0, 1]))]
        alive = [*now.all_nodes, *now.waiting]
        lost = random.sample(alive, random.randint(0, min(2, len(alive))))
        changes += [Change("lost", node, "", 0.0) for node in lost]
        now = successor(now, changes, is_settled=is_settled)
        held = {node: of for node, of in held.items() if node not in lost} | {
            c.node: set() for c in changes if c.kind == "joined"
        }
        living = [node for node in held if node in {*now.all_nodes, *now.waiting}]
        is_whole = set().union(*(held[node] for node in living)) == everything
        if not now.saves_checkpoint:
            assert len(living) < max(sizes) if successor.templates is None else len(living) < fewest * (failures + 1)
            return
        assert not is_whole or set().union(*(held[node] for node in now.all_nodes)) == everything
        if not is_whole:
            return


@examples(150)
@given(st.integers(0, 2**32))
def test_any_sequence_of_changes(seed: int) -> None:
    play(seed)
