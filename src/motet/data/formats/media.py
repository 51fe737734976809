"""Images and sounds in files. Sizes are read from the headers; files are decoded on `load`. Imports no torch.

Images: what Pillow reads. Sounds: what libsndfile reads (WAV, FLAC, Ogg, MP3); several channels are averaged. Videos:
`motet.data.formats.video`.
"""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import soundfile
from PIL import Image
from scipy.signal import resample_poly

from motet.data.example import PLACEHOLDERS, Media, Modality
from motet.data.formats.video import VideoFile
from motet.errors import UserError


class StoredFile(Protocol):
    """A file inside another one; `str` of it names both."""

    def open(self) -> BinaryIO: ...


@dataclass(frozen=True)
class InMemory:
    """The content of a file, with a name for messages."""

    name: str
    content: bytes

    def __str__(self) -> str:
        return self.name

    def open(self) -> BinaryIO:
        return io.BytesIO(self.content)


def _to_read(path: Path | StoredFile) -> Path | BinaryIO:
    return path if isinstance(path, Path) else path.open()


@dataclass(frozen=True)
class ImageFile:
    path: Path | StoredFile

    def size(self) -> tuple[int, int]:
        """(height, width). Raises `UserError` if it is not an image."""
        return self._size

    @cached_property
    def _size(self) -> tuple[int, int]:
        with self._opened() as image:
            return image.height, image.width

    def load(self) -> Image.Image:
        """Raises `UserError` if it cannot be decoded."""
        with self._opened() as image:
            try:
                return image.convert("RGB")
            except (OSError, ValueError, SyntaxError) as error:
                raise UserError(f"{self.path}: cannot be decoded ({error}); replace the image") from None

    def _opened(self) -> Image.Image:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                return Image.open(_to_read(self.path))
        except FileNotFoundError:
            raise UserError(f"{self.path}: there is no such file; give the path of an image") from None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = "is no image that Pillow reads" if "cannot identify" in str(error) else f"is refused ({error})"
            raise UserError(f"{self.path}: {reason}; replace the file") from None


@dataclass(frozen=True)
class SoundFile:
    path: Path | StoredFile

    def size(self) -> tuple[int, int]:
        """(samples, Hz). Raises `UserError` if it is not a sound, or an empty one."""
        return self._size

    @cached_property
    def _size(self) -> tuple[int, int]:
        self._check_presence()
        try:
            header = soundfile.info(_to_read(self.path))
        except (soundfile.SoundFileError, OSError) as error:
            raise UserError(
                f"{self.path}: cannot be read as a sound by libsndfile ({error}); replace the file"
            ) from None
        if not header.frames:
            raise UserError(f"{self.path}: is an empty clip; replace the file, or leave it out")
        return header.frames, header.samplerate

    def load(self) -> np.ndarray:
        """Raises `UserError` if it cannot be decoded, or is shorter than its header says."""
        self._check_presence()
        try:
            samples, _ = soundfile.read(_to_read(self.path), dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, OSError) as error:
            raise UserError(f"{self.path}: cannot be decoded ({error}); replace the clip") from None
        if len(samples) != self.size()[0]:
            raise UserError(f"{self.path}: holds {len(samples)} of {self.size()[0]} samples; replace the clip")
        if not np.isfinite(samples).all():
            raise UserError(f"{self.path}: holds samples that are not finite numbers; replace the clip")
        return samples.mean(axis=1)

    def _check_presence(self) -> None:
        if isinstance(self.path, Path) and not self.path.is_file():
            raise UserError(f"{self.path}: there is no such file; give the path of a sound")


def resample(wave: np.ndarray, own_rate: int, rate: int) -> np.ndarray:
    """float32 [samples] at another rate (Hz), by a polyphase filter."""
    if own_rate == rate:
        return wave
    divisor = gcd(own_rate, rate)
    return resample_poly(wave, rate // divisor, own_rate // divisor).astype(np.float32)


@dataclass(frozen=True)
class MediaKind:
    """Files of one modality."""

    open: Callable[[Path | StoredFile], Media]
    suffixes: tuple[str, ...]
    """Suffixes of members of WebDataset shards."""


MEDIA_KINDS: dict[Modality, MediaKind] = {
    "image": MediaKind(ImageFile, ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")),
    "audio": MediaKind(SoundFile, ("wav", "flac", "ogg", "mp3")),
    "video": MediaKind(VideoFile, ("mp4", "m4v", "mov", "webm", "mkv", "avi")),
}
"""By modality."""


def register_modality(
    modality: Modality, open_file: Callable[[Path | StoredFile], Media], suffixes: tuple[str, ...]
) -> None:
    """Adds a modality, or replaces one that was added. Records name its files under its name, or it with an s, and mark
    their places by `<name>`."""
    PLACEHOLDERS[modality] = f"<{modality}>"
    MEDIA_KINDS[modality] = MediaKind(open_file, suffixes)
