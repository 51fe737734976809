"""What the data look like: sizes and ratios against what is counted by hand, predictions against the plan's own."""

from dataclasses import replace

import numpy as np
import pytest
from small_problem import sample, small_problem

from motet.assignment.batch_assignment import BatchAssignment
from motet.balancing.policies import ASSIGNMENTS
from motet.costs.iteration import IterationCosts
from motet.plan import Plan
from motet.planner.evaluate import evaluate
from motet.planner.layouts.layout import build_plan
from motet.planner.problem import Degrees, PlanningProblem
from motet.report.data_stats import DataStats, data_stats
from motet.schedule.action import Compute, Kind
from motet.schedule.routes import derive_routes


def laid_out(problem: PlanningProblem, *, tp: int = 1) -> Plan:
    degrees = {name: Degrees(tp=tp if name == "language_model" else 1) for name in problem.modules}
    return build_plan(problem, degrees)


@pytest.fixture(scope="module")
def stats() -> DataStats:
    problem = small_problem(frozen=())
    more = [sample(16 + i, image=i % 2 == 0, words=30 + 5 * i) for i in range(24)]
    return data_stats(problem, laid_out(problem), [*problem.samples, *more], num_batches=9)


def test_tokens(stats: DataStats) -> None:
    assert stats.global_batch_size == 16
    vision, llm = stats.modules["vision"], stats.modules["language_model"]
    has_image = [i % 4 != 3 for i in range(16)] + [i % 2 == 0 for i in range(24)]
    words = [10 + i for i in range(16)] + [30 + 5 * i for i in range(24)]
    assert vision.tokens.tolist() == vision.own_tokens.tolist() == [64.0 * each for each in has_image]
    assert vision.share_of_samples == sum(has_image) / 40
    assert llm.own_tokens.tolist() == words
    has_sound = [i % 3 != 2 for i in range(16)] + [True] * 24
    sequences = [w + 64 * image + 20 * sound for w, image, sound in zip(words, has_image, has_sound, strict=True)]
    assert llm.tokens.tolist() == sequences


@pytest.mark.parametrize("tp", [1, 2])
def test_work_is_that_of_microbatches_of_one_sample(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less what a call costs however much it computes. Messages go whole."""
    monkeypatch.setattr("motet.costs.stage_seconds.row_shares", lambda *_, **__: 1)
    problem = small_problem(frozen=("vision",))
    plan = laid_out(problem, tp=tp)
    plan = replace(plan, num_microbatches=16)
    each = BatchAssignment(
        {name: (tuple((i,) if s.has(name) else () for i, s in enumerate(problem.samples)),) for name in problem.modules}
    )
    routes = derive_routes(plan, each, problem.samples)
    workloads = {name: module.workload for name, module in problem.modules.items()}
    costs = IterationCosts(
        routes,
        problem.samples,
        workloads=workloads,
        table=problem.table,
        cluster=problem.cluster,
        memory=problem.memory,
    )
    found = data_stats(problem, plan, problem.samples, num_batches=1).modules
    seconds = {name: np.zeros(16) for name in problem.modules}
    for cell in routes.cells:
        kinds = [Kind.FORWARD, *([Kind.BACKWARD] if cell in routes.with_backward else [])]
        seconds[cell.module][cell.microbatch] += sum(costs.compute_s(Compute(kind, cell)) for kind in kinds)
    for name, stats in found.items():
        there = stats.tokens > 0
        devices = tp if name == "language_model" else 1
        calls = devices * seconds[name][there] - stats.work_s[there]
        np.testing.assert_allclose(calls, calls.mean(), rtol=1e-6, atol=1e-9)
        assert (calls >= 0).all()
        assert not stats.work_s[~there].any()


def test_ratios_come_together_in_large_batches(stats: DataStats) -> None:
    for name, ratio in stats.ratios.items():
        encoder, llm = stats.modules[name].work_s, stats.modules["language_model"].work_s
        assert ratio.whole == pytest.approx(encoder.sum() / llm.sum())
        np.testing.assert_allclose(ratio.by_sample, encoder / llm)
        assert list(ratio.by_batch_size) == [1, 2, 4, 8, 16, 32]
        assert set(ratio.by_batch_size[1]) <= set(ratio.by_sample)
        spreads = [values.std() for values in ratio.by_batch_size.values()]
        assert spreads[0] > 2 * spreads[3] > 2 * spreads[5]
        assert ratio.by_batch_size[32].mean() == pytest.approx(ratio.whole, rel=0.1)
    assert set(stats.ratios) == {"vision", "audio"}


def test_the_smallest_batch_shares_out_the_plans_devices(stats: DataStats) -> None:
    assert stats.profiling_size is not None
    assert sum(stats.profiling_size.allocation) == stats.plan.num_ranks  # type: ignore[arg-type]
    assert stats.why_no_profiling_size is None


def test_every_cut_is_predicted_for_every_batch() -> None:
    problem = small_problem(frozen=())
    plan = replace(laid_out(problem), assignment="random")
    samples = [*problem.samples, *problem.samples[::-1], sample(99)]
    stats = data_stats(problem, plan, samples, num_batches=9)
    assert stats.num_batches == 2
    assert next(iter(stats.assignments)) == "random"
    assert set(stats.assignments) == set(ASSIGNMENTS)
    for name, found in stats.assignments.items():
        both = [
            evaluate(replace(problem, samples=tuple(batch)), replace(plan, assignment=name))
            for batch in (problem.samples, problem.samples[::-1])
        ]
        assert found.iteration_time_s == pytest.approx(sum(e.iteration_time_s for e in both) / 2)
        assert found.bubble_fraction == pytest.approx(sum(e.result.bubble_fraction for e in both) / 2)
    assert data_stats(problem, plan, samples, num_batches=1).num_batches == 1


def test_one_module_needs_no_profiling_size() -> None:
    problem = small_problem(encoders=())
    words = [sample(i, image=False, sound=False, words=9 + i) for i in range(16)]
    problem = replace(problem, samples=tuple(words), edges=())
    stats = data_stats(problem, laid_out(problem), words, num_batches=1)
    assert (stats.profiling_size, stats.ratios) == (None, {})
    assert stats.why_no_profiling_size == "one module takes all devices"
