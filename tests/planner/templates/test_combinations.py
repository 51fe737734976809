"""Appendix A's guarantee, coin change, and the best combination against all combinations."""

from itertools import combinations_with_replacement, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.errors import UserError
from motet.planner.templates.pipelines import (
    Template,
    best_combination,
    best_combinations,
    combination_s,
    combinations,
    iteration_s,
    min_max_counts,
    num_combinations,
    recommended_batch,
    template_sizes,
    unreachable_totals,
)
from papers.oobleck.microbatch_variance import least_variance_counts, variance


@given(st.integers(1, 8), st.integers(0, 4), st.integers(0, 30))
def test_every_number_of_nodes_has_a_combination(fewest: int, failures: int, more: int) -> None:
    """Theorem 1, also where there are fewer templates than n0 - 1, which appendix A refuses."""
    num_nodes = (failures + 1) * fewest + more
    sizes = template_sizes(num_nodes, failures, fewest)
    assert sizes[-1] == num_nodes - failures * fewest
    assert unreachable_totals(sizes, num_nodes, failures) == []
    for n in range((failures + 1) * fewest, num_nodes + 1):
        assert num_combinations(sizes, n, failures + 1) > 0
    if failures:
        assert num_combinations(sizes, (failures + 1) * fewest - 1, failures + 1) == 0


def test_a_gap_is_found() -> None:
    assert unreachable_totals(range(3, 5), 12, 0) == [5]
    assert unreachable_totals(range(4, 5), 9, 1) == [9]


def test_too_few_nodes() -> None:
    with pytest.raises(UserError, match="5 nodes are too few to survive 2 failures: 3 pipelines of at least 2 nodes"):
        template_sizes(5, 2, 2)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 14), st.integers(1, 4))
def test_combinations_are_all(fewest: int, num_sizes: int, num_nodes: int, least: int) -> None:
    sizes = range(fewest, fewest + num_sizes)
    expected = (
        {
            chosen
            for k in range(least, num_nodes + 1)
            for chosen in combinations_with_replacement(sizes, k)
            if sum(chosen) == num_nodes
        }
        if num_nodes <= 10
        else set(combinations(sizes, num_nodes, least))
    )
    assert sorted(combinations(sizes, num_nodes, least)) == sorted(expected)
    assert num_combinations(sizes, num_nodes, least) == len(expected)


def test_the_number_of_combinations_of_a_large_cluster() -> None:
    assert num_combinations(template_sizes(256, 0, 8), 256, 1) > 6e9


def draw_templates(random: Random, sizes: range) -> dict[int, Template]:
    templates = {}
    for n in sizes:
        slowest_s = random.choice([1.0, random.uniform(0.5, 2)]) / n
        templates[n] = Template(
            num_nodes=n, replicas={}, fill_s=slowest_s * random.uniform(1, 2 * n), slowest_s=slowest_s
        )
    return templates


@examples(150)
@given(st.integers(0, 2**32))
def test_no_combination_is_faster(seed: int) -> None:
    random = Random(seed)
    failures, fewest = random.randint(0, 2), random.randint(1, 3)
    sizes = range(fewest, fewest + random.randint(1, 5))
    templates = draw_templates(random, sizes)
    num_nodes, total = random.randint(fewest, 12), random.randint(1, 20)
    fitting = [c for c in combinations(sizes, num_nodes, failures + 1) if len(c) <= total]
    found = best_combination(templates, num_nodes, failures, total)
    if not fitting:
        assert found is None
        with pytest.raises(UserError):
            best_combinations(templates, num_nodes, failures, total, most=3)
        return
    assert found in fitting
    expected = min(combination_s(templates, each, total) for each in fitting)
    assert combination_s(templates, found, total) == pytest.approx(expected, rel=1e-9)
    listed = best_combinations(templates, num_nodes, failures, total, most=3)
    assert combination_s(templates, listed[0], total) == pytest.approx(expected, rel=1e-9)


def test_one_microbatch_is_for_one_pipeline() -> None:
    templates = draw_templates(Random(1), range(2, 6))
    assert best_combination(templates, 5, 0, 1) == (5,)


def test_billions_of_combinations_are_not_written_down() -> None:
    sizes = template_sizes(256, 1, 8)
    templates = draw_templates(Random(3), sizes)
    (found,) = best_combinations(templates, 256, 1, 1024, most=8)
    assert sum(found) == 256
    assert len(found) >= 2
    for other in ((8,) * 32, (128, 128), (8, 248)):
        assert combination_s(templates, found, 1024) <= combination_s(templates, other, 1024) * (1 + 1e-9)


def counts_of(total: int, num: int) -> list[tuple[int, ...]]:
    return [counts for counts in product(range(1, total + 1), repeat=num) if sum(counts) == total]


@examples(150)
@given(st.integers(0, 2**32))
def test_no_counts_are_better(seed: int) -> None:
    random = Random(seed)
    templates = [draw_templates(random, range(1, 6))[random.randint(1, 5)] for _ in range(random.randint(1, 3))]
    total = random.randint(len(templates), 14)
    every = counts_of(total, len(templates))
    by_time, by_variance = min_max_counts(templates, total), least_variance_counts(templates, total)
    assert iteration_s(templates, by_time) == pytest.approx(min(iteration_s(templates, c) for c in every))
    assert variance(templates, by_variance) == pytest.approx(
        min(variance(templates, c) for c in every), rel=1e-9, abs=1e-12
    )


def test_too_few_microbatches() -> None:
    templates = list(draw_templates(Random(0), range(1, 4)).values())
    for counts in (min_max_counts, least_variance_counts):
        with pytest.raises(UserError, match="2 microbatches cannot be divided among 3 pipelines; give at least 3"):
            counts(templates, 2)


def test_the_recommended_batch_can_be_divided() -> None:
    assert [recommended_batch(size, 8) for size in (1, 11, 12, 13, 64)] == [8, 8, 16, 16, 64]
