"""Layouts of the images and sounds that a generator makes: query tokens at their placeholders, and latents.

A conversation names images under `generate`, with `<generate>` in the text where each is to be drawn, and sounds under
`generate_audio`. Images are taken at their own size: height and width are multiples of the generator's patch. Their
latents are pixels between -1 and 1, of one channel (grey) or three. A sound's are its spectrogram, an image of one
channel of mel bands by frames; silence fills its last patch. Latents of an autoencoder are made by
`motet.data.latents`; their sizes follow from its configuration. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import ceil
from typing import Any

import numpy as np

from motet.assignment.sample import Segment
from motet.config import AutoencoderConfig, GeneratorConfig, SpectrogramConfig
from motet.data.encoder_layout import resampled_length
from motet.data.example import PLACEHOLDERS, TO_GENERATE, TO_GENERATE_AUDIO, Example, Media, Modality
from motet.data.formats.media import resample
from motet.errors import UserError
from motet.families.hf_config import stored_values

MODES = {1: "L", 3: "RGB"}
"""Pillow's modes by the number of channels."""
AUTOENCODER_DEFAULTS: Mapping[str, Any] = {
    "in_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (64,),
    "scaling_factor": 0.18215,
    "shift_factor": None,
}
"""diffusers' defaults of AutoencoderKL."""
FLOOR_DB = 80.0
"""Decibels below full scale at which spectrograms end."""


def generated_modality(part: GeneratorConfig) -> Modality:
    return TO_GENERATE_AUDIO if part.makes_sounds else TO_GENERATE


@dataclass(frozen=True)
class QueryLayout:
    """A generator's input from a text: query tokens, which are in it as an encoder's outputs are, or the prompt."""

    num_queries: int | None
    """None: it reads everything up to the placeholder, which is an ordinary token."""
    target: str
    """The generator."""
    placeholder: str | None = None
    """The tokenizer's token at their places; None: `<generate>` or `<generate_audio>`."""
    modality: Modality = TO_GENERATE

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return (self.modality,)

    @property
    def token(self) -> str:
        return self.placeholder or PLACEHOLDERS[self.modality]

    def lay_out(self, example: Example, layouts: Mapping[str, Any]) -> tuple[tuple[Segment, ...], int | None]:
        if self.num_queries is None:
            return (), None
        number = len(example.items(self.modalities))
        return tuple(Segment(self.num_queries, item=item) for item in range(number)), None


@dataclass(frozen=True)
class GeneratedLayout:
    """The images, or spectrograms, that a generator learns to make."""

    config: Mapping[str, Any]
    """Configuration of the generator."""
    per: str
    """Unit of the average of its loss: "image" or "place"."""
    name: str
    """Key of the run file, for messages."""
    spectrogram: SpectrogramConfig | None = None
    """None: it makes images."""
    autoencoder: AutoencoderConfig | None = None
    """None: images are learned as pixels."""
    modality: Modality = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "modality", TO_GENERATE if self.spectrogram is None else TO_GENERATE_AUDIO)
        channels, patch = self.config["latent_channels"], self.config["place_side"]
        packed = self.config["in_channels"] // channels
        if self.autoencoder is not None:
            own = self._stored["latent_channels"]
            if channels != own:
                raise UserError(
                    f"{self.name}.values.in_channels: is {packed * channels}, but the autoencoder has {own} latent "
                    f"channels; give {packed * own}"
                )
        elif self.spectrogram is None and channels not in MODES:
            raise UserError(
                f"{self.name}.values.in_channels: is {packed * channels}, but images are learned as pixels of 1 "
                f"channel (grey) or 3; give {packed} or {3 * packed}, or an autoencoder"
            )
        if self.spectrogram is not None and channels != 1:
            raise UserError(
                f"{self.name}.values.in_channels: is {packed * channels}, but a spectrogram has 1 channel; give "
                f"{packed}"
            )
        if self.spectrogram is not None and self.spectrogram.num_mels % patch:
            raise UserError(
                f"{self.name}.spectrogram.num_mels: is {self.spectrogram.num_mels}; give a multiple of {patch}, the "
                "patch size"
            )

    def lay_out(self, example: Example, layouts: Mapping[str, Any]) -> tuple[tuple[Segment, ...], int | None]:
        segments = []
        for item, (_, media) in enumerate(example.items((self.modality,))):
            rows, columns = self._grid(media)
            segments.append(Segment(rows * columns, item=item, grid=(rows, columns)))
        number = sum(segment.num_tokens for segment in segments) if self.per == "place" else len(segments)
        return tuple(segments), number

    @cached_property
    def _stored(self) -> Mapping[str, Any]:
        """The autoencoder's configuration."""
        assert self.autoencoder is not None
        return {**AUTOENCODER_DEFAULTS, **stored_values(self.autoencoder, f"{self.name}.autoencoder")}

    @cached_property
    def _side(self) -> int:
        """Pixels on a side of a place."""
        patch: int = self.config["place_side"]
        return patch if self.autoencoder is None else patch * 2 ** (len(self._stored["block_out_channels"]) - 1)

    def _grid(self, media: Media) -> tuple[int, int]:
        most = self.config.get("pos_embed_max_size")
        height, width = self._size(media)
        rows, columns = height // self._side, width // self._side
        if height % self._side or width % self._side:
            what = "the patch size" if self.autoencoder is None else "the side of a patch of latents"
            raise UserError(f"generate: an image has {height} x {width} pixels; give multiples of {self._side}, {what}")
        if most is not None and max(rows, columns) > most:
            raise UserError(
                f"{self.modality}: {'an image' if self.spectrogram is None else 'a spectrogram'} has {height} x "
                f"{width} pixels, but {self.name} makes at most {most * self._side} on a side (pos_embed_max_size)"
            )
        return rows, columns

    def _size(self, media: Media) -> tuple[int, int]:
        """Height and width of what the generator sees."""
        if self.spectrogram is None:
            height, width = media.size()
            return height, width
        num_samples = resampled_length(media.size(), self.spectrogram.sampling_rate)
        patch = self.config["place_side"]
        return self.spectrogram.num_mels, patch * ceil(num_samples / (self.spectrogram.hop * patch))

    def latents(self, example: Example) -> np.ndarray:
        """Pixels of all images, or spectrograms, one after the other: float32 [sum of channels x height x width]."""
        parts = [np.zeros(0, dtype=np.float32)]
        for _, media in example.items((self.modality,)):
            if self.spectrogram is not None:
                wave = resample(media.load(), media.size()[1], self.spectrogram.sampling_rate)
                parts.append(log_mel(wave, self.spectrogram, self._size(media)[1]).reshape(-1))
                continue
            parts.append(pixels_of(media.load(), self.config["latent_channels"]).reshape(-1))
        return np.concatenate(parts)


def pixels_of(image: Any, channels: int) -> np.ndarray:
    """Pixels of a picture between -1 and 1: float32 [channels, height, width]."""
    pixels = np.asarray(image.convert(MODES[channels]), dtype=np.float32) / 127.5 - 1
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def log_mel(wave: np.ndarray, options: SpectrogramConfig, num_frames: int) -> np.ndarray:
    """The spectrogram of a sound: float32 [mel bands, frames] between -1 (80 dB below full scale) and 1 (a sine of full
    scale within one band). Frame t is centered at sample t x hop; silence stands before the sound and after it.

    `wave`: float32 [samples] at the options' rate."""
    window = np.hanning(options.window + 1)[:-1]
    before = options.window // 2
    padded = np.zeros(max(num_frames * options.hop, before + len(wave)) + options.window)
    padded[before : before + len(wave)] = wave
    starts = options.hop * np.arange(num_frames)
    frames = padded[starts[:, None] + np.arange(options.window)] * window
    power = np.abs(np.fft.rfft(frames)) ** 2 * (2 / window.sum()) ** 2
    bands = power @ mel_bands(options.sampling_rate, options.window, options.num_mels)
    decibels = 10 * np.log10(np.maximum(bands, 10 ** (-FLOOR_DB / 10)))
    return np.ascontiguousarray(np.minimum(1 + 2 * decibels / FLOOR_DB, 1).T.astype(np.float32))


@cache
def mel_bands(sampling_rate: int, window: int, num_mels: int) -> np.ndarray:
    """Triangles that overlap by half, evenly spaced in mels (2595 log10(1 + f / 700 Hz)): [frequencies, bands]."""
    frequencies = np.fft.rfftfreq(window, 1 / sampling_rate)
    corners = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + sampling_rate / 1400), num_mels + 2) / 2595) - 1)
    low, peak, high = corners[:-2], corners[1:-1], corners[2:]
    rising = (frequencies[:, None] - low) / (peak - low)
    falling = (high - frequencies[:, None]) / (high - peak)
    return np.maximum(0, np.minimum(rising, falling))
