"""Metadata of a sample: how its sequence is laid out in each module. No pixels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

IGNORED_LABEL = -100
"""Label of tokens without a loss, as in transformers."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens in one module's sequence of one sample."""

    num_tokens: int
    """Tokens that the run takes in this module's sequence."""
    source: str | None = None
    """The module whose output stands here; None: the module's own tokens."""
    item: int = 0
    """Number of the image, clip, ... of the source within the sample."""
    num_outputs: int | None = None
    """Output tokens of an encoder for the item, after head and projector. None: as many as `num_tokens`."""
    grid: tuple[int, ...] = ()
    """Encoders: what the family derives positions and masks from (patch rows and columns, frames)."""
    num_frames: int = 0
    """Encoders: frames that are read of a video; 0: the item is none."""
    target: str | None = None
    """Language models: the generator that reads the hidden states of this run, for its item `item`."""

    @property
    def outputs(self) -> int:
        return self.num_tokens if self.num_outputs is None else self.num_outputs


@dataclass(frozen=True, slots=True)
class Sample:
    """The metadata of one sample. Every rank holds it for every sample of the global batch."""

    id: str
    """Names the sample in logs and reports."""
    layouts: Mapping[str, tuple[Segment, ...]]
    """Segments in order, by module. A modality that the sample lacks has no entry, or an empty one."""
    num_loss_tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens that carry a loss, by module with a loss."""

    def has(self, module: str) -> bool:
        return bool(self.layouts.get(module))

    def num_tokens(self, module: str) -> int:
        """Length of the module's sequence."""
        return sum(segment.num_tokens for segment in self.layouts.get(module, ()))

    def num_outputs(self, module: str, target: str | None = None) -> int:
        """Number of the module's output tokens for `target`: of the runs that name it, or of all if none does."""
        segments = self.layouts.get(module, ())
        named = [segment.outputs for segment in segments if segment.target == target is not None]
        return sum(named or [segment.outputs for segment in segments])

    def output_places(self, module: str, target: str) -> list[int]:
        """Indices, among the module's output tokens, of those for `target`."""
        segments = self.layouts.get(module, ())
        is_named = any(segment.target == target for segment in segments)
        places: list[int] = []
        start = 0
        for segment in segments:
            if segment.target == target or not is_named:
                places += range(start, start + segment.outputs)
            start += segment.outputs
        return places


def members_of_cell(samples: Sequence[Sample], indices: Sequence[int], module: str) -> list[Sample]:
    """The samples of a microbatch. An idle one, in which a stage only computes what others send to its experts, has one
    token without a loss."""
    return [samples[i] for i in indices] or [Sample("idle", {module: (Segment(1),)})]


def kinds_of_samples(samples: Sequence[Sample]) -> list[int]:
    """A number for each sample, the same for those of the same layouts: they cost the same."""
    numbers: dict[object, int] = {}
    kinds = []
    for sample in samples:
        key = (tuple(sorted(sample.layouts.items())), tuple(sorted(sample.num_loss_tokens.items())))
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def places_in_sample(sample: Sample, module: str, source: str, start: int) -> list[int]:
    """Positions of `source`'s output tokens, item after item, in a sequence where the sample begins at `start`."""
    at_item: dict[int, list[int]] = {}
    for segment in sample.layouts[module]:
        if segment.source == source:
            at_item.setdefault(segment.item, []).extend(range(start, start + segment.num_tokens))
        start += segment.num_tokens
    return [place for item in sorted(at_item) for place in at_item[item]]
