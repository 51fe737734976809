"""How one encoder is fed: its HuggingFace processor makes the tensors; their layout is `EncoderLayout`'s.

An image processor for whose sizes no rule is known is asked for a blank image of the same size, once for each size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.signal import resample_poly
from torch import Tensor

from motet.data.conversation.example import Media
from motet.data.preparation.encoder_layout import EncoderLayout
from motet.data.preparation.processor_sizes import Size


@dataclass(frozen=True)
class EncoderInput(EncoderLayout):
    """`processor`: of images, an image processor; of sounds, a feature extractor like Whisper's."""

    def features(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """The tensors of one sample's images or clips (docs/architecture.md, "Batch")."""
        if self.modality == "image":
            return {"pixel_values": self._process_images([item.load() for item in media])["pixel_values"]}
        rate = self.processor.sampling_rate
        waves = [resample(item.load(), item.size()[1], rate) for item in media]
        outputs = self.processor(waves, sampling_rate=rate, return_tensors="pt")
        return {"input_features": outputs["input_features"]}

    def processor_values(self) -> Mapping[str, Any]:
        return self.processor.to_dict()

    def processed_size(self, size: Size) -> Size:
        if self.has_rule:
            return super().processed_size(size)
        outputs = self._process_images([Image.new("RGB", size[::-1])])
        if "image_sizes" in outputs:
            height, width = (int(side) for side in torch.as_tensor(outputs["image_sizes"])[0])
        else:
            height, width = outputs["pixel_values"].shape[-2:]
        return height, width

    def _process_images(self, images: list[Image.Image]) -> Mapping[str, Any]:
        outputs = self.processor(images=images, return_tensors="pt")
        assert isinstance(outputs["pixel_values"], Tensor)
        return outputs


def resample(wave: np.ndarray, own_rate: int, rate: int) -> np.ndarray:
    """float32 [samples] at another rate (Hz), by a polyphase filter."""
    if own_rate == rate:
        return wave
    divisor = gcd(own_rate, rate)
    return resample_poly(wave, rate // divisor, own_rate // divisor).astype(np.float32)
