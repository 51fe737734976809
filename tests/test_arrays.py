import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from motet.ragged_arrays import Rows, ranges, rows_of, stacked, starts_of

TABLE = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6)


def rows(lists: list[list[int]]) -> Rows:
    values = [value for row in lists for value in row]
    return Rows(starts_of(np.array([len(row) for row in lists], dtype=np.int64)), np.array(values, dtype=np.int64))


@given(TABLE)
def test_rows_give_back_what_was_put_in(lists: list[list[int]]) -> None:
    table = rows(lists)
    assert table.to_lists() == [table[i].tolist() for i in range(len(table))] == lists


@given(TABLE, TABLE, st.data())
def test_tables_of_rows(lists: list[list[int]], others: list[list[int]], data: st.DataObject) -> None:
    assert stacked([rows(lists), rows(others)]).to_lists() == lists + others
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=10, max_size=10)))
    assert rows(lists).where(keep).to_lists() == [[value for value in row if keep[value]] for row in lists]
    chosen = data.draw(st.lists(st.integers(0, len(lists) - 1))) if lists else []
    assert rows(lists).selected(np.array(chosen, dtype=np.int64)).to_lists() == [lists[i] for i in chosen]
    pairs = list(zip(lists, others, strict=False))
    left, right = rows([a for a, _ in pairs]), rows([b for _, b in pairs])
    assert left.joined(right).to_lists() == [a + b for a, b in pairs]


@given(st.lists(st.tuples(st.integers(-3, 20), st.integers(0, 4))))
def test_ranges(runs: list[tuple[int, int]]) -> None:
    first, lengths = (np.array([run[i] for run in runs], dtype=np.int64) for i in (0, 1))
    assert ranges(first, lengths).tolist() == [i for begin, length in runs for i in range(begin, begin + length)]


@given(st.lists(st.integers(0, 4)))
def test_rows_of_owners(owners: list[int]) -> None:
    expected = [[i for i, owner in enumerate(owners) if owner == row] for row in range(5)]
    assert rows_of(np.array(owners, dtype=np.int64), 5).to_lists() == expected
