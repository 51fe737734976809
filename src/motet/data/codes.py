"""Layouts of sounds that a generator makes as codes of an audio codec, and the codes, made when samples are prepared.

The codec of transformers is frozen. Its codes are kept on disk under the hash of the sound and of the codec's weights,
so a sound is encoded once for all epochs, runs and processes. torch is imported when the first sound is encoded.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from motet.assignment.sample import Segment
from motet.config import CodecConfig
from motet.data.encoder_layout import resampled_length
from motet.data.example import TO_GENERATE_AUDIO, Example, Media
from motet.data.formats.media import resample
from motet.errors import UserError, one_line
from motet.families.hf_config import stored_folder
from motet.shapes.codes import CODEC_CLASSES, Codec
from motet.shapes.shape_card import cache_folder


@dataclass(frozen=True)
class CodeLayout:
    """The sounds that a generator learns to make, as codes."""

    codec: Codec
    stored: CodecConfig
    most_tokens: int
    """Most tokens that the decoder can read of one sound."""
    per: str
    """Unit of the average of its loss: "image", a sound, or "place", a token."""
    name: str
    """Key of the run file, for messages."""

    def lay_out(self, example: Example, layouts: Mapping[str, Any]) -> tuple[tuple[Segment, ...], int | None]:
        segments = []
        for item, (_, media) in enumerate(example.items((TO_GENERATE_AUDIO,))):
            num_tokens = self.codec.num_tokens(self._num_frames(media))
            if num_tokens > self.most_tokens:
                raise UserError(
                    f"generate_audio: a sound has {num_tokens - 1} codes, but {self.name} makes at most "
                    f"{self.most_tokens - 1} (values.n_positions); give shorter ones, or fewer num_codebooks"
                )
            segments.append(Segment(num_tokens, item=item))
        number = sum(segment.num_tokens for segment in segments) if self.per == "place" else len(segments)
        return tuple(segments), number

    def codes(self, example: Example) -> np.ndarray:
        """Tokens of all sounds, one after the other, without those at their edges: int64 [sum of codes]."""
        parts = [np.zeros(0, dtype=np.int64)]
        for _, media in example.items((TO_GENERATE_AUDIO,)):
            wave = resample(media.load(), media.size()[1], self.codec.sampling_rate)
            parts.append(self._encoded(np.asarray(wave, dtype=np.float32), self._num_frames(media)))
        return np.concatenate(parts)

    def _num_frames(self, media: Media) -> int:
        return self.codec.num_frames(resampled_length(media.size(), self.codec.sampling_rate))

    def _encoded(self, wave: np.ndarray, num_frames: int) -> np.ndarray:
        from motet.data.latents import digest_of_weights, keep

        folder = stored_folder(self.stored)
        digest = hashlib.sha256(digest_of_weights(folder) + f"{self.codec}".encode() + wave.tobytes())
        path = cache_folder("codes") / f"{digest.hexdigest()[:40]}.npy"
        try:
            codes: np.ndarray = np.load(path)
        except (OSError, ValueError, EOFError):
            codes = encode(folder, self.codec, wave, num_frames, self.name)
            keep(path, codes)
        return codes


def encode(folder: Path, codec: Codec, wave: np.ndarray, num_frames: int, name: str) -> np.ndarray:
    """Tokens of a sound, frame after frame: int64 [frames x codebooks].

    `wave`: float32 [samples] at the codec's rate; silence fills the last frame. Raises `UserError`."""
    import torch

    padded = torch.zeros(1, 1, num_frames * codec.hop)
    padded[0, 0, : len(wave)] = torch.from_numpy(wave)[: padded.shape[-1]]
    model = _opened(folder, CODEC_CLASSES[codec.model_type], name)
    with torch.no_grad():
        found = model.encode(padded, **{_NUMBER_KEYS[codec.model_type]: codec.num_codebooks}).audio_codes[0]
    if tuple(found.shape) != (codec.num_codebooks, num_frames):
        raise UserError(
            f"{name}.codec: {folder} makes {found.shape[0]} x {found.shape[1]} codes of a sound, but its config.json "
            f"says {codec.num_codebooks} x {num_frames}; is it another model's?"
        )
    first = 1 + codec.codebook_size * torch.arange(codec.num_codebooks)
    return (found + first[:, None]).T.flatten().numpy().astype(np.int64)


_NUMBER_KEYS: Mapping[str, str] = {"mimi": "num_quantizers", "dac": "n_quantizers"}
"""What `encode` of each codec calls the number of codebooks."""


@cache
def _opened(folder: Path, class_name: str, name: str) -> Any:
    """A codec of this process."""
    from safetensors import SafetensorError

    from motet.families.classes import transformers_class

    try:
        model = transformers_class(class_name).from_pretrained(folder, trust_remote_code=False, use_safetensors=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{name}.codec: {folder} cannot be loaded ({one_line(error)})") from None
    return model.float().eval()
