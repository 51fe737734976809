"""The next batch beside an iteration's own: what run-ahead needs of it (`motet.assignment.next_batch`)."""

from typing import NamedTuple

from torch import Tensor

from motet.models.stages.stage import Batch


class NextBatch(NamedTuple):
    """The batch of the next iteration. Encoders run its forwards ahead where the plan says so."""

    batch: Batch
    seed: tuple[int, ...] | None
    """That of its own iteration: with any other batch or seed, what was run ahead is dropped."""


class JoinedBatch:
    """Two batches as one, the second one's samples behind the first one's."""

    def __init__(self, first: Batch, second: Batch) -> None:
        self._first, self._second = first, second
        self.samples = (*first.samples, *second.samples)

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        num_first = len(self._first.samples)
        if sample < num_first:
            return self._first.features(module, sample)
        return self._second.features(module, sample - num_first)
