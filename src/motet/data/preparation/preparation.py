"""How one encoder is fed: its HuggingFace processor makes the tensors; their layout is `EncoderLayout`'s.

An image processor for whose sizes no rule is known is asked for a blank image of the same size, once for each size.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.signal import resample_poly
from torch import Tensor

from motet.data.conversation.example import Example, Media
from motet.data.preparation.encoder_layout import EncoderLayout, Size
from motet.data.preparation.sample_layout import SampleLayouts
from motet.data.preparation.tower_layouts import TowerLayouts, text_of
from motet.errors import UserError
from motet.families.text_layout import TextLayout
from motet.plan import DECODER, LANGUAGE_MODEL

# What a tokenizer or a processor is known by: whatever decides what it makes of a text, an image or a sound.


def tool_fingerprint(tool: Any) -> str:
    """Of a fast tokenizer, an image processor or a feature extractor of transformers, as it was loaded."""
    if hasattr(tool, "backend_tokenizer"):
        described = [tool.backend_tokenizer.to_str(), tool.chat_template, tool.all_special_ids]
    else:
        described = tool.to_dict()
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:16]


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


# From examples to tensors: the tokens of a sample's layout, and what HuggingFace's processors make of its media.


@dataclass(frozen=True, eq=False)
class Preparation(SampleLayouts):
    """`tokenizer`: a fast tokenizer of transformers."""

    encoders: Mapping[str, EncoderInput]
    merge: str = "placeholder"

    def features(self, example: Example, module: str) -> dict[str, Tensor]:
        """The tensors of one module. Raises `UserError` naming the file that cannot be decoded."""
        if module == LANGUAGE_MODEL:
            _, text = self.lay_out(example)
            return {"input_ids": torch.tensor(text.input_ids), "labels": torch.tensor(text.labels)}
        encoder = self.encoders[module]
        try:
            return encoder.features(example.media[encoder.modality])
        except ValueError as error:
            raise UserError(f"{example.where or example.id}: {error}") from None

    def prompt(self, example: Example) -> Tensor:
        """For generation: token ids up to where the last answer begins, as long as the layout says; int64 [tokens]."""
        _, text = self.lay_out(example, without_last_answer=True)
        return torch.tensor(text.input_ids)

    @property
    def tools(self) -> dict[str, Any]:
        """By module: the tokenizer and the processors."""
        return {LANGUAGE_MODEL: self.tokenizer, **{name: encoder.processor for name, encoder in self.encoders.items()}}

    def save(self, folder: Path) -> None:
        """For `from_pretrained`: the tokenizer in the folder itself, each encoder's processor in one of its name."""
        self.tokenizer.save_pretrained(folder)
        for name, encoder in self.encoders.items():
            encoder.processor.save_pretrained(folder / name)


# From examples to the tensors that contrastive towers read.


@dataclass(frozen=True, eq=False)
class TowerPreparation(TowerLayouts):
    towers: Mapping[str, EncoderInput | TextLayout]

    def features(self, example: Example, module: str) -> dict[str, Tensor]:
        """The tensors of a tower or of the decoder. Raises `UserError` naming the file that cannot be decoded."""
        if module == DECODER:
            assert self.captions is not None
            ids = torch.tensor(self.captions.ids(text_of(example)))
            return {"input_ids": ids, "labels": ids}
        fed = self.towers[module]
        if isinstance(fed, TextLayout):
            return {"input_ids": torch.tensor([fed.ids(text_of(example))])}
        try:
            return fed.features(example.media[fed.modality])
        except ValueError as error:
            raise UserError(f"{example.where or example.id}: {error}") from None

    @property
    def tools(self) -> dict[str, Any]:
        """By tower, and of the caption decoder: its tokenizer or processor."""
        towers = {
            name: fed.tokenizer if isinstance(fed, TextLayout) else fed.processor for name, fed in self.towers.items()
        }
        return towers if self.captions is None else {**towers, DECODER: self.captions.tokenizer}
