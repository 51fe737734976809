"""Where each of Megatron's extensions puts encoders."""

from dataclasses import replace

import pytest
from small_problem import small_problem

from motet.planner.evaluate import evaluate
from motet.planner.layouts.degrees import uniform_degrees
from motet.planner.layouts.layout import layout_plan
from motet.planner.layouts.partition import stage_costs
from motet.planner.megatron import balanced_chains
from motet.planner.registry import make_plan


def with_tp(problem, *sizes):
    return replace(problem, modules={name: replace(m, tp_sizes=sizes) for name, m in problem.modules.items()})


def test_encoders_stand_in_the_first_stage():
    plan = make_plan(small_problem(num_devices=4), "megatron")
    ((stage,),) = (replica.stages for replica in plan.modules["vision"].replicas)
    llm = plan.modules["language_model"].replicas[0].stages
    assert stage.ranks == llm[0].ranks == plan.modules["audio"].replicas[0].stages[0].ranks == (0,)
    assert [s.layers for s in llm] == [(0, 3), (3, 5), (5, 7), (7, 10)]


def test_extra_stages_hold_a_copy_of_the_encoder_on_each_rank_of_the_group():
    problem = small_problem(num_devices=8)
    backbone = replace(problem.modules["language_model"], tp_sizes=(2,))
    problem = replace(problem, modules={**problem.modules, "language_model": backbone})
    plan = make_plan(problem, "megatron_extra_stages")
    vision = plan.modules["vision"].replicas
    assert [replica.stages[0].ranks for replica in vision] == [(0,), (1,)]
    assert [replica.stages[0].ranks for replica in plan.modules["audio"].replicas] == [(2,), (3,)]
    llm = plan.modules["language_model"].replicas
    assert [stage.ranks for stage in llm[0].stages] == [(4, 5), (6, 7)]
    evaluation = evaluate(problem, plan)
    in_turns = [cell for cell in evaluation.program.dependencies.routes.cells if cell.module == "vision"]
    assert {cell.replica for cell in in_turns} == {0, 1}


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_balanced_chains_are_cut_where_the_slowest_run_is_fastest(num_chunks):
    problem = small_problem(num_devices=3)
    (layout,) = balanced_chains(problem, uniform_degrees(problem), num_chunks, planner="some")
    plan = layout_plan(problem, layout)
    groups = [chunk.group for chunk in layout.chunks]
    order = [group for i, group in enumerate(groups) if i == 0 or group != groups[i - 1]]
    assert order == [v % 3 for v in range(3 * num_chunks)]
    times = {n: problem.estimator.layer_seconds(n, frozen_aware=False) for n in problem.modules}
    runs: list[float] = []
    for i, chunk in enumerate(layout.chunks):
        (seconds,) = stage_costs(times[chunk.module], [chunk.layers])
        if i and chunk.group == groups[i - 1]:
            runs[-1] += seconds
        else:
            runs.append(seconds)
    total, longest = sum(map(sum, times.values())), max(map(max, times.values()))
    assert max(runs) <= total / len(runs) + longest
    assert evaluate(problem, plan).iteration_time_s > 0


def test_balanced_is_no_slower_than_encoders_in_the_first_stage():
    problem = small_problem(num_devices=4, frozen=(), num_microbatches=8)
    times = {
        name: evaluate(problem, make_plan(problem, name)).iteration_time_s for name in ("megatron", "megatron_balanced")
    }
    assert times["megatron_balanced"] <= times["megatron"]


def test_more_stages_than_blocks_is_told_in_one_line():
    with pytest.raises(ValueError, match="megatron finds no layout"):
        make_plan(small_problem(num_devices=11), "megatron")
