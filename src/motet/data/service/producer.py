"""Who prepares samples for training: the interface, and the producer that works in this process. Pure: no torch."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from motet.assignment.sample import Sample
from motet.data.service.tickets import Corrupt

if TYPE_CHECKING:
    from torch import Tensor

    from motet.data.dataset import Dataset

METADATA = "metadata"
"""Beside modules' names, in counts of bytes."""


class Producer(Protocol):
    """Prepares samples of one data set. Called from several threads at a time."""

    @property
    def received_bytes(self) -> Mapping[str, int]:
        """What has come from other processes so far: by module, and of metadata."""

    may_skip: bool
    """Whether samples that cannot be prepared are told as such, or stop the run."""

    @property
    def fingerprint(self) -> str:
        """Differs, if the data or what makes samples of them differ, as far as can be seen without reading them."""

    def __len__(self) -> int: ...

    def samples(self, indices: Sequence[int]) -> list[Sample | Corrupt]:
        """Metadata. Raises `UserError` for a sample that cannot be prepared, unless `may_skip`."""

    def features(self, module: str, indices: Sequence[int]) -> "list[dict[str, Tensor]]":
        """The samples' tensors for one module. Not to be written to. Raises `UserError` naming what is corrupt."""

    def close(self) -> None: ...


class InProcess:
    """Prepares in the thread that asks."""

    may_skip = False

    def __init__(self, dataset: "Dataset") -> None:
        self._dataset = dataset
        self.received_bytes: dict[str, int] = {}

    @property
    def fingerprint(self) -> str:
        return self._dataset.fingerprint

    def __len__(self) -> int:
        return len(self._dataset)

    def samples(self, indices: Sequence[int]) -> list[Sample | Corrupt]:
        return [self._dataset.sample(i) for i in indices]

    def features(self, module: str, indices: Sequence[int]) -> "list[dict[str, Tensor]]":
        return [self._dataset.features(i, module) for i in indices]

    def close(self) -> None:
        pass
