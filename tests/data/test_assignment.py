from hypothesis import given
from hypothesis import strategies as st
from plans import language_model, module, replica, samples

from motet.data.assignment import contiguous_assignment, split_evenly
from motet.plan import Edge, Plan


def test_parts_differ_by_one_at_most() -> None:
    assert split_evenly(range(7), 3) == ((0, 1, 2), (3, 4), (5, 6))
    assert split_evenly([], 2) == ((), ())
    assert split_evenly([4], 3) == ((4,), (), ())


@given(st.lists(st.integers(), max_size=40), st.integers(1, 12))
def test_parts_are_the_whole_in_order(items: list[int], num_parts: int) -> None:
    parts = split_evenly(items, num_parts)
    assert len(parts) == num_parts
    assert [item for part in parts for item in part] == items
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


PLAN = Plan(
    modules={
        "vision": module(replica(0)),
        "vision@1": module(replica(1), copy_of="vision"),
        "llm": language_model(replica(1), replica(2)),
    },
    edges=(Edge(source="vision", target="llm"),),
    num_microbatches=2,
)


def test_replicas_get_contiguous_shares() -> None:
    plan = Plan(modules={"llm": language_model(replica(0), replica(1))}, edges=(), num_microbatches=2)
    assignment = contiguous_assignment(plan, samples(8, ["llm"]))
    assert assignment.microbatches["llm"] == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert assignment.samples_of("llm", 1, 0) == (4, 5)


def test_unequal_numbers_of_replicas_take_turns_and_need_only_microbatches_of_their_own_number() -> None:
    assignment = contiguous_assignment(PLAN, samples(8, ["vision", "llm"]))
    assert assignment.microbatches["llm"] == (((0, 2), (4, 6)), ((1, 3), (5, 7)))
    assert assignment.microbatches["vision"] == (((0, 1, 2, 3), (4, 5, 6, 7)),)


def test_samples_without_a_modality_are_left_out_and_leave_the_others_where_they_are() -> None:
    assignment = contiguous_assignment(
        PLAN, samples(4, ["vision", "llm"], {0: ["vision"], 2: ["vision"], 3: ["vision"]})
    )
    assert assignment.microbatches["vision"] == (((1,), ()),)
    assert assignment.microbatches["vision@1"] == (((1,), ()),)
    assert assignment.microbatches["llm"] == (((0,), (2,)), ((1,), (3,)))


def test_fewer_samples_than_microbatches_leave_some_empty() -> None:
    assert contiguous_assignment(PLAN, samples(1, ["llm"])).microbatches["llm"] == (((0,), ()), ((), ()))
