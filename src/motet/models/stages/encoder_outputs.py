"""What leaves each layer of an encoder: how many tokens of each sample, how wide, and which of them layouts hand on.

Configuration and layouts determine it, so shapes are known before anything is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from motet.assignment.sample import Sample
from motet.families.token_counts import Selection, selection_of


@dataclass(frozen=True, kw_only=True)
class EncoderOutputs:
    """Numbers and widths of tokens at the boundaries of an encoder's layers (`motet.models.stages.encoder`)."""

    name: str
    """The module whose layouts are read."""
    config: Any
    """Of the transformers model."""
    head_layer: int
    block_width: int
    head_width: int
    projector_width: int | None
    """None: there is no projector."""
    is_pooled: bool
    """Whether the head hands on what a tower's pooling makes, which layouts count."""
    has_callback_after_head: bool

    def width(self, layer: int) -> int:
        """Of what enters `layer` (of what leaves the last one)."""
        if layer <= self.head_layer:
            return self.block_width
        if layer == self.head_layer + 1:
            return self.head_width
        assert self.projector_width is not None
        return self.projector_width

    def num_tokens(self, layer: int, samples: Sequence[Sample]) -> list[int]:
        """Of each sample, of what enters `layer` (of what leaves the last one)."""
        if layer <= self.head_layer:
            return [sample.num_tokens(self.name) for sample in samples]
        if layer == self.head_layer + 1 and self.projector_width is not None:
            return self.projector_inputs(samples)
        return self.final(samples)

    def of_head(self, samples: Sequence[Sample]) -> list[int]:
        """Tokens of each sample that the head hands on, before the callback after it."""
        if self.is_pooled:
            return self.final(samples)
        return [sum(selection.num_outputs for selection in self._selections([sample])) for sample in samples]

    def projector_inputs(self, samples: Sequence[Sample]) -> list[int]:
        """A callback after the head makes what the layout says, or the shape here would not be known from metadata."""
        return self.final(samples) if self.has_callback_after_head else self.of_head(samples)

    def final(self, samples: Sequence[Sample]) -> list[int]:
        return [sample.num_outputs(self.name) for sample in samples]

    def tiles(self, samples: Sequence[Sample]) -> list[tuple[tuple[int, ...], int]]:
        """(grid, number of tokens) of every image or clip in order."""
        tiles = []
        for sample in samples:
            for segment in sample.layouts[self.name]:
                num_tiles = selection_of(self.config, segment).num_tiles
                tiles += [(segment.grid, segment.num_tokens // num_tiles)] * num_tiles
        return tiles

    def select(self, hidden: Tensor, samples: Sequence[Sample]) -> Tensor:
        """Of each tile's features after the head, those that the layout hands on."""
        if self.is_pooled:
            return hidden
        selections = self._selections(samples)
        if all(selection.num_tokens == selection.num_full for selection in selections):
            return hidden
        items = hidden.split([selection.num_tiles * selection.num_full for selection in selections])
        return torch.cat(
            [
                item.unflatten(0, (selection.num_tiles, selection.num_full))
                .narrow(1, selection.first, selection.num_tokens)
                .flatten(0, 1)
                for item, selection in zip(items, selections, strict=True)
            ]
        )

    def _selections(self, samples: Sequence[Sample]) -> list[Selection]:
        return [selection_of(self.config, segment) for sample in samples for segment in sample.layouts[self.name]]
