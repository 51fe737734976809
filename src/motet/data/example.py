"""Examples before any processing: messages, and the images, clips and videos that they refer to. Imports no torch.

Media know their size without being decoded, so that every rank can compute the layouts of a whole batch while pixels
and waveforms are decoded only for the stages that read them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from motet.errors import UserError

Modality = str
"""A key of `PLACEHOLDERS`."""

TO_GENERATE: Modality = "generate"
"""The key of images that a generator is to make."""
TO_GENERATE_AUDIO: Modality = "generate_audio"
"""The key of sounds that a generator is to make."""
GENERATED: tuple[Modality, ...] = (TO_GENERATE, TO_GENERATE_AUDIO)
"""Keys of what generators are to make; answers may hold these."""

PLACEHOLDERS: dict[Modality, str] = {
    "image": "<image>",
    "audio": "<audio>",
    "video": "<video>",
    TO_GENERATE: "<generate>",
    TO_GENERATE_AUDIO: "<generate_audio>",
}
"""Markers of the positions of media in the text of a conversation."""


class Media(Protocol):
    """One image, one sound or one video."""

    def size(self) -> Any:
        """Image: (height, width) in pixels. Audio: (number of samples, sampling rate in Hz). Video: a `VideoSize`."""

    @property
    def load(self) -> Callable[..., Any]:
        """Image: () -> an RGB `PIL.Image.Image`. Audio: () -> mono float32 [number of samples] in [-1, 1], at `size`'s
        rate. Video: (times in seconds, ascending) -> a list of RGB images."""


@dataclass(frozen=True)
class VideoSize:
    """Size and duration of a video, as its header states them."""

    height: int
    """Pixels, as it is shown."""
    width: int
    num_frames: int
    duration_s: float


@dataclass(frozen=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str
    """Text of the message, with one placeholder for each of its media."""


@dataclass(frozen=True)
class Example:
    id: str
    messages: tuple[Message, ...]
    """The loss is on the assistant's messages."""
    media: Mapping[Modality, tuple[Media, ...]] = field(default_factory=dict)
    """Media of each modality, in the order of their placeholders."""
    where: str = ""
    """File and line, for messages."""

    @property
    def text(self) -> str:
        """The first message; that of an example without a conversation."""
        return self.messages[0].content

    def items(self, modalities: Sequence[Modality]) -> tuple[tuple[Modality, Media], ...]:
        """The media of some modalities in the order of their placeholders, whichever they are of. Raises `UserError`
        if these are not as many."""
        order = [m for message in self.messages for m in placeholders_in(message.content) if m in modalities]
        remaining = {modality: list(self.media.get(modality, ())) for modality in modalities}
        for modality, media in remaining.items():
            if order.count(modality) != len(media):
                raise UserError(
                    f"has {order.count(modality)} {PLACEHOLDERS[modality]} for {len(media)} {modality} files; give one "
                    "for each"
                )
        return tuple((modality, remaining[modality].pop(0)) for modality in order)


@contextmanager
def in_example(example: Example) -> Iterator[None]:
    """Turns a `ValueError` about an example into a `UserError` that names its file and line."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{example.where or example.id}: {error}") from None


def placeholders_in(text: str) -> list[Modality]:
    """The modalities of the placeholders in a text, in their order."""
    modality_of = {placeholder: modality for modality, placeholder in PLACEHOLDERS.items()}
    return [modality_of[found] for found in re.findall("|".join(map(re.escape, modality_of)), text)]


class ExampleSource(Protocol):
    """A finite list of examples; each access gives the same example again."""

    @property
    def fingerprint(self) -> str:
        """Differs between sources of different examples, as far as is known without reading all of them."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user, such as which keys of a file are not read."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...
