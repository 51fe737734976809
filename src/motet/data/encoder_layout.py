"""Layouts of images and sounds for an encoder, from sizes and configurations alone. Imports no torch.

The size of a processed image or sound follows from the configuration of the HuggingFace processor, by the rules in
`RULES`; the processors' classes, which import torch, are not needed. Tests compare every rule with its processor.
Image processors of other types must be asked for the size themselves (`motet.data.preparation.EncoderInput`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, gcd
from typing import Any

from motet.assignment.sample import Segment
from motet.config import VideoConfig
from motet.data.example import PLACEHOLDERS, Example, Media, Modality, VideoSize
from motet.errors import UserError
from motet.families.encoders.token_counts import (
    FeatureSelect,
    Pooling,
    config_value,
    encoder_segment,
    grid_of,
    modalities_of,
    pooled,
    temporal_patch_size,
)

Size = tuple[int, int]
"""Size of an image, (height, width) in pixels, or of a sound, (samples, Hz)."""

Layouts = Mapping[str, tuple[Segment, ...]]
"""By module, one segment for each of its items or runs of tokens."""

Values = Mapping[str, Any]
"""The content of a preprocessor_config.json."""

ImageRule = Callable[[Size], Size]

TYPE_OF_FAMILY: Mapping[str, str] = {
    "siglip_vision_model": "SiglipImageProcessor",
    "clip_vision_model": "CLIPImageProcessor",
    "dinov2": "BitImageProcessor",
    "pixtral": "PixtralImageProcessor",
    "qwen2_5_vl_vision": "Qwen2VLImageProcessor",
}
"""The processor's type by the encoder's `model_type`, for configurations that name no type."""


def image_rule(values: Values, family: str) -> ImageRule | None:
    """The function from the (height, width) of an image to that of the processed image; None if no rule is known."""
    kind = str(values.get("image_processor_type") or values.get("feature_extractor_type") or TYPE_OF_FAMILY.get(family))
    kind = kind.removesuffix("Pil").removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    return RULES[kind](values) if kind in RULES else None


@dataclass(frozen=True)
class SoundRule:
    """A feature extractor like Whisper's, which pads sounds to windows of a fixed length."""

    sampling_rate: int
    hop_length: int
    num_samples: int
    """Samples of a window."""

    @property
    def num_frames(self) -> int:
        return self.num_samples // self.hop_length


def sound_rule(values: Values) -> SoundRule:
    rate = int(values.get("sampling_rate", 16_000))
    return SoundRule(rate, int(values.get("hop_length", 160)), int(values.get("chunk_length", 30)) * rate)


@dataclass(frozen=True)
class _Plain:
    """A resize and an optional crop from the centre, which pads images that are too small."""

    target: Mapping[str, Any] | None
    crop: Size | None

    def __call__(self, image: Size) -> Size:
        if self.crop is not None:
            return self.crop
        if self.target is None:
            return image
        if self.target.get("height") and self.target.get("width"):
            return int(self.target["height"]), int(self.target["width"])
        edge = self.target.get("shortest_edge")
        if not edge or self.target.get("longest_edge"):
            raise UserError(f"image processor: size {dict(self.target)} is not supported; give height and width")
        height, width = image
        return (int(edge * height / width), int(edge)) if width <= height else (int(edge), int(edge * width / height))


def _plain(values: Values, *, size: Any, crop: Any = None, is_square: bool = False) -> _Plain:
    """`size`, `crop`: the type's defaults. `is_square`: a size given as one number is that of both sides."""
    target = values.get("size") or size
    if not isinstance(target, Mapping):
        target = {"height": target, "width": target} if is_square else {"shortest_edge": target}
    cut = values.get("crop_size") or crop
    if not (cut and values.get("do_center_crop", crop is not None)):
        return _Plain(target if values.get("do_resize", True) else None, None)
    return _Plain(None, (int(cut["height"]), int(cut["width"])) if isinstance(cut, Mapping) else (int(cut), int(cut)))


@dataclass(frozen=True)
class _Pixtral:
    """A limit on the longest edge, with sides rounded up to whole patches."""

    limits: Size
    patch: Size
    resizes: bool

    def __call__(self, image: Size) -> Size:
        if not self.resizes:
            return image
        ratio = max(side / limit for side, limit in zip(image, self.limits, strict=True))
        height, width = (math.floor(side / ratio) for side in image) if ratio > 1 else image
        rows, columns = self.patch
        return math.ceil(height / rows) * rows, math.ceil(width / columns) * columns


def _pixtral(values: Values) -> _Pixtral:
    size, patch = values.get("size") or {"longest_edge": 1024}, values.get("patch_size") or 16
    edge = size.get("longest_edge")
    limits = (edge, edge) if edge else (size["height"], size["width"])
    pair = (patch["height"], patch["width"]) if isinstance(patch, Mapping) else (patch, patch)
    return _Pixtral(limits, pair, values.get("do_resize", True))


@dataclass(frozen=True)
class _Qwen2VL:
    """Sides rounded to whole merged patches, with the number of pixels between two limits."""

    fewest: int
    most: int
    step: int
    resizes: bool

    def __call__(self, image: Size) -> Size:
        height, width = image
        if max(image) / min(image) > 200:
            raise UserError(f"an image of {height} x {width} pixels is refused: one side is over 200 times the other")
        if not self.resizes:
            return image
        step = self.step
        rows, columns = round(height / step), round(width / step)
        if rows * columns * step**2 > self.most:
            scale = math.sqrt(height * width / self.most)
            rows, columns = (max(1, math.floor(side / scale / step)) for side in image)
        elif rows * columns * step**2 < self.fewest:
            scale = math.sqrt(self.fewest / (height * width))
            rows, columns = (math.ceil(side * scale / step) for side in image)
        return rows * step, columns * step


def _qwen2_vl(values: Values) -> _Qwen2VL:
    size = values.get("size") or {}
    return _Qwen2VL(
        fewest=values.get("min_pixels") or size.get("shortest_edge") or 56 * 56,
        most=values.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280,
        step=int(values.get("patch_size") or 14) * int(values.get("merge_size") or 2),
        resizes=values.get("do_resize", True),
    )


_SQUARE = {"height": 224, "width": 224}

RULES: Mapping[str, Callable[[Values], ImageRule]] = {
    "SiglipImageProcessor": partial(_plain, size=_SQUARE),
    "ViTImageProcessor": partial(_plain, size=_SQUARE, is_square=True),
    "CLIPImageProcessor": partial(_plain, size={"shortest_edge": 224}, crop=_SQUARE),
    "BitImageProcessor": partial(_plain, size={"shortest_edge": 224}, crop=_SQUARE),
    "PixtralImageProcessor": _pixtral,
    "Qwen2VLImageProcessor": _qwen2_vl,
}
"""By the name of the processor's class, without `Fast` and `Pil`."""

FIXED_SIZE_FAMILIES = ("siglip_vision_model", "clip_vision_model")
"""Families whose position tables are made for images of one size."""


@dataclass(frozen=True)
class EncoderLayout:
    """An encoder of images or sounds. Raises `UserError` if the feature extractor is not made for the encoder.

    An encoder of images takes videos, too: as its own patches of several frames if it has such, else frame by frame."""

    modality: Modality
    processor: Any
    """The values of its preprocessor_config.json."""
    config: Any
    """The encoder's configuration: its values, or the transformers object."""
    feature_select: FeatureSelect = "patch"
    placeholder: str | None = None
    """The tokenizer's token for its outputs, also those of videos; None: `<image>` or `<audio>`."""
    name: str = "encoder"
    """Key of the run file, for messages."""
    pooling: Pooling | None = None
    """Pooling of towers, each example of which has at most one item."""
    video: VideoConfig = field(default_factory=VideoConfig)
    _grids: dict[Size, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.modality == "audio":
            num_frames = 2 * config_value(self.config, "max_source_positions")
            if self._sound_rule.num_frames != num_frames:
                raise UserError(
                    f"{self.name}: its feature extractor makes {self._sound_rule.num_frames} frames of a clip, but "
                    f"the encoder takes {num_frames} (2 x max_source_positions); give the encoder's own"
                )

    @property
    def target(self) -> None:
        """Its outputs are read by the language model alone."""

    @property
    def token(self) -> str:
        """The token at the positions of its outputs."""
        return self.placeholder or PLACEHOLDERS[self.modality]

    @property
    def family(self) -> str:
        return config_value(self.config, "model_type")

    @property
    def has_rule(self) -> bool:
        """Whether sizes are known without asking the processor itself."""
        return self.modality == "audio" or self._image_rule is not None

    @cached_property
    def modalities(self) -> tuple[Modality, ...]:
        """Modalities that the encoder takes."""
        return modalities_of(self.config)

    def items(self, example: Example) -> tuple[tuple[Modality, Media], ...]:
        """The example's media that it takes, in their order. Raises `UserError`."""
        if self.pooling is not None:  # It has no text with placeholders.
            return tuple((self.modality, media) for media in example.media.get(self.modality, ()))
        return example.items(self.modalities)

    def lay_out(self, example: Example, layouts: Layouts) -> tuple[tuple[Segment, ...], int | None]:
        items = self.items(example)
        return tuple(self.segment(i, media, modality) for i, (modality, media) in enumerate(items)), None

    def segment(self, item: int, media: Media, modality: Modality | None = None) -> Segment:
        """The item's entry in the encoder's layout. Raises `ValueError` if the encoder cannot take it."""
        size, num_tiles = media.size(), 1
        if modality == "video":
            num_frames = len(self.frame_times(size))
            grid = self.grid((size.height, size.width))
            if temporal_patch_size(self.config) > 1:
                grid = (ceil(num_frames / temporal_patch_size(self.config)), *grid[1:])
            else:
                num_tiles = num_frames
        else:
            num_frames, grid = 0, self.grid(size)
        segment = encoder_segment(
            self.config, item=item, grid=grid, feature_select=self.feature_select, num_tiles=num_tiles
        )
        return pooled(replace(segment, num_frames=num_frames), self.pooling)

    def frame_times(self, video: VideoSize) -> tuple[float, ...]:
        """Times of the frames of a video that are read."""
        grid = self.grid((video.height, video.width))
        one = encoder_segment(self.config, item=0, grid=grid, feature_select=self.feature_select)
        per_patch = temporal_patch_size(self.config)
        return frame_times(video, self.video, tokens_per_patch=one.outputs, frames_per_patch=per_patch)

    def grid(self, size: Size) -> tuple[int, ...]:
        """The grid of an image of (height, width) pixels or a sound of (samples, Hz)."""
        if size not in self._grids:
            self._grids[size] = self._audio_grid(size) if self.modality == "audio" else self._image_grid(size)
        return self._grids[size]

    def processor_values(self) -> Mapping[str, Any]:
        return self.processor

    def processed_size(self, size: Size) -> Size:
        """(height, width) of the processed image, from that of the image."""
        assert self._image_rule is not None, "callers check `has_rule`"
        return self._image_rule(size)

    @cached_property
    def _image_rule(self) -> ImageRule | None:
        return image_rule(self.processor_values(), self.family)

    @cached_property
    def _sound_rule(self) -> SoundRule:
        return sound_rule(self.processor_values())

    def _audio_grid(self, size: Size) -> tuple[int, ...]:
        rule = self._sound_rule
        self._check_width("num_mel_bins", self.processor_values().get("feature_size"), "mel bins")
        num_samples = resampled_length(size, rule.sampling_rate)
        if num_samples > rule.num_samples:
            raise UserError(
                f"the clip lasts {size[0] / size[1]:.1f} s, but {self.name} takes at most "
                f"{rule.num_samples / rule.sampling_rate:g} s; cut it"
            )
        return grid_of(self.config, num_mel_frames=ceil(num_samples / rule.hop_length))

    def _image_grid(self, size: Size) -> tuple[int, ...]:
        height, width = self.processed_size(size)
        if self.family == "qwen2_5_vl_vision":
            patch = config_value(self.config, "patch_size")
            return grid_of(self.config, image_grid_thw=(1, height // patch, width // patch))
        own = config_value(self.config, "image_size")
        if self.family in FIXED_SIZE_FAMILIES and (height, width) != (own, own):
            raise UserError(
                f"its image processor makes {height} x {width} pixels, but {self.name} takes {own} x {own}; "
                "give the encoder's own image processor"
            )
        means = self.processor_values().get("image_mean")
        self._check_width("num_channels", len(means) if isinstance(means, list) else None, "channels")
        return grid_of(self.config, image_size=(height, width))

    def _check_width(self, key: str, made: object, what: str) -> None:
        """`made`: by the processor; None: it does not say."""
        own = self.config.get(key) if isinstance(self.config, Mapping) else getattr(self.config, key, None)
        if isinstance(made, int) and isinstance(own, int) and made != own:
            raise UserError(
                f"its processor makes {made} {what}, but {self.name} takes {own}; give the encoder's own processor"
            )


def frame_times(
    video: VideoSize, sampling: VideoConfig, *, tokens_per_patch: int = 1, frames_per_patch: int = 1
) -> tuple[float, ...]:
    """The times of the frames of a video that are read, in seconds from its beginning, ascending: a function of its
    header and the run file only, so that all ranks derive the same frames.

    Args:
        tokens_per_patch: what `frames_per_patch` frames together, or fewer at the end, take in the language model.

    Raises `UserError` if one patch alone takes more than `max_tokens`.
    """
    wanted = sampling.frames or int(video.duration_s * (sampling.fps or 1.0) + 1e-6)
    number = max(1, min(wanted, sampling.max_frames, video.num_frames))
    if sampling.max_tokens is not None:
        most = sampling.max_tokens // tokens_per_patch * frames_per_patch
        if not most:
            raise UserError(
                f"data.video.max_tokens: is {sampling.max_tokens}, but a frame of {video.height} x {video.width} "
                f"pixels takes {tokens_per_patch} tokens; give at least these, or let the processor make smaller images"
            )
        number = min(number, most)
    if number == 1:
        return (video.duration_s / 2,)
    last_s = video.duration_s * (video.num_frames - 1) / video.num_frames
    return tuple(last_s * i / (number - 1) for i in range(number))


def resampled_length(size: Size, rate: int) -> int:
    """The number of samples of a sound of (samples, Hz) at another rate (Hz)."""
    num_samples, own_rate = size
    divisor = gcd(own_rate, rate)
    return ceil(num_samples * (rate // divisor) / (own_rate // divisor))
