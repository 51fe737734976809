"""What each baseline's plan looks like."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_problem import small_problem

from motet.planner.baselines import shares
from motet.planner.registry import make_plan


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(1, 40))
def test_shares_add_up_and_stay_within_one_of_the_proportion_where_nothing_is_rounded_up_to_1(weights, total):
    named = {str(i): weight for i, weight in enumerate(weights)}
    result = shares(named, total)
    if len(weights) > total:
        assert result is None
        return
    assert sum(result.values()) == total
    assert min(result.values()) >= 1
    exact = {name: total * weight / sum(weights) for name, weight in named.items()}
    if min(exact.values()) >= 1:
        assert all(abs(result[name] - exact[name]) <= 1 for name in result)


def test_proportional_gives_the_larger_module_more():
    problem = small_problem(num_devices=8, frozen=())
    plan = make_plan(problem, "proportional")
    counts = {name: len(module.replicas[0].stages) for name, module in plan.modules.items()}
    assert sum(counts.values()) == 8
    assert counts["language_model"] > counts["audio"]


def test_colocated_encoders_have_equally_many_stages_on_the_same_ranks():
    plan = make_plan(small_problem(num_devices=6), "encoders_colocated")
    ranks = [[stage.ranks for stage in plan.modules[n].replicas[0].stages] for n in ("vision", "audio")]
    assert ranks[0] == ranks[1]


def test_encoders_are_on_every_stage():
    plan = make_plan(small_problem(num_devices=3), "encoders_replicated")
    held = {rank: {plan.modules[name].data_module(name) for name, *_ in plan.stages_of_rank(rank)} for rank in range(3)}
    assert all({"vision", "audio"} <= modules for modules in held.values())


@pytest.mark.parametrize("planner", ["encoders_colocated", "encoders_replicated"])
def test_what_is_about_encoders_needs_one(planner):
    with pytest.raises(ValueError, match="needs an encoder"):
        make_plan(small_problem(encoders=()), planner)
