"""The tensors behind the metadata: loaded by the ranks that need them, when they need them."""

from typing import Protocol

from torch import Tensor

from motet.assignment.sample import Sample


class Batch(Protocol):
    """One global batch."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The same on every rank."""

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        """One sample's tensors for one module (docs/architecture.md, "Batch"); `sample` is its index in `samples`."""
