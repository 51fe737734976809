"""Images and sounds in files. Their headers tell the size; they are decoded when they are loaded. Pure: no torch.

Images: what Pillow reads. Sounds: what libsndfile reads (WAV, FLAC, Ogg, MP3); several channels are averaged.
"""

import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from motet.errors import UserError


@dataclass(frozen=True)
class ImageFile:
    path: Path

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
                return Image.open(self.path)
        except FileNotFoundError:
            raise UserError(f"{self.path}: there is no such file; give the path of an image") from None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = "is no image that Pillow reads" if "cannot identify" in str(error) else f"is refused ({error})"
            raise UserError(f"{self.path}: {reason}; replace the file") from None


@dataclass(frozen=True)
class SoundFile:
    path: Path

    def size(self) -> tuple[int, int]:
        """(samples, Hz). Raises `UserError` if it is not a sound, or an empty one."""
        return self._size

    @cached_property
    def _size(self) -> tuple[int, int]:
        self._check_presence()
        try:
            header = soundfile.info(self.path)
        except (soundfile.SoundFileError, OSError) as error:
            raise UserError(f"{self.path}: is no sound that libsndfile reads ({error}); replace the file") from None
        if not header.frames:
            raise UserError(f"{self.path}: is an empty clip; replace the file, or leave it out")
        return header.frames, header.samplerate

    def load(self) -> np.ndarray:
        """Raises `UserError` if it cannot be decoded, or is shorter than its header says."""
        self._check_presence()
        try:
            samples, _ = soundfile.read(self.path, dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, OSError) as error:
            raise UserError(f"{self.path}: cannot be decoded ({error}); replace the clip") from None
        if len(samples) != self.size()[0]:
            raise UserError(f"{self.path}: holds {len(samples)} of {self.size()[0]} samples; replace the clip")
        if not np.isfinite(samples).all():
            raise UserError(f"{self.path}: holds samples that are not finite numbers; replace the clip")
        return samples.mean(axis=1)

    def _check_presence(self) -> None:
        if not self.path.is_file():
            raise UserError(f"{self.path}: there is no such file; give the path of a sound")
