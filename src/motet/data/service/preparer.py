"""Answers tickets from data sets: the work itself, in a training process, a worker process or a server's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from motet.assignment.sample import Sample
from motet.data.dataset import Dataset
from motet.data.service.tensor_buffer import Allocate, TensorBuffer, in_own_memory, pack
from motet.data.service.tickets import Corrupt, Split, Ticket
from motet.errors import UserError

Answer = list[Sample | Corrupt] | TensorBuffer | Corrupt
"""Of a ticket for metadata; for tensors; for tensors of a sample that cannot be prepared."""


@dataclass(frozen=True)
class Preparer:
    """`checks_all`: a sample's tensors are prepared before its metadata is given away, so that what cannot be prepared
    is known before the batch is cut. Costs the decoding of every sample once more in each process that is asked."""

    datasets: Mapping[Split, Dataset]
    checks_all: bool = False
    _good: set[tuple[Split, int]] = field(default_factory=set, init=False, repr=False)

    def answer(self, ticket: Ticket, allocate: Allocate = in_own_memory) -> Answer:
        """A function of the ticket and the data alone. `allocate`: the memory for tensors."""
        if ticket.module is None:
            return [self._sample(ticket.split, index) for index in ticket.indices]
        features: list[dict[str, Tensor]] = []
        for index in ticket.indices:
            try:
                features.append(self.datasets[ticket.split].features(index, ticket.module))
            except UserError as error:
                return Corrupt(index, str(error))
        return pack(features, allocate)

    def _sample(self, split: Split, index: int) -> Sample | Corrupt:
        dataset = self.datasets[split]
        try:
            sample = dataset.sample(index)
            if self.checks_all and (split, index) not in self._good:
                for module in sample.layouts:
                    if sample.has(module):
                        dataset.features(index, module)
                self._good.add((split, index))
            return sample
        except UserError as error:
            return Corrupt(index, str(error))
