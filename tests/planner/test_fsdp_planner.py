"""FSDP's plan and what sharding would make of it."""

from dataclasses import replace

import pytest
from small_problem import small_problem, with_memory

from motet.costs.memory import RESERVE
from motet.planner.evaluate import evaluate
from motet.planner.fsdp import fsdp_iteration_s, fsdp_memory_bytes, fully_sharded
from motet.planner.registry import make_plan
from motet.report.plan_report import report_evaluation, report_text


def test_fsdp_is_a_replica_per_device_and_needs_as_many_samples():
    plan = make_plan(small_problem(num_devices=5, dp_sizes=(1, 5)), "fsdp")
    assert all(len(module.replicas) == 5 for module in plan.modules.values())
    with pytest.raises(ValueError, match="fsdp needs a sample for each of 17 devices"):
        make_plan(small_problem(num_devices=17, dp_sizes=(1, 17)), "fsdp")
    with pytest.raises(ValueError, match="do not allow; allow 5"):
        make_plan(small_problem(num_devices=5), "fsdp")


def test_fsdp_by_hand():
    problem = small_problem(num_devices=4, frozen=())
    parameters = sum(layer.num_parameters for m in problem.modules.values() for layer in m.workload.layers)
    frozen = small_problem(num_devices=4, frozen=("vision", "audio", "language_model"))
    # Parameter, gradient and two moments of 4 bytes each, over 4 devices.
    assert fsdp_memory_bytes(problem) == 4 * parameters * 4 / 4
    assert fsdp_memory_bytes(frozen) < fsdp_memory_bytes(problem) / 2
    # Compute hides communication, or the other way round.
    assert fsdp_iteration_s(problem, 100.0) == pytest.approx(100.0, rel=1e-3)
    assert fsdp_iteration_s(problem, 0.0) > fsdp_iteration_s(frozen, 0.0) > 0


def test_every_microbatch_gathers_anew():
    one, four = (small_problem(num_devices=4, frozen=(), num_microbatches=n) for n in (1, 4))
    bare = (fsdp_iteration_s(problem, 0.0) for problem in (one, four))
    shown_s = fsdp_iteration_s(one, 100.0) - 100.0  # The first layer's gather, that nothing hides.
    first, second = (seconds - shown_s for seconds in bare)
    assert shown_s > 0
    assert second == pytest.approx(4 * first)


def test_autocast_gathers_half_and_sums_whole_gradients():
    problem = small_problem(num_devices=4, frozen=("language_model",), encoders=())
    whole, half = (
        fsdp_iteration_s(replace(problem, memory=replace(problem.memory, autocast_bytes=n)), 0.0) for n in (None, 2)
    )
    assert half == pytest.approx(whole / 2, rel=0.1)


def test_what_sharding_saves_and_costs_is_told_beside_the_plan():
    problem = small_problem(num_devices=4, frozen=(), dp_sizes=(4,))
    evaluation = evaluate(problem, make_plan(problem, "fsdp"))
    sharded = fully_sharded(evaluation)
    parameters = sum(layer.num_parameters for m in problem.modules.values() for layer in m.workload.layers)
    saved = max(evaluation.result.peak_memory_bytes) - sharded.peak_memory_bytes
    # Three quarters of 16 bytes a parameter, less what is gathered.
    assert 0.5 * 12 * parameters < saved < 12 * parameters
    assert sharded.iteration_time_s >= (evaluation.result.busy_s - evaluation.costs.fixed_s).max()
    values = report_evaluation(evaluation)
    assert values["fully_sharded"]["peak_memory_bytes"] == sharded.peak_memory_bytes
    assert "FSDP, in closed form" in report_text(values)
    limit = sharded.peak_memory_bytes / (1 - RESERVE) + 2
    tight = with_memory(problem, limit)
    tight_evaluation = evaluate(tight, make_plan(tight, "fsdp"))
    assert not tight_evaluation.fits
    assert fully_sharded(tight_evaluation).fits
    assert "fully_sharded" not in report_evaluation(evaluate(problem, make_plan(problem, "megatron")))
