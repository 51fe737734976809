"""Groups that fit into a node lie on one, and renumbering changes nothing else."""

from dataclasses import replace
from random import Random

import pytest
from drawing import draw_problem
from small_problem import small_problem

from motet.cluster import LINKS
from motet.cluster.rank_placement import on_nodes, replicas_side_by_side
from motet.costs.communication import collective_seconds
from motet.planner.auto import _Search
from motet.planner.ending import silent
from motet.planner.evaluate import evaluate
from motet.planner.layouts.layout import build_plan
from motet.planner.problem import Degrees
from motet.planner.registry import make_plan
from motet.schedule.action import Compute, Kind
from motet.schedule.routes import Cell


def num_divided(plan, size):
    groups = {stage.ranks for _, _, _, stage in plan.stages()}
    return sum(len({rank // size for rank in ranks}) > -(-len(ranks) // size) for ranks in groups)


def on_two_nodes(num_devices=8, **options):
    """Nodes of half the devices, on a slow network."""
    problem = small_problem(num_devices=num_devices, **options)
    cluster = replace(
        problem.cluster,
        devices_per_node=num_devices // 2,
        within_node=LINKS["nvlink4"],
        between_nodes=LINKS["ethernet10"],
    )
    return replace(problem, cluster=cluster)


def test_renumbering_is_a_renumbering_on_drawn_plans():
    changed = 0
    for seed in range(300):
        plan = draw_problem(Random(seed)).plan
        for size in (1, 2, 4):
            result = on_nodes(plan, size)
            assert result.num_ranks == plan.num_ranks
            number = {}
            for (*_, ours), (*_, theirs) in zip(plan.stages(), result.stages(), strict=True):
                assert (ours.layers, ours.tp_size, ours.cp_size) == (theirs.layers, theirs.tp_size, theirs.cp_size)
                for rank, other in zip(ours.ranks, theirs.ranks, strict=True):
                    assert number.setdefault(rank, other) == other, seed
            assert len(set(number.values())) == len(number)
            assert result == plan or num_divided(result, size) < num_divided(plan, size)
            changed += result != plan
    assert changed > 50


@pytest.mark.parametrize(("tp", "dp"), [((1, 2, 2), 1), ((2, 1, 2), 2), ((1, 4, 2), 2), ((2, 4, 1), 1)])
def test_sizes_that_divide_each_other_all_lie_within_nodes(tp, dp):
    problem = on_two_nodes(32)
    degrees = {name: Degrees(tp=size, pp=2, dp=dp) for name, size in zip(problem.modules, tp, strict=True)}
    plan = build_plan(problem, degrees)
    sizes = [len(stage.ranks) for _, _, _, stage in plan.stages()]
    for node in (4, 8):
        assert num_divided(on_nodes(plan, node), node) == 0
    assert sorted(len(stage.ranks) for _, _, _, stage in plan.stages()) == sorted(sizes)


def test_larger_groups_go_first_where_they_would_be_divided():
    """One device for the encoder, then three groups of two, on nodes of four; with two groups nothing is divided."""
    problem = on_two_nodes(encoders=("vision",))
    degrees = {"vision": Degrees(), "language_model": Degrees(tp=2, pp=3)}
    stages = [stage.ranks for *_, stage in build_plan(problem, degrees).stages()]
    assert stages == [(6,), (0, 1), (2, 3), (4, 5)]
    degrees["language_model"] = Degrees(tp=2, pp=1)
    assert [stage.ranks for *_, stage in build_plan(problem, degrees).stages()] == [(0,), (1, 2)]
    wide = replace(problem, modules={n: replace(m, tp_sizes=(1, 2)) for n, m in problem.modules.items()})
    assert num_divided(make_plan(wide, "cornstarch"), 4) == 0


def test_groups_on_two_nodes_pay_for_the_network():
    """By hand: each sum over the network takes as much longer as the links say; so it does where it is measured."""
    problem = on_two_nodes()
    degrees = {"vision": Degrees(), "audio": Degrees(), "language_model": Degrees(tp=2, pp=2)}
    near = evaluate(problem, build_plan(problem, degrees))
    crossed = {2: 2, 3: 4, 4: 3, 5: 5}
    module = near.plan.modules["language_model"]
    stages = tuple(replace(s, ranks=tuple(crossed[k] for k in s.ranks)) for s in module.replicas[0].stages)
    crossing = replace(module, replicas=(replace(module.replicas[0], stages=stages),))
    far = evaluate(problem, replace(near.plan, modules={**near.plan.modules, "language_model": crossing}))
    forward = Compute(Kind.FORWARD, Cell("language_model", 0, 0, 0))
    num_blocks = stages[0].layers[1] - 1
    num_bytes = near.costs.cells.load_of(forward.cell).tokens * 128 * problem.memory.activation_bytes
    near_s, far_s = (collective_seconds(problem.cluster, "all_reduce", ranks, num_bytes) for ranks in [(2, 3), (2, 4)])
    longer_s = far.costs.compute_s(forward) - near.costs.compute_s(forward)
    # Rows of both encoders come in two shares, which the group puts together: as many of the one as of the other.
    rows = near.costs.cells.load_of(forward.cell).incoming * 128 * problem.memory.activation_bytes
    near_gather_s, far_gather_s = (
        2 * collective_seconds(problem.cluster, "all_gather", ranks, rows / 2) for ranks in [(2, 3), (2, 4)]
    )
    # The embedding is summed once, each block's attention and MLP.
    assert longer_s == pytest.approx((1 + 2 * num_blocks) * (far_s - near_s) + far_gather_s - near_gather_s)
    assert far.costs.group_communication_s(forward) - near.costs.group_communication_s(forward) == pytest.approx(
        longer_s
    )
    backward = Compute(Kind.BACKWARD, forward.cell)
    assert far.costs.compute_s(backward) > near.costs.compute_s(backward)
    assert far.iteration_time_s > near.iteration_time_s


def test_replicas_side_by_side_sum_and_gather_faster():
    problem = on_two_nodes(8, encoders=(), frozen=())
    problem = replace(problem, memory=replace(problem.memory, zero1=True))
    plan = build_plan(problem, {"language_model": Degrees(pp=4, dp=2)})
    placed = replicas_side_by_side(plan, problem.cluster.devices_per_node)
    ranks = [[stage.ranks for stage in replica.stages] for replica in placed.modules["language_model"].replicas]
    assert ranks == [[(0,), (2,), (4,), (6,)], [(1,), (3,), (5,), (7,)]]
    before, after = evaluate(problem, plan), evaluate(problem, placed)
    assert after.result.time_shares.means_s()["gather"] < before.result.time_shares.means_s()["gather"]
    assert after.iteration_time_s < before.iteration_time_s
    assert replicas_side_by_side(placed, problem.cluster.devices_per_node) == placed


@pytest.mark.parametrize("may", [True, False])
def test_auto_leaves_replicas_on_nodes_of_their_own_where_nodes_may_be_lost(may):
    problem = on_two_nodes(8, encoders=(), frozen=(), survives_losses=not may)
    plan = build_plan(problem, {"language_model": Degrees(pp=4, dp=2)})
    search = _Search(problem, {}, None, silent)
    search.add([evaluate(problem, plan)], "whole nodes")
    search._place_replicas()
    placed = [replicas_side_by_side(plan, problem.cluster.devices_per_node)] if may else []
    assert [each.plan for each in search.evaluations] == [plan, *placed]


def test_side_by_side_renumbers_drawn_plans_and_divides_no_more_groups():
    changed = 0
    for seed in range(100):
        plan = draw_problem(Random(seed)).plan
        for size in (2, 4):
            result = replicas_side_by_side(plan, size)
            assert num_divided(result, size) <= num_divided(plan, size)
            pairs = [
                pair
                for (*_, ours), (*_, theirs) in zip(plan.stages(), result.stages(), strict=True)
                for pair in zip(ours.ranks, theirs.ranks, strict=True)
            ]
            number = dict(pairs)
            assert all(number[rank] == other for rank, other in pairs), seed
            assert sorted(number.values()) == sorted(number)
            changed += result != plan
    assert changed > 10
