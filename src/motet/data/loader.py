"""From a dataset to global batches, in an order that is a pure function of the seed and the epoch.

Every rank has the same loader and draws the same batches: metadata of all samples, tensors only of those it
asks for. The next batch's metadata, and its features at the places where this rank asked for some before, are prepared
by a thread while the current batch is trained on.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from motet.data.sample import Sample
from motet.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from motet.data.dataset import Dataset


class LoadedBatch:
    """One global batch of a dataset. Tensors are read when first asked for."""

    def __init__(self, dataset: "Dataset", indices: tuple[int, ...]) -> None:
        self._dataset, self._indices = dataset, indices
        self.samples: tuple[Sample, ...] = tuple(dataset.sample(i) for i in indices)
        self._features: dict[tuple[str, int], dict[str, Tensor]] = {}

    def features(self, module: str, sample: int) -> "dict[str, Tensor]":
        key = (module, sample)
        if key not in self._features:
            self._features[key] = self._dataset.features(self._indices[sample], module)
        return self._features[key]

    def asked_for(self) -> set[tuple[str, int]]:
        """(module, place in the batch) of all features so far."""
        return set(self._features)

    def indices(self) -> tuple[int, ...]:
        """In the dataset."""
        return self._indices


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The samples' places in the dataset, in the order in which the epoch takes them."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


class Loader:
    """An endless iterator over global batches; the last samples of an epoch that do not fill a batch are left out.

    `batches_ahead`: 0 or 1, whether a thread prepares the next batch.
    """

    def __init__(self, dataset: "Dataset", batch_size: int, *, seed: int, batches_ahead: int = 1) -> None:
        assert 1 <= batch_size <= len(dataset)
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._epoch = self._step = 0
        self._order = self._order_of(0)
        self._thread = ThreadPoolExecutor(1, "loader") if batches_ahead else None
        self._ahead: Future[LoadedBatch] | None = None
        self._last: LoadedBatch | None = None
        self._wanted: set[tuple[str, int]] = set()
        self.prepare: Callable[[Sequence[Sample]], None] = lambda samples: None
        """Called by the thread with the samples of the batch that it prepares."""

    def _order_of(self, epoch: int) -> np.ndarray:
        return epoch_order(len(self._dataset), self._seed, epoch)

    @property
    def batches_per_epoch(self) -> int:
        return len(self._dataset) // self._batch_size

    def state(self) -> dict[str, Any]:
        """Where the next batch comes from; enough to go on exactly, under any number of ranks."""
        return {"epoch": self._epoch, "step": self._step, "seed": self._seed, **self._sizes()}

    def _sizes(self) -> dict[str, int]:
        return {"batch_size": self._batch_size, "num_samples": len(self._dataset)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken. Raises `UserError` if seed, batch size or data have changed since."""
        for key, own in {"seed": self._seed, **self._sizes()}.items():
            if state[key] != own:
                raise UserError(
                    f"train.resume: the checkpoint's data had {key} {state[key]}, this run has {own}; make them equal"
                )
        self._epoch, self._step = state["epoch"], state["step"]
        self._order = self._order_of(self._epoch)
        self._ahead = self._last = None

    def peek(self) -> LoadedBatch:
        """The batch that comes next, without moving on."""
        return self._load(self._epoch, self._step, self._order)

    def __iter__(self) -> Iterator[LoadedBatch]:
        return self

    def __next__(self) -> LoadedBatch:
        batch = self._ahead.result() if self._ahead else self._load(self._epoch, self._step, self._order)
        self._step += 1
        if self._step == self.batches_per_epoch:
            self._epoch, self._step = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        if self._thread is not None:
            self._wanted |= self._last.asked_for() if self._last else set()
            self._ahead = self._thread.submit(self._load_ahead, self._epoch, self._step, self._order, set(self._wanted))
        self._last = batch
        return batch

    def _load(self, epoch: int, step: int, order: np.ndarray) -> LoadedBatch:
        first = step * self._batch_size
        return LoadedBatch(self._dataset, tuple(order[first : first + self._batch_size].tolist()))

    def _load_ahead(self, epoch: int, step: int, order: np.ndarray, wanted: set[tuple[str, int]]) -> LoadedBatch:
        batch = self._load(epoch, step, order)
        for module, place in sorted(wanted):
            if batch.samples[place].has(module):
                batch.features(module, place)
        self.prepare(batch.samples)
        return batch


def held_out_batches(dataset: "Dataset", batch_size: int, num_samples: int) -> list[LoadedBatch]:
    """The first samples of a held-out set in batches of at most `batch_size`, for evaluation."""
    indices = range(min(num_samples, len(dataset)))
    return [
        LoadedBatch(dataset, tuple(indices[first : first + batch_size])) for first in range(0, len(indices), batch_size)
    ]
