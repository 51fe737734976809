"""Examples before any processing: messages, and the images and clips that they refer to. Imports no torch.

Media know their size without being decoded, so that every rank can compute the layouts of a whole batch while pixels
and waveforms are decoded only for the stages that read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Modality = Literal["image", "audio"]

PLACEHOLDERS: Mapping[Modality, str] = {"image": "<image>", "audio": "<audio>"}
"""Markers of the positions of images and clips in the text of a conversation."""


class Media(Protocol):
    """One image or one clip."""

    def size(self) -> tuple[int, int]:
        """Image: (height, width) in pixels. Audio: (number of samples, sampling rate in Hz)."""

    def load(self) -> Any:
        """Image: an RGB `PIL.Image.Image`. Audio: mono float32 [number of samples] in [-1, 1], at `size`'s rate."""


@dataclass(frozen=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str
    """With one placeholder for each image or clip."""


@dataclass(frozen=True)
class Example:
    id: str
    messages: tuple[Message, ...]
    """The loss is on the assistant's messages."""
    media: Mapping[Modality, tuple[Media, ...]] = field(default_factory=dict)
    """In the order of their placeholders."""
    where: str = ""
    """File and line, for messages."""

    @property
    def text(self) -> str:
        """The first message; that of an example without a conversation."""
        return self.messages[0].content


class ExampleSource(Protocol):
    """A finite list of examples; each access gives the same example again."""

    @property
    def fingerprint(self) -> str:
        """Differs between sources of different examples, as far as is known without reading all of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...
