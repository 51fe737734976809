"""The order of batches, exact resumption, and that only what is asked for is loaded."""

import threading
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor

from motet.assignment.sample import Sample, Segment
from motet.data.loader import Loader, held_out_batches
from motet.data.service.tickets import InProcess
from motet.errors import UserError


class Numbers:
    """Sample i's only feature is i. Notes what is loaded. Odd samples have no image."""

    def __init__(self, num: int, fingerprint: str = "numbers") -> None:
        self.num, self.fingerprint = num, fingerprint
        self.loaded: list[tuple[int, str]] = []
        self.broken: int | None = None

    def __len__(self) -> int:
        return self.num

    def sample(self, index: int) -> Sample:
        vision = (Segment(2),) if index % 2 == 0 else ()
        return Sample(str(index), {"language_model": (Segment(3),), "vision": vision})

    def features(self, index: int, module: str) -> dict[str, Tensor]:
        if index == self.broken:
            raise UserError(f"sample {index} is broken")
        self.loaded.append((index, module))
        return {"value": torch.tensor(index)}


def ids(loader: Iterator, num: int) -> list[list[str]]:
    return [[sample.id for sample in batch.samples] for batch in islice(loader, num)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_order_is_a_function_of_seed_and_epoch(ahead: int) -> None:
    first = ids(Loader(InProcess(Numbers(11)), 4, seed=0, batches_ahead=ahead), 6)
    assert ids(Loader(InProcess(Numbers(11)), 4, seed=0, batches_ahead=1 - ahead), 6) == first
    assert ids(Loader(InProcess(Numbers(11)), 4, seed=1, batches_ahead=ahead), 6) != first
    epochs = [[i for batch in first[e : e + 2] for i in batch] for e in (0, 2, 4)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_coming_batches_are_prepared_by_threads() -> None:
    loader = Loader(InProcess(Numbers(11)), 4, seed=0, batches_ahead=2)
    prepared: list[tuple[str, list[str]]] = []
    loader.prepare = lambda batch: prepared.append((threading.current_thread().name, [s.id for s in batch.samples]))
    taken = ids(loader, 3)
    loader.close()
    assert all(batch in [done for _, done in prepared] for batch in taken)
    assert all(name.startswith("loader") for name, _ in prepared)


@pytest.mark.parametrize("num_before", range(6))
def test_a_resumed_loader_goes_on_exactly(num_before: int) -> None:
    undisturbed = ids(Loader(InProcess(Numbers(11)), 4, seed=0), 9)
    before = Loader(InProcess(Numbers(11)), 4, seed=0)
    ids(before, num_before)
    after = Loader(InProcess(Numbers(11)), 4, seed=0)
    ids(after, 3)
    after.load_state(before.state())
    assert ids(after, 3) == undisturbed[num_before : num_before + 3]


def test_a_state_of_other_data_is_refused() -> None:
    state = Loader(InProcess(Numbers(11)), 4, seed=0).state()
    for other, key in (
        (Loader(InProcess(Numbers(12)), 4, seed=0), "num_samples"),
        (Loader(InProcess(Numbers(11)), 3, seed=0), "batch_size"),
        (Loader(InProcess(Numbers(11)), 4, seed=1), "seed"),
    ):
        with pytest.raises(UserError, match=key):
            other.load_state(state)


def test_other_data_of_as_many_samples_are_seen() -> None:
    def opened(fingerprint: str) -> Loader:
        return Loader(InProcess(Numbers(11, fingerprint)), 4, seed=0)

    state = opened("numbers").state()
    assert not opened("numbers").has_changed_since(state)
    assert opened("other numbers").has_changed_since(state)
    del state["fingerprint"]  # As checkpoints had it that were written before there was one.
    assert not opened("other numbers").has_changed_since(state)


def test_only_what_is_asked_for_is_loaded_and_once() -> None:
    data = Numbers(8)
    batch = next(Loader(InProcess(data), 4, seed=0, batches_ahead=0))
    assert data.loaded == []
    index = batch.indices()[2]
    assert batch.features("language_model", 2)["value"] == index
    batch.features("language_model", 2)
    assert data.loaded == [(index, "language_model")]


def images_of_the_first_two(samples: tuple[Sample, ...]) -> dict[str, list[int]]:
    return {"vision": [place for place in (0, 1) if samples[place].has("vision")]}


@pytest.mark.parametrize("ahead", [1, 3])
def test_what_is_wanted_is_loaded_ahead_and_no_batch_further(ahead: int) -> None:
    data = Numbers(400)
    loader = Loader(InProcess(data), 4, seed=0, wanted=images_of_the_first_two, batches_ahead=ahead)
    expected = []
    for batch in islice(loader, 50):
        wanted = images_of_the_first_two(batch.samples)["vision"]
        assert batch.fetched() == {("vision", place) for place in wanted}
        expected += [(batch.indices()[place], "vision") for place in wanted]
        for place in wanted:
            assert batch.features("vision", place)["value"] == batch.indices()[place]
    loader.close()
    assert set(expected) <= set(data.loaded)
    assert len(data.loaded) <= len(expected) + 2 * ahead
    assert all(index % 2 == 0 for index, _ in data.loaded)


def test_what_is_asked_for_beyond_what_is_wanted_comes_too() -> None:
    batch = next(Loader(InProcess(Numbers(8)), 4, seed=0, wanted=images_of_the_first_two))
    assert batch.features("language_model", 3)["value"] == batch.indices()[3]


def test_what_fails_ahead_is_told_when_its_turn_comes() -> None:
    data = Numbers(400)
    third = list(islice(Loader(InProcess(data), 4, seed=0, batches_ahead=0), 3))[2]
    data.broken = third.indices()[0]
    loader = Loader(InProcess(data), 4, seed=0, wanted=lambda samples: {"language_model": [0]}, batches_ahead=2)
    for _ in range(2):
        next(loader)
    with pytest.raises(UserError, match=f"sample {data.broken} is broken"):
        next(loader)


def test_whole_held_out_batches_leave_the_last_samples_out() -> None:
    """But where there is no whole one."""
    sizes = {
        n: [len(batch.samples) for batch in held_out_batches(InProcess(Numbers(10)), 4, n, whole=True)]
        for n in (3, 4, 7, 8, 100)
    }
    assert sizes == {3: [3], 4: [4], 7: [4], 8: [4, 4], 100: [4, 4]}


def test_held_out_batches_keep_the_last_samples() -> None:
    batches = held_out_batches(InProcess(Numbers(10)), 4, 7)
    assert [batch.indices() for batch in batches] == [(0, 1, 2, 3), (4, 5, 6)]
    assert [len(batch.samples) for batch in held_out_batches(InProcess(Numbers(3)), 4, 100)] == [3]
