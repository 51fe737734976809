"""Moves of layers and runs make groups more equal, and keep every layer on one group."""

from dataclasses import replace

import pytest
from small_problem import small_problem

from motet.planner.evaluate import evaluate
from motet.planner.layouts.layout import Chunk, Layout, cut_chain, layout_plan
from motet.planner.layouts.layout_costs import LayoutCosts
from motet.planner.layouts.refined import layout_of, refinements, with_split_encoders
from motet.planner.registry import make_plan


def ends(problem, layout):
    return sorted(LayoutCosts(problem).ends_s(layout, split_backward=True), reverse=True)


def refined(problem, layout, costs, *, split_backward):
    *_, last = [layout, *refinements(problem, layout, costs, split_backward=split_backward)]
    return last


def test_every_move_improves_the_ends():
    problem = small_problem(num_devices=3, encoders=(), frozen=(), num_microbatches=16)
    chunks = tuple(Chunk("language_model", run, group) for group, run in enumerate(((0, 7), (7, 8), (8, 10))))
    layout = Layout(planner="auto", chunks=chunks, group_sizes=(1, 1, 1))
    steps = [layout, *refinements(problem, layout, LayoutCosts(problem), split_backward=True)]
    assert len(steps) > 2
    of_steps = [ends(problem, step) for step in steps]
    assert of_steps == sorted(of_steps, reverse=True)


def test_ranks_of_a_group_take_turns_at_an_encoders_samples():
    problem = small_problem(num_devices=2, frozen=(), num_microbatches=4)
    problem = replace(
        problem, modules={name: replace(module, tp_sizes=(1, 2)) for name, module in problem.modules.items()}
    )
    chunks = tuple(Chunk(name, (0, module.workload.num_layers), 0) for name, module in problem.modules.items())
    layout = Layout(planner="auto", chunks=chunks, group_sizes=(2,))
    split = with_split_encoders(problem, layout)
    assert split.split == set(problem.sources)
    plan = evaluate(problem, layout_plan(problem, split)).plan
    assert [len(plan.modules[name].replicas) for name in ("vision", "language_model")] == [2, 1]
    assert with_split_encoders(problem, split) is None
    two = {n: replace(m, tp_sizes=(2,)) for n, m in problem.modules.items()}
    assert with_split_encoders(replace(problem, modules=two), layout) is None
    few = replace(problem, samples=problem.samples[:1])
    assert with_split_encoders(few, layout) is None


def assert_whole(problem, layout):
    for name, module in problem.modules.items():
        runs = [chunk.layers for chunk in layout.chunks if chunk.module == name]
        bounds = [0, *(last for _, last in runs)]
        assert [first for first, _ in runs] == bounds[:-1]
        assert bounds[-1] == module.workload.num_layers
        assert all(first < last for first, last in runs)


@pytest.mark.parametrize("groups", [(0, 1), (0, 1, 0, 1), (0, 1, 2, 0, 1, 2), (0, 1, 1, 0)])
def test_groups_of_a_chain_become_more_equal(groups):
    problem = small_problem(num_devices=max(groups) + 1, frozen=(), num_microbatches=8)
    seconds = {name: problem.estimator.layer_seconds(name) for name in problem.modules}
    sizes = (1,) * (max(groups) + 1)
    layout = Layout(planner="auto", chunks=tuple(cut_chain(seconds, groups)), group_sizes=sizes)
    better = refined(problem, layout, LayoutCosts(problem), split_backward=True)
    assert_whole(problem, better)
    assert ends(problem, better) <= ends(problem, layout)
    assert len(better.chunks) == len(layout.chunks)


def test_an_uneven_cut_is_evened_out_across_the_runs_between():
    problem = small_problem(num_devices=3, encoders=(), frozen=(), num_microbatches=16)
    runs = ((0, 6), (6, 8), (8, 10))
    chunks = tuple(Chunk("language_model", run, group) for group, run in enumerate(runs))
    layout = Layout(planner="auto", chunks=chunks, group_sizes=(1, 1, 1))
    better = refined(problem, layout, LayoutCosts(problem), split_backward=True)
    assert_whole(problem, better)
    assert ends(problem, better)[0] < 0.9 * ends(problem, layout)[0]
    # From the first run to the last one, and the one in between keeps its number of layers.
    assert max(last - first for _, (first, last), _ in better.chunks) <= 4


def test_runs_of_encoders_go_to_groups_that_have_less_to_do():
    problem = small_problem(num_devices=2, frozen=(), num_microbatches=8)
    whole = {name: (0, module.workload.num_layers) for name, module in problem.modules.items()}
    chunks = (
        Chunk("vision", whole["vision"], 0),
        Chunk("audio", whole["audio"], 0),
        # Runs of a single layer keep it.
        *(Chunk("language_model", (layer, layer + 1), layer // 5) for layer in range(10)),
    )
    layout = Layout(planner="auto", chunks=chunks, group_sizes=(1, 1))
    better = refined(problem, layout, LayoutCosts(problem), split_backward=True)
    assert {chunk.group for chunk in better.chunks if chunk.module != "language_model"} != {0}
    assert ends(problem, better) < ends(problem, layout)


def test_a_plan_gives_back_its_layout_and_others_have_none():
    problem = small_problem(num_devices=4, frozen=(), dp_sizes=(2,))
    seconds = {name: problem.estimator.layer_seconds(name, 1, 2) for name in problem.modules}
    chunks = tuple(cut_chain(seconds, (0, 1, 0, 1)))
    layout = Layout(planner="auto", chunks=chunks, group_sizes=(1, 1), dp=2, schedule="zero_bubble_h1")
    plan = layout_plan(problem, layout)
    assert layout_of(problem, plan) == layout
    sharded = {name: replace(m, fully_sharded=True, sharded_replicas=2) for name, m in plan.modules.items()}
    assert layout_of(problem, replace(plan, modules=sharded)) is None
    replicated = make_plan(small_problem(num_devices=4), "encoders_replicated")
    assert layout_of(small_problem(num_devices=4), replicated) is None
