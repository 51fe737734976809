"""`auto`: never slower than the best named planner, honest about how far it is from the best possible."""

from dataclasses import replace
from random import Random

import pytest
from sampling import in_campaigns
from small_problem import sample, small_problem, with_memory

from motet.costs.memory import RESERVE
from motet.planner.auto import _has_one_order, bound_of_all
from motet.planner.choice import Choice
from motet.planner.evaluate import evaluate, memory_suggestions
from motet.planner.layouts.layout import Chunk, Layout, layout_plan
from motet.planner.layouts.own_layouts import own_layouts
from motet.planner.lower_bound import problem_lower_bound_s
from motet.planner.registry import PLANNERS, choose, make_plan
from motet.planner.selection import rank
from motet.schedule.generators import GENERATORS


def draw_problem(seed):
    rng = Random(seed)
    frozen = rng.choice([(), ("vision", "audio"), ("vision", "audio", "language_model")])
    encoders = rng.choice([("vision", "audio"), ("vision",)])
    dp_sizes = rng.choice([(1,), (1, 2)])
    problem = small_problem(
        num_devices=rng.choice([3, 4, 6]),
        encoders=encoders,
        frozen=tuple(name for name in frozen if name in (*encoders, "language_model")),
        num_microbatches=rng.choice([2, 4, 8]),
        dp_sizes=dp_sizes,
    )
    sizes = rng.choice([(1,), (1, 2)])
    return replace(problem, modules={n: replace(m, tp_sizes=sizes) for n, m in problem.modules.items()})


@pytest.mark.parametrize("seed", [0, 1, *in_campaigns(range(2, 12))])
def test_it_is_between_the_bound_and_the_best_named_planner(seed):
    problem = draw_problem(seed)
    choice = choose(problem)
    named = {}
    for name in PLANNERS:
        if PLANNERS[name].is_tried_by_auto:
            try:
                named[name] = evaluate(problem, make_plan(problem, name))
            except ValueError:
                assert name in choice.refused
    assert rank(choice.evaluation) <= min(map(rank, named.values()))
    assert named.keys() == choice.named.keys() | choice.too_slow.keys()
    for name, at_least_s in choice.too_slow.items():
        assert choice.named[choice.best_named].iteration_time_s <= at_least_s
        assert at_least_s <= named[name].iteration_time_s or not named[name].fits
    for name, evaluation in choice.named.items():
        assert evaluation.iteration_time_s == pytest.approx(named[name].iteration_time_s)
    assert choice.lower_bound_s <= choice.evaluation.iteration_time_s * (1 + 1e-9)
    assert problem_lower_bound_s(problem) >= choice.lower_bound_s
    assert "above the lower bound" in choice.why
    assert choice.evaluation.plan.planner == "auto"
    assert choice.evaluation.plan.schedule in choice.why


def test_it_goes_beyond_what_any_planner_finds():
    faster = 0
    for seed in range(4):
        choice = choose(draw_problem(seed))
        best = min(map(rank, choice.named.values()))
        faster += rank(choice.evaluation) < best
        assert (choice.found_by == "auto") == (rank(choice.evaluation) < best)
    assert faster >= 2


def test_stages_that_differ_in_tensor_parallelism_are_bounded_and_told():
    problem = small_problem(num_devices=3, encoders=(), frozen=())
    modules = {name: replace(module, tp_sizes=(1, 2)) for name, module in problem.modules.items()}
    problem = replace(problem, modules=modules)
    runs = (Chunk("language_model", (0, 4), 0), Chunk("language_model", (4, 10), 1))
    evaluation = evaluate(problem, layout_plan(problem, Layout(planner="auto", chunks=runs, group_sizes=(1, 2))))
    bound_s = bound_of_all(problem, [evaluation.plan], evaluation.plan)
    assert 0 < bound_s <= evaluation.iteration_time_s
    choice = Choice(evaluation, found_by="auto", named={}, too_slow={}, refused={}, lower_bound_s=bound_s)
    assert "language_model 2 stages x tp 1 and 2 x 1 replicas" in choice.why
    assert f"{evaluation.iteration_time_s / bound_s - 1:.1%} above the lower bound" in choice.why


def test_a_schedule_that_the_user_fixed_is_kept():
    problem = small_problem(num_devices=4, frozen=())
    free = choose(problem).evaluation
    fixed = choose(replace(problem, schedules=("1f1b",))).evaluation
    assert fixed.plan.schedule == "1f1b"
    assert free.iteration_time_s <= fixed.iteration_time_s


def test_a_placement_that_the_user_fixed_leaves_only_planners_that_know_it():
    choice = choose(small_problem(num_devices=4), placement="colocated")
    assert {"cornstarch", "encoders_colocated"} <= set(choice.named)
    assert "megatron" in choice.refused
    ranks = [choice.evaluation.plan.modules[n].replicas[0].stages[0].ranks for n in ("vision", "audio")]
    assert ranks[0] == ranks[1]


def test_what_fits_goes_before_what_is_fast():
    problem = small_problem(num_devices=4, frozen=(), num_microbatches=8)
    peaks = [max(e.result.peak_memory_bytes) for e in choose(problem).named.values()]
    tight = with_memory(problem, 1.05 * min(peaks) / 0.9)
    assert choose(tight).evaluation.fits
    assert not choose(with_memory(problem, 1e5)).evaluation.fits


def test_where_no_plan_fits_it_takes_the_one_that_an_option_makes_fit():
    problem = small_problem(num_devices=4, frozen=(), num_microbatches=2)
    least = max(choose(with_memory(problem, 1e5)).evaluation.result.peak_memory_bytes)
    tight = with_memory(problem, least)
    named = choose(tight)
    assert named.repaired_s is not None
    assert not named.evaluation.fits
    assert "no plan fits as it is" in named.why
    assert any(" fits: peak" in line for line in memory_suggestions(named.evaluation))
    chosen = choose(replace(tight, chooses_recompute=True))
    assert chosen.evaluation.fits
    assert set(chosen.evaluation.plan.recompute) <= set(problem.modules)
    assert chosen.repaired_s is None
    assert "recomputed" in chosen.why


def test_own_layouts_use_all_devices_and_only_schedules_that_are_allowed():
    problem = small_problem(num_devices=4, num_microbatches=8, dp_sizes=(1, 2))
    layouts = list(own_layouts(problem, ("1f1b",)))
    assert all(layout.num_devices == 4 for layout in layouts)
    assert {layout.schedule for layout in layouts} == {None}
    assert {layout.schedule for layout in own_layouts(problem, tuple(GENERATORS))} > {None, "interleaved_1f1b_adjusted"}


def test_one_module_alone_is_planned_too():
    problem = small_problem(num_devices=2, encoders=(), frozen=())
    samples = tuple(sample(i, image=False, sound=False) for i in range(8))
    plan = make_plan(replace(problem, samples=samples), "auto")
    assert plan.num_ranks == 2


def test_sequence_parallelism_is_chosen_where_it_is_faster():
    problem = small_problem(num_devices=4, encoders=("vision",), frozen=())
    problem = replace(problem, modules={n: replace(m, tp_sizes=(2,)) for n, m in problem.modules.items()})
    assert problem.table.sequence_parallel
    choice = choose(problem)
    plan = choice.evaluation.plan
    flags = {module.sequence_parallel for module in plan.modules.values()}
    others = {name: replace(m, sequence_parallel=not m.sequence_parallel) for name, m in plan.modules.items()}
    assert len(flags) == 1
    assert rank(choice.evaluation) <= rank(evaluate(problem, replace(plan, modules=others)))
    assert choice.lower_bound_s <= choice.evaluation.iteration_time_s
    without = choose(replace(problem, table=replace(problem.table, sequence_parallel={})))
    assert not any(module.sequence_parallel for module in without.evaluation.plan.modules.values())


def test_own_layouts_have_sequence_parallelism_where_something_is_cut_and_its_costs_are_known():
    problem = small_problem(num_devices=4, num_microbatches=8)
    problem = replace(problem, modules={n: replace(m, tp_sizes=(1, 2)) for n, m in problem.modules.items()})
    assert problem.table.sequence_parallel
    unknown = replace(problem, table=replace(problem.table, sequence_parallel={}))
    seen = set()
    for layout in own_layouts(problem, tuple(GENERATORS)):
        is_cut = max(layout.group_sizes) > 1
        assert layout.sequence_parallel == is_cut
        plan = layout_plan(problem, layout)
        for name, module in plan.modules.items():
            assert module.sequence_parallel == (max(s.tp_size for r in module.replicas for s in r.stages) > 1), name
        seen.add(is_cut)
    assert seen == {True, False}
    assert not any(layout.sequence_parallel for layout in own_layouts(unknown, tuple(GENERATORS)))


def test_what_fits_with_sequence_parallelism_alone_is_not_missed():
    problem = small_problem(num_devices=4, encoders=("vision",), frozen=())
    problem = replace(problem, modules={n: replace(m, tp_sizes=(2,)) for n, m in problem.modules.items()})
    best = choose(problem).evaluation
    shared, whole = (
        evaluate(
            problem,
            replace(
                best.plan,
                modules={n: replace(m, sequence_parallel=flag) for n, m in best.plan.modules.items()},
            ),
        )
        for flag in (True, False)
    )
    peaks = [max(evaluation.result.peak_memory_bytes) for evaluation in (shared, whole)]
    assert peaks[0] < peaks[1]
    tight = with_memory(problem, sum(peaks) / 2 / (1 - RESERVE))
    choice = choose(tight)
    assert rank(choice.evaluation) <= rank(evaluate(tight, shared.plan))


def test_a_long_search_for_an_order_needs_batches_with_the_same_cells() -> None:
    alike = small_problem(encoders=("vision",), num_microbatches=4)
    plan = PLANNERS["megatron_balanced"].plan(alike)
    assert _has_one_order(evaluate(alike, plan))
    assert not _has_one_order(evaluate(alike, replace(plan, assignment="balanced")))
    lacking = small_problem(num_microbatches=4)
    assert not _has_one_order(evaluate(lacking, PLANNERS["megatron_balanced"].plan(lacking)))
    larger = small_problem(encoders=("vision",), num_devices=8, num_microbatches=4)
    unequal = PLANNERS["optimus"].plan(larger)
    assert {name: len(module.replicas) for name, module in unequal.modules.items()} == {
        "vision": 4,
        "language_model": 1,
    }
    assert not _has_one_order(evaluate(larger, unequal))
