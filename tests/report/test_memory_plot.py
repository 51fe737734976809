from pathlib import Path

import numpy as np
import pytest

from motet.report.pictures import MAX_LINES, plot_memory, save_memory
from motet.timeline import MemoryCurve

GIB = 2**30


def curve(*held: int) -> MemoryCurve:
    return MemoryCurve(np.arange(len(held), dtype=float), np.array(held, dtype=np.int64) * GIB)


def lines(curves: list[MemoryCurve], limit_bytes: float | None = None) -> dict[str, list[float]]:
    axis = plot_memory({"predicted": curves}, limit_bytes=limit_bytes).axes[0]
    return {str(line.get_label()): list(line.get_ydata()) for line in axis.get_lines()}  # type: ignore[arg-type]


def test_each_rank_has_its_line() -> None:
    assert lines([curve(1, 3, 2), curve(1, 1)]) == {"rank 0": [1, 3, 2], "rank 1": [1, 1]}


def test_ranks_that_share_a_curve_share_a_line() -> None:
    shared = curve(2, 1)
    assert lines([shared, curve(1), curve(2, 1)]) == {"rank 0 and 1 alike": [2, 1], "rank 1": [1]}


def test_of_many_those_that_hold_most_are_drawn() -> None:
    drawn = lines([curve(i) for i in range(1, 30)])
    assert list(drawn) == [f"rank {i}" for i in range(29 - MAX_LINES, 29)]


@pytest.mark.parametrize(("limit", "is_drawn"), [(5 * GIB, True), (50 * GIB, False)])
def test_the_limit_is_drawn_where_it_is_near(limit: float, is_drawn: bool) -> None:
    assert ("limit" in lines([curve(1, 4)], limit)) == is_drawn


def test_the_picture_is_written(tmp_path: Path) -> None:
    for suffix in ("svg", "png"):
        save_memory({"predicted": [curve(1, 2)]}, tmp_path / f"memory.{suffix}")
        assert (tmp_path / f"memory.{suffix}").stat().st_size > 1000
