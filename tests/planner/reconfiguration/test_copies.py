"""Copies between tensor-parallel shards, carried out on arrays that are cut in another way (numpy's splits)."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sampling import examples

from motet.parallel.tensor.tensor_plans import Shard, local_ranges
from motet.planner.reconfiguration.copies import plan_copies

LENGTH = 24
SECTIONS = {"query": (1,), "fused": (2, 1, 1), "gate": (1, 1)}
"""Of each tensor; every one is LENGTH long, and its numbers say where they lie."""
UNIT_BYTES = {"query": 3.0, "fused": 1.0, "gate": 2.5}

Cut = tuple[int, int]
"""(rank of the shard, number of shards)."""
cuts = st.sampled_from([1, 2, 3]).flatmap(lambda size: st.tuples(st.integers(0, size - 1), st.just(size)))
everyone = st.lists(st.dictionaries(st.sampled_from(sorted(SECTIONS)), cuts), min_size=1, max_size=6)


def local(name: str, cut: Cut) -> NDArray[np.int64]:
    """What a rank has: the places in the whole."""
    sizes = np.array(SECTIONS[name]) * LENGTH // sum(SECTIONS[name])
    sections = np.split(np.arange(LENGTH), np.cumsum(sizes)[:-1])
    return np.concatenate([np.split(section, cut[1])[cut[0]] for section in sections])


def ranges(name: str, cut: Cut) -> tuple[tuple[int, int], ...]:
    return tuple(local_ranges(LENGTH, Shard(0, SECTIONS[name]), *cut))


@examples(300)
@given(everyone, everyone, st.integers(1, 3))
def test_every_rank_gets_what_it_lacks(held: list[dict[str, Cut]], needed: list[dict[str, Cut]], size: int) -> None:
    made, missing = plan_copies(
        {rank: {name: ranges(name, cut) for name, cut in parts.items()} for rank, parts in enumerate(held)},
        {rank: {name: ranges(name, cut) for name, cut in parts.items()} for rank, parts in enumerate(needed)},
        UNIT_BYTES,
        devices_per_node=size,
    )
    there = {(rank, name): set(local(name, cut)) for rank, parts in enumerate(held) for name, cut in parts.items()}

    def holders(name: str, place: int) -> set[int]:
        return {rank for rank, of in there if of == name and place in there[rank, name]}

    filled = {
        (rank, name): np.full_like(local(name, cut), -1)
        for rank, parts in enumerate(needed)
        for name, cut in parts.items()
    }
    for copy in made:
        source = local(copy.name, held[copy.source][copy.name])
        values = source[copy.source_start : copy.source_start + copy.length]
        assert values.tolist() == list(range(copy.start, copy.start + copy.length))
        place = filled[copy.target, copy.name][copy.target_start : copy.target_start + copy.length]
        assert (place == -1).all(), "something is sent twice, or beyond the end"
        place[:] = values
        assert copy.num_bytes == UNIT_BYTES[copy.name] * copy.length
        for value in values.tolist():
            having = holders(copy.name, value)
            near = {rank for rank in having if rank // size == copy.target // size}
            assert copy.source == copy.target or copy.target not in having, "what is in place is moved"
            assert copy.source in (near or having), "from another node, but the own one has it"
    lacking = set()
    for (rank, name), values in filled.items():
        wanted = local(name, needed[rank][name])
        nowhere = np.array([not holders(name, place) for place in wanted.tolist()])
        assert (values == np.where(nowhere, -1, wanted)).all()
        lacking |= {name} if nowhere.any() else set()
    assert set(missing) == lacking
    assert len(missing) == len(lacking)


def test_holders_of_other_nodes_share_the_sending() -> None:
    """Three ranks have all, three others nothing; and a rank that another of its node can serve asks no other node."""
    whole, half = ((0, LENGTH),), ((0, LENGTH // 2),)
    names = ["query", "fused", "gate"]
    unit = dict.fromkeys(names, 1.0)
    made, _ = plan_copies(
        {rank: dict.fromkeys(names, whole) for rank in range(3)},
        {rank: dict.fromkeys(names, whole) for rank in (3, 4, 5)},
        unit,
        devices_per_node=3,
    )
    assert Counter(copy.source for copy in made) == {0: 3, 1: 3, 2: 3}
    held = {0: {"query": whole}, 2: {"query": half}, 3: {}}
    made, _ = plan_copies(held, {3: {"query": whole}}, unit, devices_per_node=2)
    assert {(copy.source, copy.start, copy.length) for copy in made} == {(2, 0, 12), (0, 12, 12)}
