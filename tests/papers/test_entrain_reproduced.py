"""Entrain's tables: the statistics behind them, the configurations held out, and the shape of Figure 4.15."""

import numpy as np
import pytest

from motet.planner.entrain.planner import device_seconds
from motet.planner.entrain.profiling_size import proportional_allocation
from motet.planner.evaluate import evaluate
from motet.planner.registry import make_plan
from papers.entrain.tables import (
    NUM_DEVICES,
    NUM_DRAWS,
    PUBLISHED,
    SIZES,
    _passes,
    _probability,
    _seen_probability,
    fit,
    problems,
    sensitivity,
    tables,
)


def draw(rng, mean, spread, size, num_draws):
    shares = rng.normal(mean, spread / size**0.5, num_draws)
    return [proportional_allocation(NUM_DEVICES, (share, NUM_DEVICES - share))[0] for share in shares]


def test_probabilities_are_those_of_draws():
    rng = np.random.default_rng(0)
    drawn = draw(rng, 7.7, 1.0, 4, 4000)
    for count in range(6, 11):
        assert drawn.count(count) / 4000 == pytest.approx(_probability(7.7, 1.0, 4, count, count), abs=0.04)
    seen = [draw(rng, 7.7, 0.5, 4, NUM_DRAWS) for _ in range(400)]
    exactly = sum(min(each) == 7 and max(each) == 8 for each in seen) / 400
    assert exactly == pytest.approx(_seen_probability(7.7, 0.5, 4, 7, 8), abs=0.1)


def test_algorithm_2_behaves_as_printed():
    for key, trials in PUBLISHED.items():
        assert [_passes(*fit(*key), size) for size in SIZES] == [fewest == most for fewest, most in trials.seen]


def test_held_out_configurations():
    rows = {row.what: row for row in tables()[1].rows}
    wrong = [what for what, row in rows.items() if row.ours != row.published]
    assert wrong == ["encoder stages of 8, CocoQA, Llama3-3b"], "the one that contradicts its own table"
    assert all(row.held_out for row in rows.values())


@pytest.mark.parametrize("model", ["1b", "3b"])
def test_figure_4_15_has_one_maximum_where_the_batch_leads(model):
    relative = sensitivity("SynthChartNet", model)
    best = PUBLISHED["SynthChartNet", model].encoder_stages
    stages = sorted(relative)
    assert relative[best] == 1
    assert all(relative[s] < relative[s + 1] for s in stages if s < best)
    assert all(relative[s] > relative[s + 1] for s in stages[:-1] if s >= best)
    assert min(relative.values()) < 0.3


def test_the_problems_are_planned_and_simulate():
    for name, problem in problems():
        plan = make_plan(problem, "entrain")
        evaluation = evaluate(problem, plan)
        assert evaluation.fits, name
        work = [device_seconds(problem, module) for module in problem.modules]
        devices = tuple(sum(len(stage.ranks) for stage in m.replicas[0].stages) for m in plan.modules.values())
        assert all(used <= share for used, share in zip(devices, proportional_allocation(16, work), strict=True))
