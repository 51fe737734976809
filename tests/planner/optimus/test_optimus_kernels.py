"""Kernels of stages: they take what the layers take, and communicate what tensor parallelism sums."""

from dataclasses import replace

import pytest
from small_problem import small_problem

from motet.planner.optimus.timeline import stage_kernels


def problem_with(**options):
    return small_problem(encoders=("vision",), num_microbatches=4, **options)


@pytest.mark.parametrize("name", ["vision", "language_model"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("frozen", [(), ("vision",), ("language_model",)])
@pytest.mark.parametrize("recompute", [(), ("vision", "language_model")])
def test_a_stage_s_kernels_take_what_its_layers_take(name, tp, frozen, recompute):
    problem = problem_with(frozen=frozen, recompute=recompute)
    num_layers = problem.modules[name].workload.num_layers
    stages = [(0, 2), (2, 5), (5, num_layers)]
    forward, backward = stage_kernels(problem, name, tp, 1, stages)
    times = problem.estimator.layer_times(name, tp, 1)
    for (first, last), there, back in zip(stages, forward, backward, strict=True):
        assert sum(kernel.seconds for kernel in there) == pytest.approx(sum(t.forward_s for t in times[first:last]))
        assert sum(kernel.seconds for kernel in back) == pytest.approx(sum(t.backward_s for t in times[first:last]))


def test_a_block_sums_twice_in_each_direction_under_tensor_parallelism():
    problem = problem_with(frozen=())
    for tp, expected in ((1, 0), (2, 2)):
        forward, backward = stage_kernels(problem, "language_model", tp, 1, [(2, 3)])
        assert sum(kernel.is_communication for kernel in forward[0]) == expected
        assert sum(kernel.is_communication for kernel in backward[0]) == expected


def test_what_is_frozen_and_has_nothing_before_has_no_backward():
    problem = problem_with(frozen=("vision",))
    num_layers = problem.modules["vision"].workload.num_layers
    _, backward = stage_kernels(problem, "vision", 1, 1, [(0, num_layers - 1), (num_layers - 1, num_layers)])
    assert backward[0] == ()
    assert backward[1]


def test_recomputation_runs_the_forward_s_collectives_again():
    problem = problem_with(frozen=())
    again = replace(problem, recompute=("language_model",))
    plain, recomputed = (
        sum(kernel.is_communication for kernel in stage_kernels(p, "language_model", 2, 1, [(2, 3)]).backward[0])
        for p in (problem, again)
    )
    assert recomputed == plain + 2
