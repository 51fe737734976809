"""What is said to make a plan fit does: it is tried, and only what suffices is named."""

from dataclasses import replace

import pytest
from small_problem import small_problem, with_memory

from motet.costs.memory import MemoryOptions
from motet.planner.evaluate import evaluate, memory_suggestions
from motet.planner.registry import make_plan
from motet.report.plan_report import report, report_text


def too_large(problem, share):
    """The plan on devices with this share of the memory that it needs."""
    plan = make_plan(problem)
    peak = max(evaluate(problem, plan).result.peak_memory_bytes)
    return evaluate(with_memory(problem, share * peak / 0.9), plan)


def test_recomputation_is_named_where_it_suffices():
    evaluation = too_large(small_problem(frozen=(), num_microbatches=2), 0.95)
    (line,) = [line for line in memory_suggestions(evaluation) if "recompute" in line]
    assert line.startswith("parallel.recompute: [vision, audio, language_model] fits: ")
    names = ("vision", "audio", "language_model")
    again = evaluate(replace(evaluation.problem, recompute=names), replace(evaluation.plan, recompute=names))
    assert again.fits


def test_sharded_moments_are_named_only_where_there_are_replicas():
    options = {"frozen": (), "num_microbatches": 8, "num_devices": 6}
    several = too_large(small_problem(dp_sizes=(2,), **options), 0.9)
    assert any(line.startswith("parallel.zero1: true fits") for line in memory_suggestions(several))
    alone = too_large(small_problem(**options), 0.9)
    assert not any(line.startswith("parallel.zero1: true fits") for line in memory_suggestions(alone))
    already = replace(several.problem, memory=MemoryOptions(zero1=True))
    assert not any(
        "zero1: true fits" in line for line in memory_suggestions(evaluate(with_memory(already, 1e5), several.plan))
    )


def test_smaller_microbatches_are_named_with_their_number():
    evaluation = too_large(small_problem(frozen=("vision", "audio"), num_microbatches=2), 0.97)
    assert any(line.startswith("parallel.num_microbatches: ") for line in memory_suggestions(evaluation))


def test_where_only_all_changes_together_suffice_they_are_named():
    evaluation = too_large(small_problem(frozen=(), num_microbatches=1, num_devices=6, dp_sizes=(2,)), 0.2)
    (line,) = memory_suggestions(evaluation)
    assert line.startswith(
        "parallel.zero1: true with parallel.recompute of all modules and parallel.num_microbatches: 4 fits: "
    )


def test_where_nothing_suffices_that_is_said():
    (line,) = memory_suggestions(too_large(small_problem(), 0.01))
    assert "do not suffice" in line
    assert "times as many devices" in line


@pytest.mark.parametrize("share", [0.95, 2.0])
def test_they_are_reported_if_and_only_if_it_does_not_fit(share):
    evaluation = too_large(small_problem(frozen=(), num_microbatches=2), share)
    values = report(evaluation.plan, evaluation.problem)
    assert bool(values["remedies"]) == (share < 1)
    assert ("fits: " in report_text(values)) == (share < 1)
