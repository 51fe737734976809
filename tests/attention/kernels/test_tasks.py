"""Tasks cover every non-empty tile once, and shared-out blocks evenly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.attention.kernels.device_mask import TileMap, make_tasks


@st.composite
def tile_maps(draw: st.DrawFn) -> tuple[np.ndarray, TileMap]:
    """A map of kinds (0 empty, 1 partial, 2 full) and the same as rows of tiles."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    kinds = np.array(draw(st.lists(st.integers(0, 2), min_size=rows * columns, max_size=rows * columns)))
    kinds = kinds.reshape(rows, columns)
    found = [[c for c in range(columns) if kinds[r, c]] for r in range(rows)]
    offsets = np.cumsum([0, *map(len, found)]).astype(np.int32)
    blocks = np.array([c for row in found for c in row], np.int32)
    is_full = np.array([kinds[r, c] == 2 for r, row in enumerate(found) for c in row], bool)
    return kinds, TileMap(offsets, blocks, is_full)


@given(st.lists(tile_maps(), min_size=1, max_size=3), st.none() | st.integers(1, 4))
def test_every_tile_is_visited_once(drawn: list[tuple[np.ndarray, TileMap]], max_tiles: int | None) -> None:
    made = make_tasks([tile_map for _, tile_map in drawn], max_tiles)
    visits = [np.zeros_like(kinds) for kinds, _ in drawn]
    lengths = []
    for batch, block, first, first_partial, last, _ in made.tasks.tolist():
        lengths.append(last - first)
        for place in range(first, last):
            column = made.tiles[place]
            visits[batch][block, column] += 1
            assert (drawn[batch][0][block, column] == 2) == (place < first_partial)
    for (kinds, _), visited in zip(drawn, visits, strict=True):
        assert ((kinds > 0) == visited).all()
    assert lengths == sorted(lengths, reverse=True)
    assert max_tiles is None or max(lengths) <= max_tiles


@given(st.lists(tile_maps(), min_size=1, max_size=3), st.integers(1, 4))
def test_slots_of_a_block_stand_together_and_are_even(drawn: list[tuple[np.ndarray, TileMap]], max_tiles: int) -> None:
    made = make_tasks([tile_map for _, tile_map in drawn], max_tiles)
    slots = {
        slot: (batch, block, last - first) for batch, block, first, _, last, slot in made.tasks.tolist() if slot >= 0
    }
    assert sorted(slots) == list(range(made.num_slots))
    for batch, block, first, last in made.split_blocks.tolist():
        assert last - first > 1
        sizes = [slots[slot][2] for slot in range(first, last)]
        assert {slots[slot][:2] for slot in range(first, last)} == {(batch, block)}
        assert max(sizes) - min(sizes) <= 1


@given(tile_maps())
def test_transposed(drawn: tuple[np.ndarray, TileMap]) -> None:
    kinds, tile_map = drawn
    turned = tile_map.transposed(kinds.shape[1])
    back = np.zeros_like(kinds.T)
    for row in range(kinds.shape[1]):
        for place in range(turned.offsets[row], turned.offsets[row + 1]):
            back[row, turned.blocks[place]] = 2 if turned.is_full[place] else 1
    assert (back == kinds.T).all()


def test_refuses_tasks_of_no_tiles() -> None:
    with pytest.raises(ValueError, match="max_tiles must be at least 1, not 0"):
        make_tasks([], 0)
