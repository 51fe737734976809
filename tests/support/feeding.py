"""Every encoder family with its real processor, for the tests of what feeds it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from tiny_configs import ENCODERS
from transformers import WhisperFeatureExtractor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from motet.data.example import Media
from motet.data.preparation import EncoderInput

SQUARE = SiglipImageProcessorPil(size={"height": 96, "width": 96})
CROPPED = CLIPImageProcessorPil(size={"shortest_edge": 110}, crop_size={"height": 96, "width": 96})
RAGGED = PixtralImageProcessorPil(patch_size={"height": 8, "width": 8}, size={"longest_edge": 96})
MERGED = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 4096})
SOUND = WhisperFeatureExtractor(feature_size=16, chunk_length=1)

PROCESSORS = {
    "siglip": SQUARE,
    "siglip-no-head": SQUARE,
    "clip": CROPPED,
    "dinov2": CROPPED,
    "dinov2-swiglu": CROPPED,
    "pixtral": RAGGED,
    "qwen2_5_vl": MERGED,
    "whisper": SOUND,
    "qwen2_audio": SOUND,
}
FAMILIES = tuple(PROCESSORS)


@dataclass(frozen=True)
class Item:
    """An image or a sound in memory."""

    value: Any
    given_size: tuple[int, int]

    def size(self) -> tuple[int, int]:
        return self.given_size

    def load(self) -> Any:
        return self.value


def encoder_input(family: str, feature_select: str = "patch") -> EncoderInput:
    modality = "audio" if PROCESSORS[family] is SOUND else "image"
    return EncoderInput(modality, PROCESSORS[family], ENCODERS[family][0], feature_select)


def items(family: str, sizes: list[tuple[int, int]]) -> list[Media]:
    """Images of (height, width), or sounds of (samples, Hz)."""
    rng = np.random.default_rng(0)
    if PROCESSORS[family] is SOUND:
        return [Item(rng.uniform(-1, 1, size[0]).astype(np.float32), size) for size in sizes]
    return [Item(Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)), size) for size in sizes]


def sizes_for(family: str) -> list[tuple[int, int]]:
    if PROCESSORS[family] is SOUND:
        return [(16_000, 16_000), (1_601, 16_000), (5_000, 8_000), (40_000, 44_100), (1_760, 16_000)]
    return [(96, 96), (30, 80), (200, 130), (97, 31), (8, 8)]
