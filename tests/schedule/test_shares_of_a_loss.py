"""Who puts what into a contrastive loss."""

import pytest
from plans import contrastive, replica, samples

from motet.assignment.batch_assignment import contiguous_assignment
from motet.errors import UserError
from motet.schedule.batch_sync import num_comparisons, pairs_of, samples_of_ranks, shares, whole
from motet.schedule.routes import Cell, Routes, derive_routes


def routes(num_samples: int, *, locked: tuple[str, ...] = ()) -> Routes:
    """Two replicas of images, one of texts on a group of two, two contrastive batches."""
    plan = contrastive(
        {"image": [replica(0), replica(1)], "text": [replica(2, (3, 4))]},
        num_batches=2,
        num_microbatches={"image": 4, "text": 2},
        locked=locked,
    )
    batch = samples(num_samples, ["image", "text"])
    return derive_routes(plan, contiguous_assignment(plan, batch), batch)


def test_every_sample_is_put_in_once_for_each_tower() -> None:
    derived = routes(14)
    for batch in (0, 1):
        found = shares(derived, Cell("loss", 0, 0, batch))
        assert {name: [own.tolist() for own in of_all] for name, of_all in found.places.items()} == {
            "image": [[0, 1, 2, 3], [4, 5, 6], [], []],
            "text": [[], [], [0, 1, 2, 3], [4, 5, 6]],
        }
        assert found.with_gradient == {"image", "text"}


def test_ranks_of_a_group_share_a_routes_samples() -> None:
    derived = routes(14)
    (route,) = derived.outgoing[Cell("text", 0, 1, 1)]
    assert samples_of_ranks(derived, route) == {3: (7, 8, 9, 10), 4: (11, 12, 13)}


def test_locked_towers_get_no_gradient() -> None:
    assert shares(routes(4, locked=("image",)), Cell("loss", 0, 0, 0)).with_gradient == {"text"}


def test_fewer_samples_than_members() -> None:
    found = shares(routes(2), Cell("loss", 0, 0, 0))
    assert [own.tolist() for own in found.places["image"]] == [[0], [], [], []]
    assert [own.tolist() for own in found.places["text"]] == [[], [], [0], []]


def test_one_process_holds_everything() -> None:
    found = whole({"image": range(3), "text": (0, 2)}, frozenset())
    assert [own.tolist() for own in found.places["image"]] == [[0, 1, 2]]
    assert [own.tolist() for own in found.places["text"]] == [[0, 2]]


def test_a_sample_without_a_tower_is_nobodys() -> None:
    plan = contrastive({"image": [replica(0)], "text": [replica(1)]})
    batch = samples(3, ["image", "text"], lacking={1: ["text"]})
    derived = derive_routes(plan, contiguous_assignment(plan, batch), batch)
    found = shares(derived, Cell("loss", 0, 0, 0))
    assert [own.tolist() for own in found.places["image"]] == [[0, 1, 2], []]
    assert [own.tolist() for own in found.places["text"]] == [[], [0, 2]]


def test_a_sample_is_compared_in_the_pairs_of_which_it_has_both() -> None:
    pairs = pairs_of(("image", "text", "audio"), None)
    assert num_comparisons(pairs, ("image", "text", "audio")) == 3
    assert num_comparisons(pairs, ("audio", "image")) == 1
    assert num_comparisons(pairs, ("audio",)) == 0
    assert num_comparisons(pairs_of(("image", "text", "audio"), "text"), ("image", "audio")) == 0


def test_pairs() -> None:
    assert pairs_of(("a", "b", "c"), None) == (("a", "b"), ("a", "c"), ("b", "c"))
    assert pairs_of(("a", "b", "c"), "b") == (("b", "a"), ("b", "c"))
    with pytest.raises(UserError, match="anchor: there is no tower 'd'; give a, b, c"):
        pairs_of(("a", "b", "c"), "d")
    with pytest.raises(UserError, match="at least two"):
        pairs_of(("a",), None)
