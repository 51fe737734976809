"""The estimator: seconds of layers, what freezing saves and recomputation adds, and the loads of microbatches."""

from dataclasses import fields, replace

import pytest
from small_problem import small_problem

from motet.costs.cost_model import LayerCost, ModuleCosts, Sharing
from motet.plan import ContextOptions


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


def test_layers_of_measured_groups_take_no_more_than_measured():
    """Bounds hold under each method, for groups with cheaper layers and with dearer ones."""
    problem = small_problem()
    table, name = problem.table, "language_model"
    computed = problem.estimator.layer_times(name, cp=2)
    for factor, expected in ((0.01, 0.01), (100.0, 1.0)):
        layers = tuple(
            LayerCost(**{part.name: getattr(layer, part.name).times(factor) for part in fields(LayerCost)})
            for layer in table.of(name, 1).layers
        )
        groups = {name: {Sharing.of(1, 2, ContextOptions(method="ring"), 1): ModuleCosts(layers=layers)}}
        estimator = replace(problem, table=replace(table, groups=groups)).estimator
        times = estimator.layer_times(name, cp=2)
        assert [time.forward_s for time in times] == pytest.approx([expected * time.forward_s for time in computed])
        assert estimator.layer_times(name) == problem.estimator.layer_times(name)


def test_what_a_gathering_group_was_measured_with_is_its_exchange_too():
    problem = small_problem()
    measured = {Sharing.of(1, 2, ContextOptions(), 1): problem.table.of("language_model", 1)}
    estimator = replace(problem, table=replace(problem.table, groups={"language_model": measured})).estimator
    found = estimator.seconds_with_exchange("language_model", 1, 1, cp=2)
    assert found == pytest.approx(estimator.layer_seconds("language_model", cp=2))
    assert sum(found) < sum(problem.estimator.seconds_with_exchange("language_model", 1, 1, cp=2))


def test_typical_load_is_the_mean_over_microbatches():
    problem = small_problem()
    images = sum(sample.has("vision") for sample in problem.samples)
    assert problem.estimator.typical_load("vision").tokens == images * 64 / 4
    assert problem.estimator.typical_load("vision", dp=2).tokens == images * 64 / 8
    assert problem.estimator.typical_load("language_model").incoming == pytest.approx(
        sum(s.num_outputs("vision") + s.num_outputs("audio") for s in problem.samples) / 4
    )
