"""Global batches of a data set, in an order that is a pure function of the seed and the epoch.

Every rank has the same loader and draws the same batches: metadata of all samples, and tensors of those that its stages
read. Only the loader defines the order: producers (motet.data.service) get positions in the data set and know nothing
of seeds, epochs or batches.

While a batch is trained on, threads prepare a bounded number of the next ones. A batch is assigned (`wanted`) as soon
as its metadata are available.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from motet.assignment.sample import Sample
from motet.data.service.tickets import Corrupt, Producer
from motet.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Wanted = Callable[[tuple[Sample, ...]], Mapping[str, Sequence[int]]]
"""From the metadata of a global batch to the positions, by module, whose tensors this rank will request."""


class LoadedBatch:
    """A global batch: samples at some positions in the data set, without those that were skipped.

    Tensors of a module are fetched on the first request: all that `wanted` returns, or the requested one alone."""

    def __init__(self, producer: Producer, indices: Sequence[int], wanted: Wanted | None = None) -> None:
        self._producer, self._wanted = producer, wanted
        prepared = list(zip(indices, producer.samples(indices), strict=True))
        self.skipped: tuple[str, ...] = tuple(what.message for _, what in prepared if isinstance(what, Corrupt))
        """Reasons for skipping samples; each names its file."""
        kept = [(i, what) for i, what in prepared if isinstance(what, Sample)]
        if not kept:
            raise UserError(f"data.on_corrupt: no sample of a whole batch can be prepared; {self.skipped[0]}")
        self._indices = tuple(i for i, _ in kept)
        self.samples: tuple[Sample, ...] = tuple(sample for _, sample in kept)
        self._features: dict[tuple[str, int], dict[str, Tensor]] = {}

    def features(self, module: str, sample: int) -> "dict[str, Tensor]":
        if (module, sample) not in self._features:
            wanted = self._places_wanted().get(module, ())
            self._fetch(module, [sample] if sample not in wanted else wanted)
        return self._features[module, sample]

    def fetch_wanted(self) -> None:
        """Fetches all tensors that this rank will request."""
        for module, places in self._places_wanted().items():
            self._fetch(module, places)

    def _places_wanted(self) -> Mapping[str, Sequence[int]]:
        return self._wanted(self.samples) if self._wanted else {}

    def _fetch(self, module: str, places: Sequence[int]) -> None:
        missing = [place for place in places if (module, place) not in self._features]
        if missing:
            fetched = self._producer.features(module, [self._indices[place] for place in missing])
            self._features.update(zip(((module, place) for place in missing), fetched, strict=True))

    def fetched(self) -> set[tuple[str, int]]:
        """(module, position in the batch) of all tensors fetched so far."""
        return set(self._features)

    def indices(self) -> tuple[int, ...]:
        """Positions of the samples in the data set."""
        return self._indices


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The positions of the samples in the data set, in the order of the epoch."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


class Loader:
    """An endless iterator over global batches; the last samples of an epoch that do not fill a batch are left out.

    `batches_ahead`: batches that threads prepare in advance, with the tensors that are `wanted`; 0: none, and tensors
    are fetched on request.
    """

    def __init__(
        self, producer: Producer, batch_size: int, *, seed: int, wanted: Wanted | None = None, batches_ahead: int = 1
    ) -> None:
        assert 1 <= batch_size <= len(producer)
        self._producer, self._batch_size, self._seed, self._wanted = producer, batch_size, seed, wanted
        self._fingerprint = hashlib.sha256(producer.fingerprint.encode()).hexdigest()[:16]
        self._position = (0, 0)
        self._orders: dict[int, np.ndarray] = {}
        self.batches_ahead = batches_ahead
        self._threads = ThreadPoolExecutor(batches_ahead, "loader") if batches_ahead else None
        self._ahead: deque[Future[LoadedBatch]] = deque()
        self.prepare: Callable[[LoadedBatch], None] = lambda batch: None
        """Called by the threads with the batch that they prepare."""

    @property
    def may_skip(self) -> bool:
        """Whether batches may lack samples that cannot be prepared."""
        return self._producer.may_skip

    @property
    def batches_per_epoch(self) -> int:
        return len(self._producer) // self._batch_size

    def state(self) -> dict[str, Any]:
        """The position of the next batch, from which any number of ranks can resume exactly."""
        epoch, step = self._position
        return {"epoch": epoch, "step": step, "seed": self._seed, **self._sizes(), "fingerprint": self._fingerprint}

    def _sizes(self) -> dict[str, int]:
        return {"batch_size": self._batch_size, "num_samples": len(self._producer)}

    def has_changed_since(self, state: dict[str, Any]) -> bool:
        """Whether the data or their preparation are known to differ from those when `state` was taken."""
        return bool(state.get("fingerprint", self._fingerprint) != self._fingerprint)

    def load_state(self, state: dict[str, Any]) -> None:
        """Resumes where `state` was taken. Raises `UserError` if seed, batch size or number of samples have changed;
        other changes of the data are reported by `has_changed_since`."""
        for key, own in {"seed": self._seed, **self._sizes()}.items():
            if state[key] != own:
                raise UserError(
                    f"train.resume: the checkpoint's data had {key} {state[key]}, this run has {own}; make them equal"
                )
        self._position = (state["epoch"], state["step"])
        self._drop_ahead()

    def __iter__(self) -> Iterator[LoadedBatch]:
        return self

    def __next__(self) -> LoadedBatch:
        if self._threads is None:
            batch = LoadedBatch(self._producer, self._indices(0), self._wanted)
        else:
            self._fill_ahead()
            batch = self._ahead.popleft().result()
        self._position = self._after(1)
        self._fill_ahead()
        return batch

    def _fill_ahead(self) -> None:
        if self._threads is not None:
            while len(self._ahead) < self.batches_ahead:
                indices = self._indices(len(self._ahead))
                self._ahead.append(self._threads.submit(self._load_wanted, indices))

    def _after(self, num_batches: int) -> tuple[int, int]:
        epoch, step = self._position
        epochs, step = divmod(step + num_batches, self.batches_per_epoch)
        return epoch + epochs, step

    def _indices(self, num_batches: int) -> tuple[int, ...]:
        """The positions of the batch after `num_batches` others."""
        epoch, step = self._after(num_batches)
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e >= self._position[0]}
            self._orders[epoch] = epoch_order(len(self._producer), self._seed, epoch)
        first = step * self._batch_size
        return tuple(self._orders[epoch][first : first + self._batch_size].tolist())

    def _load_wanted(self, indices: tuple[int, ...]) -> LoadedBatch:
        batch = LoadedBatch(self._producer, indices, self._wanted)
        batch.fetch_wanted()
        self.prepare(batch)
        return batch

    def _drop_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """Stops preparing batches."""
        self._drop_ahead()
        if self._threads is not None:
            self._threads.shutdown(wait=False)


def held_out_batches(
    producer: Producer, batch_size: int, num_samples: int, wanted: Wanted | None = None, *, whole: bool = False
) -> list[LoadedBatch]:
    """The first samples of a held-out set in batches of at most `batch_size`, for evaluation.

    `whole`: leaves out a smaller last batch unless it is the only one, since contrastive losses depend on the size of
    the batch."""
    available = min(num_samples, len(producer))
    indices = range(available // batch_size * batch_size or available) if whole else range(available)
    return [
        LoadedBatch(producer, indices[first : first + batch_size], wanted)
        for first in range(0, len(indices), batch_size)
    ]
