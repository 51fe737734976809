"""What a loader draws from: samples by index, metadata apart from tensors."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from motet.assignment.sample import Sample
from motet.data.conversation.example import ExampleSource
from motet.data.preparation.preparation import Preparation, TowerPreparation, tool_fingerprint

NUM_SAMPLES_KEPT = 65_536
FEATURE_BYTES_KEPT = 256 * 2**20


class Dataset(Protocol):
    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Differs, if the data differ, as far as can be seen without reading all of them."""

    def sample(self, index: int) -> Sample:
        """The metadata, without decoding pixels or waveforms."""

    def features(self, index: int, module: str) -> dict[str, Tensor]:
        """The sample's tensors for one module (docs/architecture.md, "Batch"). Not to be written to."""


@dataclass(frozen=True)
class ExampleDataset:
    """Examples, prepared when they are asked for.

    The first `NUM_SAMPLES_KEPT` and the first `FEATURE_BYTES_KEPT` bytes stay in memory, so a small set is prepared
    once. Those that came later are prepared anew: epochs come in random order, where no better choice is known.
    """

    examples: ExampleSource
    preparation: Preparation | TowerPreparation
    _samples: dict[int, Sample] = field(default_factory=dict, init=False, repr=False)
    _features: dict[tuple[int, str], dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False)
    _num_bytes: list[int] = field(default_factory=lambda: [0], init=False, repr=False)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def fingerprint(self) -> str:
        """Of the examples, and of all that makes samples of them."""
        tools = {name: tool_fingerprint(tool) for name, tool in self.preparation.tools.items()}
        known = {"examples": self.examples.fingerprint, **tools}
        return ", ".join(f"{name} {value}" for name, value in known.items())

    def sample(self, index: int) -> Sample:
        if index in self._samples:
            return self._samples[index]
        sample = self.preparation.sample(self.examples[index])
        if len(self._samples) < NUM_SAMPLES_KEPT:
            self._samples[index] = sample
        return sample

    def features(self, index: int, module: str) -> dict[str, Tensor]:
        if (index, module) in self._features:
            return dict(self._features[index, module])
        features = self.preparation.features(self.examples[index], module)
        num_bytes = sum(tensor.nbytes for tensor in features.values())
        if self._num_bytes[0] + num_bytes <= FEATURE_BYTES_KEPT:
            self._num_bytes[0] += num_bytes
            self._features[index, module] = features
        return dict(features)
