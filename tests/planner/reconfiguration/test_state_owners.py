"""Whatever nodes are lost a keeper is left, those who keep keep equally much, and little moves."""

from collections import Counter
from itertools import combinations
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from motet.planner.reconfiguration.state_owners import SLACK, ParameterReplica, StateOwners, choose_state_owners

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=25)


def pipelines(draw: st.DrawFn, num_pipelines: int) -> dict[str, list[ParameterReplica]]:
    """Parameters that each pipeline holds somewhere: on one rank, on several alone, or in a group of two."""
    holders: dict[str, list[ParameterReplica]] = {}
    for i, size in enumerate(draw(SIZES)):
        of_name = []
        for pipeline in range(num_pipelines):
            first = 10 * pipeline + draw(st.integers(0, 3))
            how = draw(st.sampled_from(["one", "two alone", "group"]))
            groups = {"one": [(first,)], "two alone": [(first,), (first + 1,)], "group": [(first, first + 1)]}[how]
            for ranks in groups:
                lacking = draw(st.sampled_from([0, size]))
                of_name.append(
                    ParameterReplica(ranks=ranks, pipeline=pipeline, num_bytes=size / len(ranks), lacking_bytes=lacking)
                )
        holders[f"p{i}"] = of_name
    return holders


def load_of(keepers: StateOwners) -> Counter[int]:
    load: Counter[int] = Counter()
    for of_name in keepers.values():
        for keeper in of_name:
            for rank in keeper.ranks:
                load[rank] += keeper.num_bytes
    return load


@given(data=st.data(), num_pipelines=st.integers(1, 5), failures=st.integers(0, 3), seed=st.integers(0, 99))
def test_any_losses_leave_a_keeper_and_everyone_chooses_alike(
    data: st.DataObject, num_pipelines: int, failures: int, seed: int
) -> None:
    holders = data.draw(st.composite(pipelines)(num_pipelines))
    keepers = choose_state_owners(holders, failures + 1)
    assert keepers.keys() == holders.keys()
    for name, of_name in keepers.items():
        assert len(of_name) == min(failures + 1, num_pipelines)
        assert set(of_name) <= set(holders[name])
        for lost in combinations(range(num_pipelines), min(failures, num_pipelines - 1)):
            # A node is of one pipeline, so `failures` nodes take at most as many pipelines along.
            assert any(keeper.pipeline not in lost for keeper in of_name)
    shuffled = {
        name: Random(seed).sample(holders[name], k=len(holders[name]))
        for name in Random(seed).sample(sorted(holders), k=len(holders))
    }
    assert choose_state_owners(shuffled, failures + 1) == keepers


@given(
    sizes=SIZES, num_pipelines=st.integers(2, 6), number=st.integers(1, 4), holding=st.lists(st.booleans(), min_size=6)
)
def test_equal_pipelines_keep_equally_much(
    sizes: list[int], num_pipelines: int, number: int, holding: list[bool]
) -> None:
    """Also where some have everything already and others nothing: up to one parameter, and `SLACK`."""
    keepers = choose_state_owners(
        {
            f"p{i}": [
                ParameterReplica(ranks=(r,), pipeline=r, num_bytes=size, lacking_bytes=0 if holding[r] else size)
                for r in range(num_pipelines)
            ]
            for i, size in enumerate(sizes)
        },
        number,
    )
    load = load_of(keepers)
    everyone = [load[rank] for rank in range(num_pipelines)]
    assert max(everyone) <= SLACK * (min(everyone) + max(sizes))
    assert sum(everyone) == min(number, num_pipelines) * sum(sizes)


@given(sizes=SIZES, num_pipelines=st.integers(2, 5), number=st.integers(1, 4))
def test_who_keeps_goes_on(sizes: list[int], num_pipelines: int, number: int) -> None:
    """What was chosen, and is in place then, is chosen again."""

    def holders(kept: StateOwners) -> dict[str, list[ParameterReplica]]:
        in_place = {(name, keeper.ranks) for name, of_name in kept.items() for keeper in of_name}
        return {
            f"p{i}": [
                ParameterReplica(
                    ranks=(r,), pipeline=r, num_bytes=size, lacking_bytes=0 if (f"p{i}", (r,)) in in_place else size
                )
                for r in range(num_pipelines)
            ]
            for i, size in enumerate(sizes)
        }

    first = choose_state_owners(holders({}), number)
    again = choose_state_owners(holders(first), number)
    assert {name: {k.ranks for k in of_name} for name, of_name in first.items()} == {
        name: {k.ranks for k in of_name} for name, of_name in again.items()
    }


def test_who_joins_takes_over_a_share() -> None:
    """Two pipelines keep all of twelve parameters, and two join: half of it moves, and each keeps a half."""
    names = [f"p{i:02}" for i in range(12)]
    keepers = choose_state_owners(
        {
            name: [
                ParameterReplica(ranks=(r,), pipeline=r, num_bytes=10, lacking_bytes=0 if r < 2 else 10)
                for r in range(4)
            ]
            for name in names
        },
        2,
    )
    load = load_of(keepers)
    assert max(load.values()) <= 70
    moved = sum(keeper.lacking_bytes for of_name in keepers.values() for keeper in of_name)
    assert 100 <= moved <= 120
