"""What a plan would do is the same whether pipelines that are alike are simulated once or one by one."""

from dataclasses import replace

import pytest
from small_problem import sample, small_problem

from motet.planner.evaluate import Simulations, evaluate, under_schedule
from motet.planner.registry import PLANNERS, Degrees, make_plan
from motet.report.plan_report import report_evaluation
from motet.schedule.generators import GENERATORS
from papers.optimus.problems import problems


def four_pipelines(**options):
    """Four of them on three devices each; the samples of the last one have no sound."""
    problem = small_problem(num_devices=12, dp_sizes=(4,), **options)
    samples = [sample(i, sound=i < 12) for i in range(16)]
    return replace(problem, samples=tuple(samples), num_cores=None)


@pytest.mark.parametrize("schedule", GENERATORS)
def test_folded_and_whole_tell_the_same(schedule):
    problem = four_pipelines()
    degrees = {name: Degrees(dp=4) for name in problem.modules}
    plan = replace(make_plan(problem, "explicit", degrees=degrees), schedule=schedule)
    folded, whole = evaluate(problem, plan), evaluate(problem, plan, folded=False)
    assert set(folded.result.folding.replica_of.values()) == {(name, r) for name in problem.modules for r in (0, 3)}
    expected = report_evaluation(whole, dtype="float32")
    found = report_evaluation(folded, dtype="float32")
    for key in ("bubble_fraction", "time_shares_s"):
        assert found.pop(key) == pytest.approx(expected.pop(key))
    by_rank = [
        {rank: row["bytes"] for row in report.pop("memory_by_kind") for rank in row["ranks"]}
        for report in (found, expected)
    ]
    assert by_rank[0] == by_rank[1]
    assert found == expected
    gpu = replace(problem, cluster=replace(problem.cluster, device=replace(problem.cluster.device, name="gpu")))
    assert replace(folded, problem=gpu).mfu("float32") == pytest.approx(replace(whole, problem=gpu).mfu("float32"))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h2", "bubble_filling"])
def test_pipelines_that_lie_otherwise_on_the_nodes_have_one_schedule(schedule):
    """Three devices each on nodes of two: every other one lies across a node's end where the others do not."""
    problem = four_pipelines()
    problem = replace(problem, cluster=replace(problem.cluster, devices_per_node=2))
    plan = replace(make_plan(problem, "explicit", degrees={name: Degrees(dp=4) for name in problem.modules}))
    plan = replace(plan, schedule=schedule)
    folded, whole = evaluate(problem, plan), evaluate(problem, plan, folded=False)
    assert len(set(folded.result.folding.replica_of.values())) == 3 * len(problem.modules)
    assert folded.iteration_time_s == whole.iteration_time_s
    ranks = {rank for rank, like in enumerate(folded.result.folding.rank_of.tolist()) if rank == like}
    assert set(folded.result.timeline_of(ranks).spans) == set(whole.result.timeline_of(ranks).spans)


@pytest.mark.parametrize("devices_per_node", [2, 16])
def test_another_schedule_of_the_same_plan_is_what_it_would_be_evaluated_anew(devices_per_node):
    problem = four_pipelines()
    problem = replace(problem, cluster=replace(problem.cluster, devices_per_node=devices_per_node))
    known = evaluate(problem, PLANNERS["megatron_balanced"].plan(problem))
    for schedule in ("bubble_filling", "zero_bubble_h1", "zero_bubble_h2", "gpipe", "eager_1f1b"):
        found, anew = under_schedule(known, schedule), evaluate(problem, replace(known.plan, schedule=schedule))
        assert found.plan == anew.plan
        assert found.iteration_time_s == anew.iteration_time_s
        assert found.result.peak_memory_bytes == anew.result.peak_memory_bytes


def test_each_plan_of_a_search_is_simulated_once(monkeypatch):
    problem, simulations = four_pipelines(), Simulations()
    plan = PLANNERS["megatron_balanced"].plan(problem)
    first = simulations.evaluate(problem, plan)
    other = simulations.under_schedule(first, "gpipe")
    monkeypatch.setattr("motet.planner.evaluate._simulated", None)
    assert simulations.evaluate(problem, replace(plan)) is first
    assert simulations.under_schedule(other, plan.schedule) is first
    assert simulations.evaluate(problem, replace(plan, schedule="gpipe")) is other
    renamed = replace(plan, planner="another")
    assert simulations.evaluate(problem, renamed) == replace(first, plan=renamed)
    assert simulations.num_actions == first.num_actions + other.num_actions
    with pytest.raises(TypeError):
        simulations.under_schedule(first, "eager_1f1b")


def test_planners_plans_too():
    problem = four_pipelines()
    for name in ("optimus", "disttrain", "megatron_balanced", "encoders_replicated"):
        plan = PLANNERS[name].plan(problem)
        folded, whole = evaluate(problem, plan), evaluate(problem, plan, folded=False)
        assert folded.iteration_time_s == pytest.approx(whole.iteration_time_s, rel=1e-12)
        assert folded.result.peak_memory_bytes == whole.result.peak_memory_bytes
        assert folded.lower_bound_s == pytest.approx(whole.lower_bound_s, rel=1e-12)


def test_schedules_that_fill_memory_leave_room_for_messages():
    """Weight halves are put off until memory is full; what ranks send and receive must fit beside them."""
    (_, problem), *_ = problems()
    plan = replace(PLANNERS["optimus"].plan(problem), schedule="zero_bubble_h1")
    found = evaluate(problem, plan)
    most = max(found.result.peak_memory_bytes)
    assert found.fits
    assert most > 1.2 * max(evaluate(problem, replace(plan, schedule="bubble_filling")).result.peak_memory_bytes)
