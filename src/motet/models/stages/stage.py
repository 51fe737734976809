"""What the runtime asks of a stage: see docs/architecture.md, "Stages"."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from motet.assignment.sample import Sample

# The tensors behind the metadata: loaded by the ranks that need them, when they need them.


class Batch(Protocol):
    """One global batch."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The same on every rank."""

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        """One sample's tensors for one module (docs/architecture.md, "Batch"); `sample` is its index in `samples`."""


class StageModule(Protocol):
    """A run of layers of one module, on one rank."""

    hidden_size: int
    """Width at the input boundary."""
    output_size: int
    """Width at the output boundary."""
    needs_features: bool
    """Whether it reads raw features."""

    def __call__(
        self,
        hidden: Tensor | None,
        incoming: Mapping[str, Tensor],
        features: Sequence[Mapping[str, Tensor]],
        samples: Sequence[Sample],
    ) -> Tensor:
        """The output for one microbatch; of a language model's last stage, the sum of the token losses."""

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]: ...

    def output_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]: ...

    def canonical_name(self, local_name: str) -> str:
        """The parameter's name in the whole module, the same under every plan; a tied one: its embedding's."""

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        """The layer that the parameter belongs to, or the two that share it."""

    def after_update(self) -> None:
        """Called when an optimizer has stepped: brings parameters back within their limits."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def keep_frozen_in_eval_mode(*parts: nn.Module | None) -> None:
    """Called after a stage changed its mode: a part in which nothing is trained has no dropout."""
    for part in parts:
        if part is not None and not any(parameter.requires_grad for parameter in part.parameters()):
            part.eval()
