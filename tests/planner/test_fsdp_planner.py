"""Planner `fsdp`, and plans whose replicas share parameters."""

from dataclasses import replace

import pytest
from small_problem import small_problem, with_memory

from motet.cluster.pipelines_on_nodes import nodes_of_pipelines
from motet.costs.memory import RESERVE
from motet.planner.evaluate import evaluate
from motet.planner.layouts.layout import explicit_plan
from motet.planner.layouts.sharing import sharing_plans
from motet.planner.problem import Degrees
from motet.planner.registry import choose, make_plan
from motet.report.plan_report import report_evaluation, report_text


def test_fsdp_is_a_replica_per_device_and_needs_as_many_samples():
    plan = make_plan(small_problem(num_devices=5, dp_sizes=(1, 5)), "fsdp")
    for module in plan.modules.values():
        assert len(module.replicas) == module.sharded_replicas == 5
        assert module.fully_sharded
    with pytest.raises(ValueError, match="fsdp needs a sample for each of 17 devices"):
        make_plan(small_problem(num_devices=17, dp_sizes=(1, 17)), "fsdp")
    with pytest.raises(ValueError, match="do not allow; allow 5"):
        make_plan(small_problem(num_devices=5), "fsdp")


def test_fsdp_is_refused_where_states_are_shared():
    problem = small_problem(num_devices=4, dp_sizes=(4,), may_share_parameters=False)
    with pytest.raises(ValueError, match=r"nothing for parallel\.zero1 to shard; leave"):
        make_plan(problem, "fsdp")


def survivable(num_devices: int, devices_per_node: int, failures: int):
    problem = small_problem(
        num_devices=num_devices, frozen=(), dp_sizes=(num_devices,), survives_losses=True, failures=failures
    )
    return replace(problem, cluster=replace(problem.cluster, devices_per_node=devices_per_node))


@pytest.mark.parametrize(
    ("devices_per_node", "failures", "shares"), [(1, 1, 4), (2, 1, 4), (4, 1, 4), (2, 2, 2), (2, 3, 2)]
)
def test_where_nodes_may_fail_groups_share(devices_per_node: int, failures: int, shares: int):
    """Of eight devices: as many groups as may be lost and one more, each on nodes of its own."""
    problem = survivable(8, devices_per_node, failures)
    plan = make_plan(problem, "fsdp")
    assert {module.sharded_replicas for module in plan.modules.values()} == {shares}
    assert len(nodes_of_pipelines(plan, devices_per_node)) == 8 // shares > failures
    whole = {n: replace(m, fully_sharded=False, sharded_replicas=1) for n, m in plan.modules.items()}
    shared = list(sharing_plans(problem, replace(plan, modules=whole)))
    assert shared[0].modules == plan.modules
    assert all(len(nodes_of_pipelines(each, devices_per_node)) > failures for each in shared)


def test_more_groups_share_where_fewer_do_not_fill_nodes():
    """On nine nodes of two devices: three groups of three nodes, as two would share a node."""
    problem = survivable(18, 2, 1)
    problem = replace(problem, samples=problem.samples * 2, num_microbatches=1)
    plan = make_plan(problem, "fsdp")
    assert {module.sharded_replicas for module in plan.modules.values()} == {6}
    assert nodes_of_pipelines(plan, 2) == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]


@pytest.mark.parametrize(("num_devices", "devices_per_node", "failures"), [(8, 8, 1), (8, 1, 4), (6, 4, 1), (4, 4, 1)])
def test_fsdp_is_refused_where_no_groups_can_be_lost(num_devices: int, devices_per_node: int, failures: int):
    with pytest.raises(ValueError, match=f"cannot make {failures + 1} groups of two or more devices on nodes of"):
        make_plan(survivable(num_devices, devices_per_node, failures), "fsdp")


def test_one_device_shares_with_nobody_where_no_loss_is_tolerated():
    assert make_plan(survivable(1, 1, 0), "fsdp").num_ranks == 1


def test_sharing_saves_memory_and_costs_time():
    problem = small_problem(num_devices=4, frozen=(), dp_sizes=(4,))
    sharded = evaluate(problem, make_plan(problem, "fsdp"))
    modules = {n: replace(m, fully_sharded=False, sharded_replicas=1) for n, m in sharded.plan.modules.items()}
    whole = evaluate(problem, replace(sharded.plan, modules=modules))
    parameters = {n: sum(layer.num_parameters for layer in m.workload.layers) for n, m in problem.modules.items()}
    layers = problem.modules["language_model"].workload.layers
    gathered = max(layer.num_parameters for layer in layers if layer.part == "block")
    arriving = gathered  # The block that is needed next.
    gathered += sum(layer.num_parameters for layer in layers if layer.part != "block")
    gathered += parameters["vision"] + parameters["audio"]
    # Three quarters of 16 bytes a parameter, but for what is gathered: weights and gradients of 4 bytes each.
    saved = sum(parameters.values()) * 16 * 3 // 4 - gathered * 8 - arriving * 4
    assert whole.costs.static_bytes(0) - sharded.costs.static_bytes(0) == pytest.approx(saved, rel=1e-3)
    assert sharded.iteration_time_s > whole.iteration_time_s
    values = report_evaluation(sharded)
    assert values["sharing"]["vision"]["replicas"] == 4
    says = "4 replicas share parameters by rows; after a failure training restarts from the checkpoint"
    assert says in report_text(values)
    assert not report_evaluation(whole)["sharing"]


def test_replicas_share_within_nodes_too():
    problem = small_problem(num_devices=4, frozen=(), dp_sizes=(4,))
    two_nodes = replace(problem, cluster=replace(problem.cluster, devices_per_node=2))
    plan = make_plan(two_nodes, "fsdp")
    plain = {n: replace(m, fully_sharded=False, sharded_replicas=1) for n, m in plan.modules.items()}
    whole, zero2, hybrid, hybrid_zero2 = sharing_plans(two_nodes, replace(plan, modules=plain))
    assert all(m.whole_parameters for each in (zero2, hybrid_zero2) for m in each.modules.values())
    assert not any(m.whole_parameters for each in (whole, hybrid) for m in each.modules.values())
    assert {m.sharded_replicas for m in whole.modules.values()} == {4}
    assert {m.sharded_replicas for m in hybrid.modules.values()} == {2}
    needs = [evaluate(two_nodes, each).costs.static_bytes(0) for each in (whole, hybrid)]
    assert needs[0] < needs[1]


def test_whole_parameters_take_more_memory_and_less_time_in_pipelines():
    """Every microbatch gathers them otherwise."""
    problem = small_problem(num_devices=4, encoders=(), frozen=(), num_microbatches=8)
    degrees = {"language_model": Degrees(dp=2, pp=2, fully_sharded=True, sharded_replicas=2)}
    shared = evaluate(problem, explicit_plan(problem, degrees))
    module = replace(shared.plan.modules["language_model"], whole_parameters=True)
    whole = evaluate(problem, replace(shared.plan, modules={"language_model": module}))
    assert whole.iteration_time_s < shared.iteration_time_s
    workload = problem.modules["language_model"].workload
    weights = [
        workload.layers[i].num_parameters * 4
        for i in range(*module.replicas[0].stages[0].layers)
        if workload.layers[i].part == "block"
    ]
    # Of FSDP's blocks, one is gathered and one arrives.
    more = sum(weights) - max(weights) - (max(weights) if len(weights) > 1 else 0)
    assert whole.costs.static_bytes(0) - shared.costs.static_bytes(0) == pytest.approx(more, rel=1e-6)


def test_auto_gathers_parameters_once_in_a_step_where_that_fits():
    problem = small_problem(num_devices=2, encoders=(), frozen=(), dp_sizes=(2,), num_microbatches=2)
    shared = make_plan(problem, "fsdp")
    modules = {name: replace(module, whole_parameters=True) for name, module in shared.modules.items()}
    peak = max(evaluate(problem, replace(shared, modules=modules)).result.peak_memory_bytes)
    choice = choose(with_memory(problem, 1.01 * peak / (1 - RESERVE)))
    assert choice.evaluation.fits
    assert choice.evaluation.plan.modules["language_model"].whole_parameters


def test_auto_shares_parameters_where_nothing_else_fits():
    problem = small_problem(num_devices=2, encoders=(), frozen=(), dp_sizes=(2,), num_microbatches=2)
    peak = max(evaluate(problem, make_plan(problem, "fsdp")).result.peak_memory_bytes)
    choice = choose(with_memory(problem, 1.05 * peak / (1 - RESERVE)))
    assert choice.evaluation.fits
    assert choice.evaluation.plan.modules["language_model"].shares_over_replicas
