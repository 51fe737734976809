"""The loads of microbatches, for a typical one."""

import pytest
from small_problem import small_problem

from motet.planner.cost_estimates.microbatch_loads import typical_load


def test_typical_load_is_the_mean_over_microbatches():
    problem = small_problem()
    images = sum(sample.has("vision") for sample in problem.samples)
    assert typical_load(problem, "vision").tokens == images * 64 / 4
    assert typical_load(problem, "vision", dp=2).tokens == images * 64 / 8
    assert typical_load(problem, "language_model").incoming == pytest.approx(
        sum(s.num_outputs("vision") + s.num_outputs("audio") for s in problem.samples) / 4
    )
