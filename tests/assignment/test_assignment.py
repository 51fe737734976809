from hypothesis import given
from hypothesis import strategies as st
from plans import contrastive, language_model, module, replica, samples

from motet.assignment.batch_assignment import contiguous_assignment, split_evenly
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


def test_unlike_replicas_get_unlike_shares_of_equal_microbatches() -> None:
    plan = Plan(
        modules={"vision": module(replica(0), replica(1)), "llm": language_model(replica(2), replica(3))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=2,
        replica_microbatches=(3, 1),
    )
    assignment = contiguous_assignment(plan, samples(8, ["vision", "llm"], lacking={2: ["vision"], 6: ["vision"]}))
    assert assignment.microbatches["llm"] == (((0, 1), (2, 3), (4, 5)), ((6, 7),))
    assert assignment.microbatches["vision"] == (((0, 1), (3,), (4, 5)), ((7,),))


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


def test_towers_cut_each_contrastive_batch_by_themselves() -> None:
    """DistMM's Figure 2: 3 replicas with 4 microbatches of 2 samples and 4 with 2 of 3, of 24 samples."""
    towers = {"image": [replica(r) for r in range(3)], "text": [replica(3 + r) for r in range(4)]}
    plan = contrastive(towers, num_batches=3, num_microbatches={"image": 12, "text": 6})
    assignment = contiguous_assignment(plan, samples(72, ["image", "text"]))
    assert assignment.microbatches["loss"] == (tuple(tuple(range(24 * g, 24 * g + 24)) for g in range(3)),)
    for name, size in (("image", 2), ("text", 3)):
        replicas = assignment.microbatches[name]
        assert {len(microbatch) for cut in replicas for microbatch in cut} == {size}
        per_batch = len(replicas[0]) // 3
        for g in range(3):
            held = [i for cut in replicas for m in cut[g * per_batch : (g + 1) * per_batch] for i in m]
            assert sorted(held) == list(range(24 * g, 24 * g + 24))
    # In two steps, as both numbers of microbatches can be divided by 2: the batch's first half, then the other.
    assert assignment.microbatches["image"][1][:4] == ((4, 5), (6, 7), (16, 17), (18, 19))
    assert assignment.microbatches["text"][1][:2] == ((3, 4, 5), (15, 16, 17))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_modules_take_the_samples_of_a_contrastive_batch_in_the_same_steps(
    image_dp: int, text_dp: int, image_k: int, text_k: int, num_steps: int
) -> None:
    """So who reads a tower's first microbatches has all of its own first ones, whatever the replicas of either."""
    towers = {"image": [replica(r) for r in range(image_dp)], "text": [replica(image_dp + r) for r in range(text_dp)]}
    counts = {"image": 2 * image_k * num_steps, "text": 2 * text_k * num_steps}
    num_samples = 2 * num_steps * image_dp * text_dp * image_k * text_k
    plan = contrastive(towers, num_batches=2, num_microbatches=counts)
    cut = contiguous_assignment(plan, samples(num_samples, ["image", "text"])).microbatches
    size = num_samples // (2 * num_steps)
    for name, of_step in (("image", image_k), ("text", text_k)):
        for step in range(2 * num_steps):
            held = [i for each in cut[name] for m in each[step * of_step : (step + 1) * of_step] for i in m]
            assert sorted(held) == list(range(step * size, (step + 1) * size))


@given(
    st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)
)
def test_a_tower_holds_what_its_contrastive_batch_has(
    num_samples: int, num_batches: int, image_dp: int, text_dp: int, image_k: int, text_k: int
) -> None:
    towers = {
        "image": [replica(r) for r in range(image_dp)],
        "text": [replica(image_dp + r) for r in range(text_dp)],
    }
    counts = {"image": num_batches * image_k, "text": num_batches * text_k}
    plan = contrastive(towers, num_batches=num_batches, num_microbatches=counts)
    lacking = {i: ["text"] for i in range(0, num_samples, 5)} | {3: ["image", "text"]}
    assignment = contiguous_assignment(plan, samples(num_samples, ["image", "text"], lacking))
    (of_loss,) = assignment.microbatches["loss"]
    assert sorted(i for batch in of_loss for i in batch) == [i for i in range(num_samples) if i != 3]
    for name, per_batch in (("image", image_k), ("text", text_k)):
        for g, batch in enumerate(of_loss):
            held = [
                i for cut in assignment.microbatches[name] for m in cut[g * per_batch : (g + 1) * per_batch] for i in m
            ]
            assert sorted(held) == [i for i in batch if name not in lacking.get(i, ())]
            sizes = [len(m) for cut in assignment.microbatches[name] for m in cut[g * per_batch : (g + 1) * per_batch]]
            shares = [sum(sizes[i : i + per_batch]) for i in range(0, len(sizes), per_batch)]
            assert max(shares) - min(shares) <= 1
            assert all(list(m) == sorted(m) for cut in assignment.microbatches[name] for m in cut)


def test_unlike_replicas_share_out_the_same_microbatches() -> None:
    modules = {"vision": module(replica(0), replica(2)), "llm": language_model(replica(1), replica(3))}
    edges = (Edge(source="vision", target="llm"),)
    cut = {}
    for counts in ((3, 1), (1, 3), (2, 2)):
        plan = Plan(modules=modules, edges=edges, num_microbatches=max(counts), replica_microbatches=counts)
        assignment = contiguous_assignment(plan, samples(9, ["vision", "llm"], {4: ["vision"]}))
        assert tuple(len(each) for each in assignment.microbatches["llm"]) == counts
        cut[counts] = [m for each in assignment.microbatches["llm"] for m in each]
        assert assignment.samples_of("vision", 1, counts[1] - 1) == (7, 8)
    assert cut[3, 1] == cut[1, 3] == cut[2, 2] == [(0, 1, 2), (3, 4), (5, 6), (7, 8)]
