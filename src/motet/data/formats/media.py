"""Images and sounds in files. Sizes are read from the headers; files are decoded on `load`. Imports no torch.

What a header says is compared with the limits before anything is decoded.

Images: what Pillow reads. Sounds: what libsndfile reads (WAV, FLAC, Ogg, MP3); several channels are averaged. Videos:
`motet.data.formats.video`.
"""

import io
import os
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

from motet.config import USUAL_LIMITS, FileLimits
from motet.data.example import PLACEHOLDERS, TO_GENERATE, TO_GENERATE_AUDIO, Media, Modality
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


MOST_HZ = 768_000
"""Highest rate of a clip; resampling one of another rate takes memory in proportion to both."""
RESAMPLED_HZ = 48_000
"""Highest rate that encoders' feature extractors take."""
UNKNOWN_LENGTHS = (8, 8 + 0xFFFFFFFF)
"""Lengths in the header of a WAV file that was written into a pipe."""


def _to_read(path: Path | StoredFile) -> Path | BinaryIO:
    return path if isinstance(path, Path) else path.open()


@dataclass(frozen=True)
class ImageFile:
    path: Path | StoredFile
    limits: FileLimits = USUAL_LIMITS

    def size(self) -> tuple[int, int]:
        """(height, width). Raises `UserError` if it is not an image."""
        return self._size

    @cached_property
    def _size(self) -> tuple[int, int]:
        with self._opened() as image:
            height, width = image.height, image.width
        if height * width > self.limits.image_pixels:
            raise UserError(
                f"{self.path}: has {height} x {width} pixels; replace the image, or raise "
                f"data.limits.image_pixels ({self.limits.image_pixels})"
            )
        return height, width

    def load(self) -> Image.Image:
        """Raises `UserError` if it cannot be decoded."""
        self.size()
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
    limits: FileLimits = USUAL_LIMITS

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
        if not 1 <= header.samplerate <= MOST_HZ:
            raise UserError(f"{self.path}: has {header.samplerate} samples per second; replace the clip")
        seconds, samples = header.frames / header.samplerate, header.frames * header.channels
        if seconds > self.limits.audio_s:
            raise UserError(
                f"{self.path}: lasts {seconds:.6g} s; replace the clip, or raise data.limits.audio_s "
                f"({self.limits.audio_s:g})"
            )
        if max(samples, header.frames * RESAMPLED_HZ / header.samplerate) > self.limits.audio_samples:
            raise UserError(
                f"{self.path}: has {samples} samples, {seconds:.6g} s; replace the clip, or raise "
                f"data.limits.audio_samples ({self.limits.audio_samples})"
            )
        self._check_length()
        return header.frames, header.samplerate

    def _check_length(self) -> None:
        """Refuses a WAV file that is shorter than its header says, which libsndfile reads as far as it goes."""
        file = self.path.open("rb") if isinstance(self.path, Path) else self.path.open()
        with file:
            header = file.read(12)
            told = 8 + int.from_bytes(header[4:8], "little")
            if header[:4] != b"RIFF" or header[8:] != b"WAVE" or told in UNKNOWN_LENGTHS:
                return
            length = file.seek(0, os.SEEK_END)
        if length < told:
            raise UserError(f"{self.path}: is truncated, {length} of {told} bytes; replace the clip")

    def load(self) -> np.ndarray:
        """Raises `UserError` if it cannot be decoded, or is shorter than its header says."""
        self.size()
        try:
            samples, _ = soundfile.read(_to_read(self.path), dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, OSError) as error:
            raise UserError(f"{self.path}: cannot be decoded ({error}); replace the clip") from None
        if len(samples) != self.size()[0]:
            raise UserError(f"{self.path}: has only {len(samples)} of {self.size()[0]} samples; replace the clip")
        if not np.isfinite(samples).all():
            raise UserError(f"{self.path}: has samples that are not finite numbers; replace the clip")
        return samples.mean(axis=1)

    def _check_presence(self) -> None:
        if isinstance(self.path, Path) and not self.path.is_file():
            raise UserError(f"{self.path}: there is no such file; give the path of a sound")


def resample(wave: np.ndarray, own_rate: int, rate: int) -> np.ndarray:
    """float32 [samples] at another rate (Hz), by a polyphase filter."""
    if own_rate == rate:
        return wave
    from scipy.signal import resample_poly  # Takes nearly two seconds to import.

    divisor = gcd(own_rate, rate)
    return resample_poly(wave, rate // divisor, own_rate // divisor).astype(np.float32)


@dataclass(frozen=True)
class MediaKind:
    """Files of one modality."""

    open: Callable[[Path | StoredFile, FileLimits], Media]
    suffixes: tuple[str, ...]
    """Suffixes of members of WebDataset shards."""


MEDIA_KINDS: dict[Modality, MediaKind] = {
    "image": MediaKind(ImageFile, ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")),
    "audio": MediaKind(SoundFile, ("wav", "flac", "ogg", "mp3")),
    "video": MediaKind(VideoFile, ("mp4", "m4v", "mov", "webm", "mkv", "avi")),
    TO_GENERATE: MediaKind(ImageFile, ()),
    TO_GENERATE_AUDIO: MediaKind(SoundFile, ()),
}
"""By modality."""


def register_modality(
    modality: Modality, open_file: Callable[[Path | StoredFile], Media], suffixes: tuple[str, ...]
) -> None:
    """Adds a modality, or replaces one that was added. Records name its files under its name, or it with an s, and mark
    their places by `<name>`."""
    PLACEHOLDERS[modality] = f"<{modality}>"
    MEDIA_KINDS[modality] = MediaKind(lambda path, limits: open_file(path), suffixes)
