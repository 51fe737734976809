from collections.abc import Mapping
from itertools import combinations, product

import pytest
from pairwise import Row, allowed_pairs, completed, pairs_of, pairwise_rows

FACTORS: Mapping[str, tuple] = {"a": (1, 2, 3), "b": "xy", "c": (False, True), "d": (1, 2, 3, 4)}


def anything(row: Row) -> bool:
    return True


def not_2_with_x(row: Row) -> bool:
    return (row.get("a"), row.get("b")) != (2, "x")


@pytest.mark.parametrize("allowed", [anything, not_2_with_x])
def test_rows_are_allowed_and_cover_every_pair_that_some_allowed_row_has(allowed) -> None:
    rows = pairwise_rows(FACTORS, allowed)
    every_row = [dict(zip(FACTORS, levels, strict=True)) for levels in product(*FACTORS.values())]
    expected = {pair for row in every_row if allowed(row) for pair in combinations(sorted(row.items()), 2)}
    assert all(allowed(row) and row.keys() == FACTORS.keys() for row in rows)
    assert {pair for row in rows for pair in pairs_of(row)} == expected
    assert set(allowed_pairs(FACTORS, allowed)) == expected


def test_far_fewer_rows_than_the_product() -> None:
    """3 x 4 pairs of the two largest factors need 12."""
    assert 12 <= len(pairwise_rows(FACTORS, anything)) <= 14


def test_the_same_rows_every_time() -> None:
    assert pairwise_rows(FACTORS, not_2_with_x) == pairwise_rows(FACTORS, not_2_with_x)


def test_a_pair_that_only_a_third_factor_forbids_is_not_asked_for() -> None:
    """(1, x) needs c to be False and d to be 4 forbids that, so (1, x, 4) has no row, but (1, x) has."""

    def allowed(row: Row) -> bool:
        needs = (row.get("a"), row.get("b")) == (1, "x")
        return not (needs and row.get("c") is True) and not (row.get("d") == 4 and row.get("c") is False)

    assert completed({"a": 1, "b": "x", "d": 4}, FACTORS, allowed) is None
    assert completed({"a": 1, "b": "x"}, FACTORS, allowed) is not None
    rows = pairwise_rows(FACTORS, allowed)
    assert all(allowed(row) for row in rows)
    assert set(allowed_pairs(FACTORS, allowed)) == {pair for row in rows for pair in pairs_of(row)} & set(
        allowed_pairs(FACTORS, allowed)
    )
