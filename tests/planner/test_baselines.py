"""What each baseline's plan looks like, and FSDP's closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_problem import small_problem

from motet.planner import make_plan
from motet.planner.baselines import fsdp_iteration_s, fsdp_memory_bytes, shares


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


def test_fsdp_is_a_replica_per_device_and_needs_as_many_samples():
    plan = make_plan(small_problem(num_devices=5, dp_sizes=(1, 5)), "fsdp")
    assert all(len(module.replicas) == 5 for module in plan.modules.values())
    with pytest.raises(ValueError, match="fsdp needs a sample for each of 17 devices"):
        make_plan(small_problem(num_devices=17, dp_sizes=(17,)), "fsdp")
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
