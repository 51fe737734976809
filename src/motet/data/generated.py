"""How images that a generator is to make are laid out: query tokens at their placeholders, and latents.

A conversation names them under `generate`, with `<generate>` in the text where each is to be drawn. Images are taken at
their own size: height and width are multiples of the generator's patch. Latents are pixels between -1 and 1, of one
channel (grey) or three. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from motet.assignment.sample import Segment
from motet.data.example import PLACEHOLDERS, TO_GENERATE, Example, Media, Modality
from motet.errors import UserError

MODES = {1: "L", 3: "RGB"}
"""Pillow's modes by the number of channels."""


@dataclass(frozen=True)
class QueryLayout:
    """A generator's input from a text: query tokens, which are in it as an encoder's outputs are, or the prompt."""

    num_queries: int | None
    """None: it reads everything up to the placeholder, which is an ordinary token."""
    target: str
    """The generator."""
    placeholder: str | None = None
    """The tokenizer's token at their places; None: `<generate>`."""
    modality: Modality = TO_GENERATE

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return (TO_GENERATE,)

    @property
    def token(self) -> str:
        return self.placeholder or PLACEHOLDERS[TO_GENERATE]

    def lay_out(self, example: Example, layouts: Mapping[str, Any]) -> tuple[tuple[Segment, ...], int | None]:
        if self.num_queries is None:
            return (), None
        number = len(example.items(self.modalities))
        return tuple(Segment(self.num_queries, item=item) for item in range(number)), None


@dataclass(frozen=True)
class GeneratedLayout:
    """The images that a generator learns to make."""

    config: Mapping[str, Any]
    """Configuration of the generator."""
    per: str
    """Unit of the average of its loss: "image" or "place"."""
    name: str
    """Key of the run file, for messages."""

    def __post_init__(self) -> None:
        channels = self.config["in_channels"]
        if channels not in MODES:
            raise UserError(
                f"{self.name}.values.in_channels: is {channels}, but images are learned as pixels of 1 channel (grey) "
                "or 3; give one of these (latents of an autoencoder are not supported)"
            )

    def lay_out(self, example: Example, layouts: Mapping[str, Any]) -> tuple[tuple[Segment, ...], int | None]:
        segments = []
        for item, (_, media) in enumerate(example.items((TO_GENERATE,))):
            rows, columns = self._grid(media)
            segments.append(Segment(rows * columns, item=item, grid=(rows, columns)))
        number = sum(segment.num_tokens for segment in segments) if self.per == "place" else len(segments)
        return tuple(segments), number

    def _grid(self, media: Media) -> tuple[int, int]:
        height, width = media.size()
        patch, most = self.config["patch_size"], self.config.get("pos_embed_max_size")
        if height % patch or width % patch:
            raise UserError(
                f"generate: an image has {height} x {width} pixels; give multiples of {patch}, the patch size"
            )
        rows, columns = height // patch, width // patch
        if most is not None and max(rows, columns) > most:
            raise UserError(
                f"generate: an image has {height} x {width} pixels, but {self.name} makes at most {most * patch} on a "
                "side (pos_embed_max_size)"
            )
        return rows, columns

    def latents(self, example: Example) -> np.ndarray:
        """Latents of all images, one after the other: float32 [sum of channels x height x width]."""
        parts = [np.zeros(0, dtype=np.float32)]
        for _, media in example.items((TO_GENERATE,)):
            pixels = np.asarray(media.load().convert(MODES[self.config["in_channels"]]), dtype=np.float32) / 127.5 - 1
            parts.append((pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)).reshape(-1))
        return np.concatenate(parts)
