"""A layout's bound holds for every schedule, and is near what 1F1B takes where stages are equal."""

from dataclasses import replace
from random import Random

import pytest
from sampling import in_campaigns
from small_problem import sample, small_problem, with_memory

from motet.balancing.policies import ASSIGNMENTS
from motet.planner.evaluate import evaluate
from motet.planner.layouts.layout import Chunk, Layout, layout_plan
from motet.planner.layouts.layout_costs import LayoutCosts
from motet.schedule.generators import GENERATORS


def draw_layout(rng, problem, num_groups):
    """Any cut, any group for each run."""
    chunks = []
    for name, module in problem.modules.items():
        n = module.workload.num_layers
        inner = sorted(rng.sample(range(1, n), k=rng.randint(0, min(4, n - 1))))
        chunks += [Chunk(name, run, rng.randrange(num_groups)) for run in zip([0, *inner], [*inner, n], strict=True)]
    used = sorted({chunk.group for chunk in chunks})
    chunks = [chunk._replace(group=used.index(chunk.group)) for chunk in chunks]
    sizes = tuple(rng.choice([1, 2]) for _ in used)
    return Layout(
        planner="drawn",
        chunks=tuple(chunks),
        group_sizes=sizes,
        dp=rng.choice([1, 2]),
        sequence_parallel=rng.random() < 0.5,
    )


@pytest.mark.parametrize(
    ("schedule", "num_draws"),
    [
        *((name, 12 if name in ("1f1b", "gpipe") else 4) for name in sorted(GENERATORS)),
        *in_campaigns((name, 40) for name in sorted(GENERATORS)),
    ],
)
def test_no_schedule_is_faster_than_the_bound(schedule, num_draws):
    num_tight = 0
    for seed in range(num_draws):
        rng = Random(seed)
        frozen = rng.choice([(), ("vision", "audio"), ("vision", "audio", "language_model")])
        problem = small_problem(frozen=frozen, num_microbatches=rng.choice([1, 3, 6]))
        layout = draw_layout(rng, problem, rng.randint(1, 4))
        try:
            evaluation = evaluate(problem, layout_plan(problem, layout, schedule=schedule))
        except ValueError:  # A schedule that needs another shape says so.
            continue
        costs = LayoutCosts(problem)
        bound = costs.bound_s(layout)
        assert bound <= evaluation.result.iteration_time_s * (1 + 1e-9), f"seed {seed}: {layout}"
        if schedule in ("1f1b", "gpipe"):
            unsplit = costs.bound_s(layout, split_backward=False)
            assert bound <= unsplit <= evaluation.result.iteration_time_s * (1 + 1e-9), f"seed {seed}: {layout}"
            num_tight += unsplit >= 0.6 * evaluation.result.iteration_time_s
    assert schedule not in ("1f1b", "gpipe") or num_tight >= 4


@pytest.mark.parametrize("num_draws", [4, *in_campaigns([40])])
@pytest.mark.parametrize("assignment", sorted(ASSIGNMENTS))
def test_no_way_to_cut_the_batch_is_faster_than_the_bound(assignment, num_draws):
    """Some leave microbatches empty, whose constants nobody pays, or pad less."""
    for seed in range(num_draws):
        rng = Random(seed)
        problem = small_problem(frozen=(), num_microbatches=rng.choice([3, 6]), assignment=assignment)
        samples = [
            sample(i, image=rng.random() < 0.7, sound=rng.random() < 0.5, words=rng.choice([5, 200])) for i in range(16)
        ]
        problem = replace(problem, samples=tuple(samples))
        layout = draw_layout(rng, problem, rng.randint(1, 4))
        evaluation = evaluate(problem, layout_plan(problem, layout))
        bound = LayoutCosts(problem).bound_s(layout, split_backward=False)
        assert bound <= evaluation.result.iteration_time_s * (1 + 1e-9), f"seed {seed}: {layout}"


def test_fixed_part_and_memory_are_those_of_the_simulation():
    problem = small_problem(frozen=(), num_microbatches=6)
    for seed in range(6):
        layout = draw_layout(Random(seed), problem, 3)
        evaluation = evaluate(problem, layout_plan(problem, layout))
        assert LayoutCosts(problem).fixed_s(layout) == pytest.approx(evaluation.costs.fixed_s)
        needed = LayoutCosts(with_memory(problem, 0.0)).excess_bytes(layout)
        assert needed == pytest.approx(max(evaluation.result.peak_memory_bytes), rel=0.5)
        assert LayoutCosts(problem).excess_bytes(layout) == 0


def test_samples_that_lack_a_modality_bring_no_backward_to_a_frozen_language_model():
    """The bound counts a backward only for microbatches that have one."""
    problem = small_problem(frozen=("vision", "audio", "language_model"), encoders=("vision",), num_microbatches=16)
    times = problem.estimator.layer_times("language_model")
    mixed = replace(problem, samples=tuple(sample(i, image=i % 2 == 0, sound=False, words=40) for i in range(16)))
    every = replace(problem, samples=tuple(sample(i, sound=False, words=40) for i in range(16)))
    ratio = (
        mixed.estimator.layer_times("language_model")[3].backward_s
        / every.estimator.layer_times("language_model")[3].backward_s
    )
    assert ratio == pytest.approx(0.5)
    assert times[3].backward_s > 0
    assert times[3].weight_s == 0
