from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import language_model, module, replica, samples

from motet.balancing.entrain import (
    ReplicaRule,
    by_encoder_then_llm,
    defer,
    deferring_assignment,
    effective_microbatches,
    evenly_on_both,
    plan_deferrals,
    stratified_microbatches,
)
from motet.plan import Edge, Plan
from motet.ragged_arrays import Floats
from motet.schedule.routes import derive_routes

works = st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 50)), min_size=1, max_size=7)


def columns(pairs: list[tuple[float, float]]) -> tuple[Floats, Floats]:
    return np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])


def least_largest(works: list[Floats], num_groups: int) -> float:
    """Over all partitions, the least of the largest sum of any of the works."""
    best = np.inf
    for groups in product(range(num_groups), repeat=len(works[0])):
        loads = [np.bincount(groups, work, num_groups).max() for work in works]
        best = min(best, max(loads))
    return float(best)


def largest(work: Floats, groups: list[list[int]]) -> float:
    return max(float(work[group].sum()) for group in groups)


@given(works, st.integers(1, 3))
def test_encoder_work_is_a_list_schedule(pairs: list[tuple[float, float]], num_microbatches: int) -> None:
    """Graham's bound, which the thesis claims in 4.5.1."""
    encoder, llm = columns(pairs)
    groups = stratified_microbatches(encoder, llm, num_microbatches)
    assert sorted(i for group in groups for i in group) == list(range(len(pairs)))
    best = least_largest([encoder], num_microbatches)
    assert largest(encoder, groups) <= best * (2 - 1 / num_microbatches) + 1e-9


def test_fine_samples_come_last_and_reach_every_microbatch() -> None:
    llm = np.array([9.0, 9, 9, 9, 1, 1, 1, 1])
    groups = stratified_microbatches(np.ones(8), llm, 4)
    assert sorted(llm[group].tolist() for group in groups) == [[9, 1]] * 4


def test_without_encoder_work_llm_work_is_balanced() -> None:
    llm = np.array([4.0, 3, 3, 2])
    groups = stratified_microbatches(np.zeros(4), llm, 2)
    assert [llm[group].sum() for group in groups] == [6, 6]


@pytest.mark.parametrize(
    ("work", "expected"),
    [([1.0] * 8, 4), ([0.1] * 3, 3), ([6, 2, 2, 2], 2), ([0.0, 0.0], 4), ([0.0, 5.0], 1), ([], 4)],
)
def test_a_sample_that_outweighs_others_leaves_fewer_microbatches(work: list[float], expected: int) -> None:
    assert effective_microbatches(np.array(work), 4) == expected


@given(works, st.integers(1, 3))
def test_the_thesis_replica_rule_is_a_list_schedule_of_llm_work(
    pairs: list[tuple[float, float]], num_replicas: int
) -> None:
    encoder, llm = columns(pairs)
    groups = by_encoder_then_llm(encoder, llm, num_replicas)
    assert sorted(i for group in groups for i in group) == list(range(len(pairs)))
    assert largest(llm, groups) <= least_largest([llm], num_replicas) * (2 - 1 / num_replicas) + 1e-9


@given(works, st.integers(1, 3))
def test_both_works_are_balanced_over_replicas(pairs: list[tuple[float, float]], num_replicas: int) -> None:
    """The bound of greedy assignment in two dimensions; the benchmark tells how near it comes."""
    encoder, llm = (work / (work.sum() or 1.0) for work in columns(pairs))
    groups = evenly_on_both(encoder, llm, num_replicas)
    assert sorted(i for group in groups for i in group) == list(range(len(pairs)))
    found = max(largest(encoder, groups), largest(llm, groups))
    assert found <= 3 * least_largest([encoder, llm], num_replicas) + 1e-9


def test_both_rules_fill_replicas_evenly() -> None:
    encoder, llm = np.array([4.0, 4, 1, 1]), np.array([1.0, 4, 4, 1])
    assert sorted(map(sorted, evenly_on_both(encoder, llm, 2))) == [[0, 2], [1, 3]]


@given(works, st.integers(1, 6), st.booleans())
def test_deferral_moves_llm_work_to_the_next_microbatch_only(
    pairs: list[tuple[float, float]], num_microbatches: int, fewer: bool
) -> None:
    encoder, llm = columns(pairs)
    members = [i for i in range(len(pairs)) if i % 3 != 1]
    found = defer(members, encoder, llm, num_microbatches, fewer=fewer)
    assert sorted(i for m in found.encoder for i in m) == members
    assert sorted(i for m in found.language_model for i in m) == members
    assert sorted(i for piece in found.encoder_pieces for i in piece) == members
    at_encoder = {i: at for at, m in enumerate(found.encoder) for i in m}
    for at, microbatch in enumerate(found.language_model):
        for i in microbatch:
            assert at - at_encoder[i] == (i in found.deferred[at_encoder[i]])
    assert all(not late for late in found.deferred[1::2]), "only the first of a pair defers"
    llm_before = max((llm[list(m)].sum() for m in found.encoder), default=0.0)
    assert max((llm[list(m)].sum() for m in found.language_model), default=0.0) <= llm_before + 1e-9


def test_the_heaviest_pair_is_in_the_middle() -> None:
    work = np.array([9.0, 9, 1, 1, 1, 1, 2, 2])
    found = defer(range(8), work, work, 8)
    sums = [sum(work[i] for m in found.encoder[k : k + 2] for i in m) for k in range(0, 8, 2)]
    top = sums.index(max(sums))
    assert 0 < top < 3
    assert sums == [*sorted(sums[:top]), max(sums), *sorted(sums[top + 1 :], reverse=True)]


def two_replicas(num_llm_replicas: int = 2) -> Plan:
    return Plan(
        modules={
            "vision": module(replica(0), replica(1)),
            "llm": language_model(*(replica(2 + r) for r in range(num_llm_replicas))),
        },
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=4,
    )


@pytest.mark.parametrize("rule", [by_encoder_then_llm, evenly_on_both])
def test_the_batch_stays_the_same_set(rule: ReplicaRule) -> None:
    batch = [*samples(9, ["vision", "llm"]), *samples(3, ["llm"])]
    rng = np.random.default_rng(0)
    has_vision = np.array([sample.has("vision") for sample in batch])
    work = {"vision": rng.lognormal(0, 1, 12) * has_vision, "llm": rng.lognormal(0, 1, 12)}
    deferrals = plan_deferrals(two_replicas(), work, replica_rule=rule)
    assignment = deferring_assignment(two_replicas(), batch, deferrals, work)
    for name, expected in (("vision", list(range(9))), ("llm", list(range(12)))):
        assert sorted(i for cut in assignment.microbatches[name] for m in cut for i in m) == expected
    derive_routes(two_replicas(), assignment, batch)  # Every token has one producer.
