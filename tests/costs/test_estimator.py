"""The estimator: seconds of layers, what freezing saves and recomputation adds, and the loads of microbatches."""

import pytest
from small_problem import small_problem


def test_frozen_layers_cost_less_only_for_those_who_know():
    problem = small_problem(encoders=("vision",))
    aware = problem.estimator.layer_times("vision")
    unaware = problem.estimator.layer_times("vision", frozen_aware=False)
    assert all(time.backward_s == 0 for time in aware[:-1])
    assert aware[-1].backward_s > 0
    assert unaware[1].backward_s == pytest.approx(2 * unaware[1].forward_s, rel=0.1)


def test_recomputation_adds_a_forward_where_there_is_a_backward():
    plain, recomputing = small_problem(), small_problem(recompute=("language_model", "vision"))
    before, after = (each.estimator.layer_times("language_model")[1] for each in (plain, recomputing))
    assert after.backward_s == pytest.approx(before.backward_s + before.forward_s)
    assert recomputing.estimator.layer_times("vision")[1].backward_s == 0


def test_typical_load_is_the_mean_over_microbatches():
    problem = small_problem()
    images = sum(sample.has("vision") for sample in problem.samples)
    assert problem.estimator.typical_load("vision").tokens == images * 64 / 4
    assert problem.estimator.typical_load("vision", dp=2).tokens == images * 64 / 8
    assert problem.estimator.typical_load("language_model").incoming == pytest.approx(
        sum(s.num_outputs("vision") + s.num_outputs("audio") for s in problem.samples) / 4
    )
