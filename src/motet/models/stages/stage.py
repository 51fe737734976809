"""The interface between stages and the runtime: batches, stage inputs and outputs (docs/architecture.md, "Stages")."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from motet.assignment.sample import Sample
from motet.schedule.batch_sync import Shares


class Batch(Protocol):
    """One global batch: metadata on every rank, tensors loaded by the ranks that ask for them."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The same on every rank."""

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        """One sample's tensors for one module (docs/architecture.md, "Batch"); `sample` is its index in `samples`."""


class StageInput(NamedTuple):
    """One microbatch as it enters a stage."""

    samples: Sequence[Sample]
    """The microbatch's samples, in order."""
    features: Sequence[Mapping[str, Tensor]] = ()
    """The raw features of each sample, on the stage's device; on the host, those of a stage that says
    `features_on_host`, and the integers of one that says `integers_on_host`; empty dicts where the stage does not need
    them."""
    hidden: Tensor | None = None
    """The output of the module's previous stage; None on the first stage."""
    incoming: Mapping[str, Tensor] = MappingProxyType({})
    """Output rows [num_rows, width] of each source module, in the order (sample, item)."""
    hands_on: bool = False
    """Whether other modules read the hidden states of a last stage that computes a loss too."""
    draw_key: tuple[int, ...] | None = None
    """Seed and step, on which noise and time steps of generators depend; None: evaluation (`motet.models.draws`)."""
    shares: Shares | None = None
    """For a contrastive loss: which rank holds which rows of the contrastive batch."""


class StageOutput(NamedTuple):
    """Output of a stage for one microbatch. Both tensors are roots of its backward; either may be absent."""

    hidden: Tensor | None = None
    """The next stage's input; after the last stage, [sum of num_outputs, output_size] for other modules."""
    loss: Tensor | None = None
    """The sum of the microbatch's losses, neither weighted nor averaged."""


class StageModule(Protocol):
    """A run of layers of one module, on one rank."""

    hidden_size: int
    """Width at the input boundary."""
    output_size: int
    """Width at the output boundary."""
    needs_features: bool
    """Whether it reads raw features."""

    def __call__(self, inputs: StageInput) -> StageOutput: ...

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]: ...

    def output_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]: ...

    def num_entering(self, samples: Sequence[Sample], source: str) -> int:
        """Counts the rows of another module's outputs that enter the stage on this rank."""

    def prepare(self, samples: Sequence[Sample]) -> object:
        """Derives what attention of motet's own needs for a coming microbatch, to be held as long as it is."""

    def canonical_name(self, local_name: str) -> str:
        """The parameter's name in the whole module, the same under every plan; a tied one: its embedding's."""

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        """The layer that the parameter belongs to, or the two that share it."""

    def after_update(self) -> None:
        """Called when an optimizer has stepped: brings parameters back within their limits."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class StageBase(nn.Module):
    """The methods that are alike in most stages, whose children are the module and perhaps its projector."""

    name: str
    trained_parts: frozenset[str] = frozenset()
    """Names of those children of which some stage trains something, though perhaps not this one. As in the whole
    module, their dropout is in force wherever the module is cut."""

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return next(self.parameters()).device

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        keep_frozen_in_eval_mode(*(part for name, part in self.named_children() if name not in self.trained_parts))
        return self

    def num_entering(self, samples: Sequence[Sample], source: str) -> int:
        """All."""
        return sum(sample.num_outputs(source, self.name) for sample in samples)

    def prepare(self, samples: Sequence[Sample]) -> object:
        """Its attention is that of its model."""
        return None

    def canonical_name(self, local_name: str) -> str:
        """As in the whole module."""
        return local_name

    def after_update(self) -> None:
        """No parameter has a limit."""


def keep_frozen_in_eval_mode(*parts: nn.Module | None) -> None:
    """Called after a stage changed its mode: a part in which nothing is trained has no dropout."""
    for part in parts:
        if part is not None and not any(parameter.requires_grad for parameter in part.parameters()):
            part.eval()
