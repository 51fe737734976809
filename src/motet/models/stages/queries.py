"""A generator's query tokens as a source module: learned rows that stand at the placeholders `<generate>`.

They enter the language model as an encoder's outputs do. The hidden states at their places condition the generator
(MetaQuery, Pan et al. 2025).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from motet.assignment.sample import Sample
from motet.models.stages.stage import StageBase, StageInput, StageOutput

INITIAL_STD = 0.02
"""As that of the embeddings of most language models."""


class QueryTokens(nn.Module):
    """The rows of one item."""

    def __init__(self, num_queries: int, width: int, *, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        drawn = INITIAL_STD * torch.randn(num_queries, width, generator=generator, dtype=dtype)
        self.weight = nn.Parameter(drawn)

    def forward(self, num_items: int) -> Tensor:
        """[num_items x num_queries, width]"""
        return self.weight.repeat(num_items, 1)


class QueryStage(StageBase):
    """The only layer of the module `name`."""

    needs_features = False

    def __init__(self, name: str, queries: QueryTokens) -> None:
        super().__init__()
        self.name, self.module = name, queries
        self.hidden_size = self.output_size = queries.weight.shape[1]

    def forward(self, inputs: StageInput) -> StageOutput:
        return StageOutput(self.module(sum(len(sample.layouts[self.name]) for sample in inputs.samples)))

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        raise AssertionError("nothing enters query tokens")

    def output_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        return sum(sample.num_outputs(self.name) for sample in samples), self.output_size

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        return (0,)
