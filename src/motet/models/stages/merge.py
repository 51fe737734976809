"""Where encoder outputs stand in a language model's sequences: indices from layouts, nothing else.

A microbatch is either padded on the right to [B, T_max] or packed into one row [1, sum of T]. Merging by placeholder
and prepending differ only in the layouts. Outputs arrive in the order (sample, item); a layout may have the items in
any order, and an item in several segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.assignment.sample import Sample, places_in_sample


@dataclass(frozen=True)
class SequenceLayout:
    """How the sequences of a microbatch lie in the tensor [rows, columns]."""

    lengths: tuple[int, ...]
    """Of each sample."""
    packed: bool

    @property
    def shape(self) -> tuple[int, int]:
        return (1, sum(self.lengths)) if self.packed else (len(self.lengths), max(self.lengths))

    def starts(self) -> list[int]:
        """Where each sample begins in the flattened [rows * columns]."""
        if not self.packed:
            return [b * self.shape[1] for b in range(len(self.lengths))]
        return [sum(self.lengths[:b]) for b in range(len(self.lengths))]

    def places(self) -> Tensor:
        """Of every token, sample after sample: its index in the flattened [rows * columns]."""
        runs = zip(self.starts(), self.lengths, strict=True)
        return torch.cat([torch.arange(start, start + length) for start, length in runs])

    def position_ids(self) -> Tensor:
        """[rows, columns], beginning at 0 in each sample; where nothing stands, as if the sample went on."""
        if self.packed:
            return torch.cat([torch.arange(length) for length in self.lengths])[None]
        return torch.arange(self.shape[1])[None].expand(self.shape)

    def attention_mask(self) -> Tensor | None:
        """[rows, columns], 1 where a token stands; None if one stands everywhere."""
        if self.packed or min(self.lengths) == max(self.lengths):
            return None
        return (torch.arange(self.shape[1])[None] < torch.tensor(self.lengths)[:, None]).long()

    def sample_of_token(self) -> Tensor:
        """[rows, columns]: which sample of the microbatch stands there; -1 where nothing does."""
        owner = torch.full((self.shape[0] * self.shape[1],), -1)
        owner[self.places()] = torch.repeat_interleave(torch.tensor(self.lengths))
        return owner.view(self.shape)


def layout_of(samples: Sequence[Sample], module: str, *, packed: bool) -> SequenceLayout:
    return SequenceLayout(tuple(sample.num_tokens(module) for sample in samples), packed)


def places_of_outputs(samples: Sequence[Sample], module: str, source: str, sequences: SequenceLayout) -> Tensor:
    """Where each output token of `source`, in the order (sample, item), goes in the flattened [rows * columns]."""
    places: list[int] = []
    for sample, start in zip(samples, sequences.starts(), strict=True):
        places += places_in_sample(sample, module, source, start)
    return torch.tensor(places, dtype=torch.long)


def merge(embeddings: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """`embeddings` [rows, columns, H] with `tokens` [n, H] in place of what stood at `places`."""
    rows, columns, width = embeddings.shape
    flat = embeddings.reshape(rows * columns, width)
    return flat.index_copy(0, places.to(flat.device), tokens.to(flat.dtype)).view(rows, columns, width)
