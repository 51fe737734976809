"""What is prepared once and kept, and what is prepared anew."""

import pytest
import torch
from torch import Tensor

import motet.data.preparation
from motet.assignment.sample import Sample
from motet.data.example import Example
from motet.data.preparation import ExampleDataset
from motet.data.tasks.dial_a_digit import DialADigit, DialADigitExamples


class Counting:
    """Prepares nothing but counts how often."""

    def __init__(self) -> None:
        self.prepared: list[str] = []

    def sample(self, example: Example) -> Sample:
        self.prepared.append(f"sample {example.id}")
        return Sample(example.id, {})

    def features(self, example: Example, module: str) -> dict[str, Tensor]:
        self.prepared.append(f"{module} {example.id}")
        return {"pixels": torch.full((100,), float(len(self.prepared)))}


@pytest.fixture
def counting() -> Counting:
    return Counting()


def dataset(counting: Counting) -> ExampleDataset:
    return ExampleDataset(DialADigitExamples(DialADigit(), "train", 4), counting)  # type: ignore[arg-type]


def test_a_small_set_is_prepared_once(counting: Counting) -> None:
    data = dataset(counting)
    for _ in range(3):
        for index in range(len(data)):
            assert data.sample(index).id.endswith(f"/{index}")
            assert data.features(index, "vision")["pixels"].shape == (100,)
    assert len(counting.prepared) == len(set(counting.prepared)) == 8


def test_what_does_not_fit_is_prepared_anew(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(motet.data.preparation, "FEATURE_BYTES_KEPT", 1000)
    monkeypatch.setattr(motet.data.preparation, "NUM_SAMPLES_KEPT", 3)
    data = dataset(counting)
    for _ in range(2):
        for index in range(4):
            data.sample(index)
            data.features(index, "vision")
    again = [what for what in set(counting.prepared) if counting.prepared.count(what) == 2]
    kinds = sorted((what.split()[0], what.rpartition("/")[2]) for what in again)
    assert kinds == [("sample", "3"), ("vision", "2"), ("vision", "3")]


def test_the_dict_is_the_callers(counting: Counting) -> None:
    data = dataset(counting)
    data.features(0, "vision").clear()
    assert "pixels" in data.features(0, "vision")
