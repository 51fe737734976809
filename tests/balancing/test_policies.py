"""Every way to cut a batch, by name, on plans with equal and unequal numbers of replicas."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.assignment.sample import Sample
from motet.balancing.policies import ASSIGNMENTS, assign
from motet.errors import UserError
from motet.plan import Plan
from motet.planner.layouts.layout import build_plan
from motet.planner.problem import Degrees, PlanningProblem
from motet.schedule.routes import derive_routes
from papers.entrain.problems import problem

ONE = problem("1b", num_samples=24)


def plan_of(encoder_dp: int, llm_dp: int, num_microbatches: int = 4) -> Plan:
    degrees = {"vision": Degrees(dp=encoder_dp), "language_model": Degrees(dp=llm_dp, pp=2)}
    return build_plan(replace(ONE, num_microbatches=num_microbatches), degrees)


def assigned(plan: Plan, samples: tuple[Sample, ...], one: PlanningProblem = ONE):
    workloads = {name: module.workload for name, module in one.modules.items()}
    return assign(plan, samples, workloads=workloads, table=one.table)


def without_vision(sample: Sample) -> Sample:
    layouts = {"language_model": tuple(s for s in sample.layouts["language_model"] if s.source is None)}
    return replace(sample, layouts=layouts)


@examples(60)
@given(
    st.sampled_from(sorted(ASSIGNMENTS)),
    st.sampled_from([(1, 1), (2, 2), (2, 3), (4, 1), (1, 5), (3, 1), (4, 2)]),
    st.integers(1, 24),
    st.sets(st.integers(0, 23)),
    st.integers(1, 5),
)
def test_the_batch_stays_the_same_set(
    name: str, replicas: tuple[int, int], num_samples: int, lacking: set[int], num_microbatches: int
) -> None:
    samples = tuple(without_vision(s) if i in lacking else s for i, s in enumerate(ONE.samples[:num_samples]))
    plan = replace(plan_of(*replicas, num_microbatches), assignment=name)
    assignment = assigned(plan, samples)
    assert assignment == assigned(plan, samples)
    for module in plan.modules:
        assert len(assignment.microbatches[module]) == len(plan.modules[module].replicas)
        found = sorted(i for cut in assignment.microbatches[module] for m in cut for i in m)
        assert found == [i for i, sample in enumerate(samples) if sample.has(module)]
    derive_routes(plan, assignment, samples)  # Every token has one producer.


@pytest.mark.parametrize("name", sorted(ASSIGNMENTS))
def test_pipelines_with_more_microbatches_get_more(name: str) -> None:
    plan = replace(plan_of(2, 2), replica_microbatches=(6, 2), assignment=name)
    work = [sum(map(len, replica)) for replica in assigned(plan, ONE.samples).microbatches["language_model"]]
    assert sum(work) == len(ONE.samples)
    assert 2 <= work[0] / work[1] <= 5


def test_language_model_microbatches_stay_within_the_limit_and_encoders_do_not_notice() -> None:
    plan = replace(plan_of(2, 2, 2), assignment="entrain")
    longest = max(sample.num_tokens("language_model") for sample in ONE.samples)
    free, packed = (assigned(replace(plan, max_packed_tokens=limit), ONE.samples) for limit in (None, 2 * longest))
    assert packed.microbatches["vision"] == free.microbatches["vision"]
    tokens = [
        sum(ONE.samples[i].num_tokens("language_model") for i in m)
        for cut in packed.microbatches["language_model"]
        for m in cut
    ]
    assert max(tokens) <= 2 * longest
    assert len(tokens) > sum(map(len, free.microbatches["language_model"]))
    with pytest.raises(UserError, match=rf"max_packed_tokens: is {longest - 1}, but sample .* has {longest} tokens"):
        assigned(replace(plan, max_packed_tokens=longest - 1), ONE.samples)


def test_replicas_of_a_share_have_even_loads() -> None:
    """By their work where it is known, by tokens otherwise."""
    for name, most in (("contiguous", 1.35), ("entrain", 1.35)):
        assignment = assigned(replace(plan_of(1, 3), assignment=name), ONE.samples)
        tokens = [
            sum(ONE.samples[i].num_tokens("language_model") for m in cut for i in m)
            for cut in assignment.microbatches["language_model"]
        ]
        assert max(tokens) < most * min(tokens), name


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(UserError, match="assignment 'best' is not known; known are contiguous, random"):
        assigned(replace(plan_of(1, 1), assignment="best"), ONE.samples)
