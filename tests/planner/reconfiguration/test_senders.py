"""Against all choices of senders."""

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.planner.reconfiguration.copies import balanced_sources


@examples(60)
@given(st.data())
def test_equal_pieces_are_sent_as_evenly_as_can_be(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    holders = data.draw(
        st.lists(st.sets(st.integers(0, num_ranks - 1), min_size=1).map(sorted), min_size=1, max_size=7)
    )
    sources = balanced_sources([1.0] * len(holders), holders, num_ranks=num_ranks)
    assert all(source in options for source, options in zip(sources, holders, strict=True))
    best = min(max(Counter(choice).values()) for choice in product(*holders))
    assert max(Counter(sources).values()) == best
