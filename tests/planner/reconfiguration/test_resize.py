"""Nodes that join are used as far as there are templates and microbatches for them."""

from collections.abc import Sequence
from math import inf

from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.planner.reconfiguration.reconfigure import resize_pipelines


def spares(sizes: Sequence[int], num_joined: int, *, fewest: int, most: int, most_pipelines: int) -> int:
    """Of pipelines of these sizes and nodes that join them; the estimate knows the number of pipelines alone."""
    after, _, spare = resize_pipelines(
        sizes,
        sizes,
        num_joined,
        fewest=fewest,
        most=most,
        num_needed=1,
        estimate=lambda sizes: 1 / sum(sizes) if len(sizes) <= most_pipelines else inf,
    )
    assert len(sizes) <= len(after) <= most_pipelines
    assert all(fewest <= size <= most for size in after.values())
    assert sum(after.values()) + spare == sum(sizes) + num_joined
    return spare


@examples(300)
@given(st.data())
def test_no_fewer_nodes_can_wait(data: st.DataObject) -> None:
    """With any number of pipelines from those there are to one for each microbatch."""
    fewest = data.draw(st.integers(1, 4), label="fewest")
    most = data.draw(st.integers(fewest, fewest + 4), label="most")
    sizes = data.draw(st.lists(st.integers(fewest, most), min_size=1, max_size=4), label="sizes")
    num_joined = data.draw(st.integers(0, 12), label="joined")
    most_pipelines = data.draw(st.integers(len(sizes), len(sizes) + 4), label="most pipelines")
    total = sum(sizes) + num_joined
    used = max(
        min(total, num_pipelines * most)
        for num_pipelines in range(len(sizes), most_pipelines + 1)
        if num_pipelines * fewest <= total
    )
    assert spares(sizes, num_joined, fewest=fewest, most=most, most_pipelines=most_pipelines) == total - used


def test_one_pipeline_for_each_microbatch() -> None:
    assert spares([1, 1], 1, fewest=1, most=1, most_pipelines=2) == 1
    assert spares([1, 1], 1, fewest=1, most=1, most_pipelines=3) == 0
    # Nor by borrowing.
    assert spares([4, 4], 1, fewest=3, most=4, most_pipelines=2) == 1
    assert spares([4, 4], 1, fewest=3, most=4, most_pipelines=3) == 0
