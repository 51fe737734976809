"""One device more makes no plan slower: planners may leave it idle."""

from dataclasses import replace
from itertools import pairwise

import pytest
from small_problem import small_problem, with_memory

from motet.costs.memory import RESERVE
from motet.errors import UserError
from motet.planner.evaluate import evaluate
from motet.planner.problem import TooSlowError
from motet.planner.registry import PLANNERS, choose, make_plan
from motet.planner.selection import device_counts, plan_on_best_count, rank


def with_degrees(problem, tp, dp):
    modules = {name: replace(module, tp_sizes=tp) for name, module in problem.modules.items()}
    return replace(problem, modules=modules, dp_sizes=dp)


@pytest.mark.parametrize(
    ("num_devices", "dp", "counts"),
    [(8, (1, 2, 4), [8]), (9, (1, 2, 4), [9, 8]), (15, (1, 2, 4), [15, 14, 12, 8]), (8, (3,), [8, 6]), (2, (4,), [2])],
)
def test_counts_are_the_most_that_a_product_of_degrees_divides(num_devices, dp, counts):
    assert device_counts(with_degrees(small_problem(num_devices=num_devices), (1, 2), dp)) == counts


@pytest.mark.parametrize("planner", [name for name in PLANNERS if not PLANNERS[name].chooses_num_devices])
def test_no_planner_gets_slower_by_one_more_device(planner):
    ranks = []
    for num_devices in range(7, 10):
        problem = with_degrees(small_problem(num_devices=num_devices, frozen=("vision",)), (1, 2), (1, 2, 4))
        ranks.append(rank(evaluate(problem, make_plan(problem, planner))))
    # A stage more may have a message more.
    assert all(after[1] <= before[1] * 1.01 for before, after in pairwise(ranks))


def test_auto_leaves_a_device_unused_and_says_so():
    problem = with_degrees(small_problem(num_devices=5, frozen=()), (1,), (4,))
    choice = choose(problem)
    assert choice.evaluation.plan.num_ranks == 4
    assert "1 of 5 devices unused" in choice.why
    assert choice.evaluation.iteration_time_s <= choose(problem.with_num_devices(4)).evaluation.iteration_time_s
    assert choice.lower_bound_s <= choice.evaluation.iteration_time_s


def test_auto_says_so_of_chains_under_open_options_too():
    problem = with_degrees(small_problem(num_devices=5, encoders=(), frozen=()), (1,), (1, 2, 4))
    choice = choose(replace(problem, microbatch_numbers=(1, 2, 4), free_dp_sizes=(1, 2, 4)))
    assert choice.found_by == "auto"
    assert choice.evaluation.plan.num_ranks == 4
    assert choice.evaluation.problem.num_devices == 5
    assert "1 of 5 devices unused" in choice.why


def test_fewer_devices_are_asked_for_only_where_they_can_win():
    asked = []

    def planner(problem, *, placement):
        asked.append(problem.num_devices)
        return PLANNERS["megatron"].plan(problem)

    problem = with_degrees(small_problem(num_devices=7), (1,), (1, 4))
    plan = plan_on_best_count(planner, problem)
    assert asked[0] == 7
    assert set(asked) <= {7, 4}
    assert plan.num_ranks in asked


@pytest.mark.parametrize("cutoff_share", [0.5, 2.0])
def test_counts_that_cannot_win_count_as_too_slow(cutoff_share):
    """Whatever the planner does with the others: nothing faster is promised than what they take at least."""
    problem = with_degrees(small_problem(num_devices=9), (1,), (1, 4))

    def refuses(problem, *, placement):
        raise UserError("nothing")

    def too_slow(problem, *, placement):
        raise TooSlowError(1e9)

    least_s = sum(
        time.total_s for name in problem.modules for time in problem.estimator.lower_bound_batch_times(name, 1)
    )
    assert device_counts(problem) == [9, 8]
    cutoff_s = cutoff_share * least_s / 9  # 0.5: no count can win; 2: both may.
    for planner in (refuses, too_slow):
        if cutoff_share > 1 and planner is refuses:
            with pytest.raises(UserError, match="nothing"):
                plan_on_best_count(planner, problem.with_cutoff(cutoff_s))
            continue
        with pytest.raises(TooSlowError) as raised:
            plan_on_best_count(planner, problem.with_cutoff(cutoff_s))
        assert raised.value.at_least_s == (1e9 if cutoff_share > 1 else pytest.approx(least_s / 9))


def test_devices_are_left_over_where_nothing_fits_on_all():
    planner = "megatron_extra_stages"
    problem = with_degrees(small_problem(num_devices=7), (1, 2), (1,))
    everywhere = evaluate(problem, PLANNERS[planner].plan(problem))
    assert everywhere.plan.num_ranks == 7
    tight = with_memory(problem, 0.999 * max(everywhere.result.peak_memory_bytes) / (1 - RESERVE))
    evaluation = evaluate(tight, make_plan(tight, planner))
    assert evaluation.fits
    assert evaluation.plan.num_ranks < 7


def test_where_nobody_finds_anything_all_devices_are_named():
    problem = with_degrees(small_problem(num_devices=3), (1,), (4,))
    with pytest.raises(UserError, match="on 3 devices"):
        plan_on_best_count(PLANNERS["megatron"].plan, problem)


def test_devices_that_no_degrees_divide_are_left_over():
    problem = with_degrees(small_problem(num_devices=7, frozen=()), (2,), (1,))
    assert make_plan(problem, "megatron").num_ranks == 6
