"""Seconds of layers: what freezing saves and recomputation adds."""

import pytest
from small_problem import small_problem

from motet.planner.cost_estimates.layer_times import layer_times


def test_frozen_layers_cost_less_only_for_those_who_know():
    problem = small_problem(encoders=("vision",))
    aware = layer_times(problem, "vision")
    unaware = layer_times(problem, "vision", frozen_aware=False)
    assert all(time.backward_s == 0 for time in aware[:-1])
    assert aware[-1].backward_s > 0
    assert unaware[1].backward_s == pytest.approx(2 * unaware[1].forward_s, rel=0.1)


def test_recomputation_adds_a_forward_where_there_is_a_backward():
    plain, recomputing = small_problem(), small_problem(recompute=("language_model", "vision"))
    before, after = layer_times(plain, "language_model")[1], layer_times(recomputing, "language_model")[1]
    assert after.backward_s == pytest.approx(before.backward_s + before.forward_s)
    assert layer_times(recomputing, "vision")[1].backward_s == 0
