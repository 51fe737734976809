"""The producer that needs nothing to be started: worker processes of the training process itself."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor

from motet.assignment.sample import Sample
from motet.data.service.tensor_buffer import TensorBuffer, unpack
from motet.data.service.tickets import Corrupt, Split, Ticket
from motet.data.service.workers import Workers
from motet.errors import UserError

LARGEST_SHARE = 16
"""Samples that are prepared, and travel, at a time."""


class LocalProducer:
    """One data set, prepared by workers, which several data sets may share.

    `may_skip`: the workers check all samples. Each training process then decodes all of them, whatever it needs."""

    def __init__(self, workers: Workers, split: Split, num_samples: int, *, may_skip: bool = False) -> None:
        self._workers, self._split, self._num_samples, self.may_skip = workers, split, num_samples, may_skip
        self._lock = threading.Lock()
        self.received_bytes: Counter[str] = Counter()

    @property
    def fingerprint(self) -> str:
        return self._workers.preparer.datasets[self._split].fingerprint

    def __len__(self) -> int:
        return self._num_samples

    def samples(self, indices: Sequence[int]) -> list[Sample | Corrupt]:
        samples: list[Sample | Corrupt] = []
        for answer in self._workers.answers(shares(Ticket(self._split, tuple(indices)), self._workers.num)):
            assert isinstance(answer, list)
            samples += answer
        if not self.may_skip:
            for sample in samples:
                if isinstance(sample, Corrupt):
                    raise UserError(sample.message)
        return samples

    def features(self, module: str, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        features: list[dict[str, Tensor]] = []
        for answer in self._workers.answers(shares(Ticket(self._split, tuple(indices), module), self._workers.num)):
            if isinstance(answer, Corrupt):
                raise UserError(answer.message)
            assert isinstance(answer, TensorBuffer)
            with self._lock:
                self.received_bytes[module] += answer.data.nbytes
            features += unpack(answer.header, answer.data)
        return features

    def close(self) -> None:
        self._workers.close()


def shares(ticket: Ticket, num_workers: int) -> Iterator[Ticket]:
    """The same ticket in parts, enough of them to keep all workers busy, and none so large that it is a burden."""
    size = min(LARGEST_SHARE, max(1, -(-len(ticket.indices) // (2 * num_workers or 1))))
    for first in range(0, len(ticket.indices), size):
        yield Ticket(ticket.split, ticket.indices[first : first + size], ticket.module)
