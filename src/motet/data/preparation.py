"""Makes the tensors of samples from examples, by the tokenizers and processors of transformers.

Layouts are those of `motet.data.layouts`. An image processor whose sizes follow no known rule is asked for a blank
image, once for each size.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from motet.assignment.sample import Sample
from motet.data.codes import CodeLayout
from motet.data.composite import CompositePartLayout
from motet.data.encoder_layout import EncoderLayout, Size
from motet.data.example import Example, ExampleSource, Media, Modality, in_example
from motet.data.formats.media import resample
from motet.data.generated import GeneratedLayout, QueryLayout
from motet.data.latents import latent_features
from motet.data.layouts import CaptionLayout, ConversationLayout, ConversationText, SampleLayouts, TextLayout
from motet.families.encoders.token_counts import temporal_patch_size
from motet.plan import LANGUAGE_MODEL

NUM_SAMPLES_KEPT = 65_536
FEATURE_BYTES_KEPT = 256 * 2**20


@dataclass(frozen=True)
class EncoderInput(EncoderLayout):
    """An encoder of images or sounds with its processor of transformers.

    `processor`: an image processor, or a feature extractor like Whisper's."""

    def features(self, items: Sequence[tuple[Modality, Media]]) -> dict[str, Tensor]:
        """The tensors of the images, videos or clips of a sample (docs/architecture.md, "Batch")."""
        if self.modality == "image":
            return {"pixel_values": self._pixel_values(items)}
        rate = self.processor.sampling_rate
        waves = [resample(item.load(), item.size()[1], rate) for _, item in items]
        outputs = self.processor(waves, sampling_rate=rate, return_tensors="pt")
        return {"input_features": outputs["input_features"]}

    def _pixel_values(self, items: Sequence[tuple[Modality, Media]]) -> Tensor:
        frames_per_patch = temporal_patch_size(self.config)
        pictures: list[list[Image.Image]] = []
        for modality, item in items:
            frames = self._frames(item) if modality == "video" else [item.load()]
            missing = -len(frames) % frames_per_patch if modality == "video" else 0
            pictures.append([*frames, *frames[-1:] * missing])
        if frames_per_patch == 1:
            return self._process_images([picture for own in pictures for picture in own])["pixel_values"]
        pieces = []
        for (modality, _), own in zip(items, pictures, strict=True):
            pixels = self._process_images(own)["pixel_values"]
            pieces.append(join_frames(pixels, len(own), frames_per_patch) if modality == "video" else pixels)
        return torch.cat(pieces)

    def _frames(self, video: Any) -> list[Image.Image]:
        return video.load(self.frame_times(video.size()))

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


def join_frames(pixels: Tensor, num_frames: int, frames_per_patch: int) -> Tensor:
    """Patches of several frames out of those in which an image stands for all of them.

    `pixels`: [num_frames x patches of one, channels x frames_per_patch x pixels of a patch], frame after frame."""
    each = pixels.view(
        num_frames // frames_per_patch,
        frames_per_patch,
        -1,
        3,
        frames_per_patch,
        pixels.shape[1] // 3 // frames_per_patch,
    )
    joined = torch.stack([each[:, k, :, :, k] for k in range(frames_per_patch)], dim=3)
    return joined.reshape(-1, pixels.shape[1])


@dataclass(frozen=True, eq=False)
class Preparation(SampleLayouts):
    """Makes metadata and tensors of samples from examples. Encoders of images and sounds are `EncoderInput`s."""

    def features(self, example: Example, module: str) -> dict[str, Tensor]:
        """The tensors of one module. Raises `UserError` naming the file that cannot be decoded."""
        layout = self.modules[module]
        if isinstance(layout, CompositePartLayout):
            with in_example(example):
                return layout.features(example)
        if isinstance(layout, ConversationLayout):
            text = self._conversation_text(example)
            return {"input_ids": torch.tensor(text.input_ids), "labels": torch.tensor(text.labels)}
        if isinstance(layout, TextLayout):
            return {"input_ids": torch.tensor([layout.ids(example.text)])}
        if isinstance(layout, CaptionLayout):
            ids = torch.tensor(layout.ids(example.text))
            return {"input_ids": ids, "labels": ids}
        if isinstance(layout, QueryLayout):
            return {}
        if isinstance(layout, CodeLayout):
            return {"codes": torch.from_numpy(layout.codes(example))}
        if isinstance(layout, GeneratedLayout) and layout.autoencoder is not None:
            return latent_features(layout, example)
        if isinstance(layout, GeneratedLayout):
            return {"latents": torch.from_numpy(layout.latents(example))}
        assert isinstance(layout, EncoderInput)
        with in_example(example):
            return layout.features(layout.items(example))

    def prompt(self, example: Example) -> Tensor:
        """The token ids up to the beginning of the last answer, for generation; int64 [tokens]."""
        layout = self.modules[LANGUAGE_MODEL]
        if isinstance(layout, CompositePartLayout):
            return torch.tensor(layout.whole.prompt(example))
        return torch.tensor(self._conversation_text(example, without_last_answer=True).input_ids)

    def _conversation_text(self, example: Example, *, without_last_answer: bool = False) -> ConversationText:
        conversation = self.conversation
        with in_example(example):
            layouts = {name: encoder.lay_out(example, {})[0] for name, encoder in conversation.encoders.items()}
            return conversation.write(example, layouts, without_last_answer=without_last_answer)

    @property
    def tools(self) -> dict[str, Any]:
        """The tokenizer or processor of each module that reads samples."""
        tools = {}
        # The language model comes first: the order decides the fingerprints in checkpoints.
        for name in sorted(self.modules, key=lambda name: name != LANGUAGE_MODEL):
            layout = self.modules[name]
            if isinstance(layout, ConversationLayout | TextLayout | CaptionLayout):
                tools[name] = layout.tokenizer
            elif isinstance(layout, EncoderLayout) and layout.processor is not None:
                tools[name] = layout.processor
            elif isinstance(layout, CompositePartLayout) and name == LANGUAGE_MODEL:
                tools[name] = layout.whole.processor
        return tools

    def save(self, folder: Path) -> None:
        """Writes the tokenizer into the folder and each encoder's processor into a subfolder, for `from_pretrained`."""
        for name, tool in self.tools.items():
            tool.save_pretrained(folder if name == LANGUAGE_MODEL else folder / name)


class Dataset(Protocol):
    """Samples by index: metadata, and tensors separately."""

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Differs between different data, as far as is known without reading all of them."""

    def sample(self, index: int) -> Sample:
        """The metadata, without decoding pixels or waveforms."""

    def features(self, index: int, module: str) -> dict[str, Tensor]:
        """The sample's tensors for one module (docs/architecture.md, "Batch"), which must not be written to."""


@dataclass(frozen=True)
class ExampleDataset:
    """Examples that are prepared on access.

    The first `NUM_SAMPLES_KEPT` and the first `FEATURE_BYTES_KEPT` bytes stay in memory, so that a small set is
    prepared once. Later ones are prepared anew: epochs are in random order, for which no other choice is better.
    """

    examples: ExampleSource
    preparation: Preparation
    _samples: dict[int, Sample] = field(default_factory=dict, init=False, repr=False)
    _features: dict[tuple[int, str], dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False)
    _num_bytes: list[int] = field(default_factory=lambda: [0], init=False, repr=False)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def fingerprint(self) -> str:
        """The fingerprints of the examples and of all tokenizers and processors."""
        tools = {name: tool_fingerprint(tool) for name, tool in self.preparation.tools.items()}
        known = {"examples": self.examples.fingerprint, **tools}
        return ", ".join(f"{name} {value}" for name, value in known.items())

    @property
    def notes(self) -> tuple[str, ...]:
        return self.examples.notes

    def sample(self, index: int) -> Sample:
        if index in self._samples:
            return self._samples[index]
        sample = self.preparation.sample(self.examples[index])
        if len(self._samples) < NUM_SAMPLES_KEPT:
            self._samples[index] = sample
        return sample

    def features(self, index: int, module: str) -> dict[str, Tensor]:
        if (index, module) in self._features:
            return dict(self._features[index, module])
        features = self.preparation.features(self.examples[index], module)
        num_bytes = sum(tensor.nbytes for tensor in features.values())
        if self._num_bytes[0] + num_bytes <= FEATURE_BYTES_KEPT:
            self._num_bytes[0] += num_bytes
            self._features[index, module] = features
        return dict(features)


def tool_fingerprint(tool: Any) -> str:
    """A hash of everything that determines what a tokenizer or processor of transformers makes of its input."""
    if hasattr(tool, "backend_tokenizer"):
        described = [tool.backend_tokenizer.to_str(), tool.chat_template, tool.all_special_ids]
    else:
        described = tool.to_dict()
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:16]
