"""How one encoder is fed: its HuggingFace processor, and what it will make of an image or a clip of a given size.

Layouts are written from sizes alone. Where the rule is plain (Qwen2.5-VL's patches, the frames of a sound) it is
computed; any other image processor is asked for a blank image of the same size, once for each size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, gcd
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.signal import resample_poly
from torch import Tensor

from motet.data.example import PLACEHOLDERS, Media, Modality
from motet.data.sample import Segment
from motet.errors import UserError
from motet.models.token_counts import FeatureSelect, encoder_segment, grid_of

Size = tuple[int, int]

FIXED_SIZE_FAMILIES = ("siglip_vision_model", "clip_vision_model")
"""Their positions are tables for images of one size."""


@dataclass(frozen=True)
class EncoderInput:
    modality: Modality
    processor: Any
    """Of images: an image processor. Of sounds: a feature extractor like Whisper's."""
    config: Any
    """The encoder's transformers configuration."""
    feature_select: FeatureSelect = "patch"
    placeholder: str | None = None
    """The tokenizer's token for it; None: the same as in conversations, `<image>` or `<audio>`."""
    name: str = "encoder"
    """Of the module, for messages."""
    _grids: dict[Size, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.modality == "audio":
            num_frames = 2 * self.config.max_source_positions
            if self.processor.nb_max_frames != num_frames:
                raise UserError(
                    f"{self.name}: its feature extractor makes {self.processor.nb_max_frames} frames of a clip, but "
                    f"the encoder takes {num_frames} (2 x max_source_positions); give the encoder's own"
                )

    @property
    def token(self) -> str:
        """The placeholder in the tokenizer's words."""
        return self.placeholder or PLACEHOLDERS[self.modality]

    def segment(self, item: int, media: Media) -> Segment:
        """The item's entry in the encoder's layout. Raises `ValueError` if the encoder cannot take it."""
        return encoder_segment(self.config, item=item, grid=self.grid(media.size()), feature_select=self.feature_select)

    def grid(self, size: Size) -> tuple[int, ...]:
        """Of an image of (height, width) pixels or a sound of (samples, Hz)."""
        if size not in self._grids:
            self._grids[size] = self._audio_grid(size) if self.modality == "audio" else self._image_grid(size)
        return self._grids[size]

    def features(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """The tensors of one sample's images or clips (docs/architecture.md, "Batch")."""
        if self.modality == "image":
            return {"pixel_values": self._process_images([item.load() for item in media])["pixel_values"]}
        rate = self.processor.sampling_rate
        waves = [resample(item.load(), item.size()[1], rate) for item in media]
        outputs = self.processor(waves, sampling_rate=rate, return_tensors="pt")
        return {"input_features": outputs["input_features"]}

    def _process_images(self, images: list[Image.Image]) -> Mapping[str, Any]:
        outputs = self.processor(images=images, return_tensors="pt")
        assert isinstance(outputs["pixel_values"], Tensor)
        return outputs

    def _audio_grid(self, size: Size) -> tuple[int, ...]:
        num_samples = resampled_length(size, self.processor.sampling_rate)
        if num_samples > self.processor.n_samples:
            raise UserError(
                f"the clip lasts {size[0] / size[1]:.1f} s, but {self.name} takes at most "
                f"{self.processor.n_samples / self.processor.sampling_rate:g} s; cut it"
            )
        return grid_of(self.config, num_mel_frames=ceil(num_samples / self.processor.hop_length))

    def _image_grid(self, size: Size) -> tuple[int, ...]:
        if self.config.model_type == "qwen2_5_vl_vision":
            return grid_of(self.config, image_grid_thw=(1, *self._qwen2_vl_patches(size)))
        outputs = self._process_images([Image.new("RGB", size[::-1])])
        if "image_sizes" in outputs:
            height, width = (int(side) for side in torch.as_tensor(outputs["image_sizes"])[0])
        else:
            height, width = outputs["pixel_values"].shape[-2:]
        own = self.config.image_size
        if self.config.model_type in FIXED_SIZE_FAMILIES and (height, width) != (own, own):
            raise UserError(
                f"its image processor makes {height} x {width} pixels, but {self.name} takes {own} x {own}; "
                "give the encoder's own image processor"
            )
        return grid_of(self.config, image_size=(height, width))

    def _qwen2_vl_patches(self, size: Size) -> Size:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        patch, bounds = self.processor.patch_size, self.processor.size
        height, width = smart_resize(
            *size,
            factor=patch * self.processor.merge_size,
            min_pixels=bounds["shortest_edge"],
            max_pixels=bounds["longest_edge"],
        )
        return height // patch, width // patch


def resampled_length(size: Size, rate: int) -> int:
    """Samples of a sound of (samples, Hz) after `resample`."""
    num_samples, own_rate = size
    divisor = gcd(own_rate, rate)
    return ceil(num_samples * (rate // divisor) / (own_rate // divisor))


def resample(wave: np.ndarray, own_rate: int, rate: int) -> np.ndarray:
    """float32 [samples] at another rate (Hz), by a polyphase filter."""
    if own_rate == rate:
        return wave
    divisor = gcd(own_rate, rate)
    return resample_poly(wave, rate // divisor, own_rate // divisor).astype(np.float32)
