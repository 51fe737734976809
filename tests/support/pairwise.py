"""Pairwise covering sets: few rows in which every two levels that may meet do meet somewhere.

Most mistakes need two options to meet (Cohen et al. 1997, "The AETG system"), and a covering set of the product of a
dozen options has some tens of rows. Greedy and deterministic; `allowed` may forbid combinations.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Factors = Mapping[str, Sequence[Any]]
Row = dict[str, Any]
Allowed = Callable[[Row], bool]
"""Whether a row is allowed; of a partial one, whether what it has does not forbid it already."""
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairwise_rows(factors: Factors, allowed: Allowed) -> list[Row]:
    """Rows that cover `allowed_pairs(factors, allowed)`, each of them allowed."""
    uncovered = dict.fromkeys(allowed_pairs(factors, allowed))
    rows = []
    while uncovered:
        row = dict(next(iter(uncovered)))
        for name in sorted(set(factors) - set(row)):
            options = [level for level in factors[name] if completed({**row, name: level}, factors, allowed)]
            # Among equals, the level that stands in the fewest rows: so that levels stand in alike many.
            row[name] = max(options, key=lambda level: (_gain(row, name, level, uncovered), -_count(rows, name, level)))
        rows.append({name: row[name] for name in factors})
        for pair in pairs_of(rows[-1]):
            uncovered.pop(pair, None)
    return rows


def allowed_pairs(factors: Factors, allowed: Allowed) -> list[Pair]:
    """Every two levels of two factors that stand together in some allowed row."""
    return [
        ((a, x), (b, y))
        for a, b in combinations(sorted(factors), 2)
        for x in factors[a]
        for y in factors[b]
        if completed({a: x, b: y}, factors, allowed)
    ]


def completed(partial: Row, factors: Factors, allowed: Allowed) -> Row | None:
    """An allowed row that begins like `partial`, None if there is none."""
    if not allowed(partial):
        return None
    name = next((name for name in factors if name not in partial), None)
    if name is None:
        return partial
    candidates = (completed({**partial, name: level}, factors, allowed) for level in factors[name])
    return next((row for row in candidates if row is not None), None)


def pairs_of(row: Row) -> list[Pair]:
    return list(combinations(sorted(row.items()), 2))


def _gain(row: Row, name: str, level: Any, uncovered: Mapping[Pair, None]) -> int:
    return sum(pair in uncovered for pair in pairs_of({**row, name: level}))


def _count(rows: Sequence[Row], name: str, level: Any) -> int:
    return sum(row[name] == level for row in rows)
