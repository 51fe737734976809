"""What HuggingFace's processors make of an image or a sound of a given size, from their configuration alone. Pure.

So layouts are written without pixels, and without the processors' classes, which import torch. Tests compare every rule
with the real processor.

Limits: image processors of other types than those in `RULES` have no rule; they must be asked.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from motet.errors import UserError

Size = tuple[int, int]
"""Of an image: (height, width) in pixels. Of a sound: (samples, Hz)."""

Values = Mapping[str, Any]
"""What stands in a preprocessor_config.json."""

ImageRule = Callable[[Size], Size]

TYPE_OF_FAMILY: Mapping[str, str] = {
    "siglip_vision_model": "SiglipImageProcessor",
    "clip_vision_model": "CLIPImageProcessor",
    "dinov2": "BitImageProcessor",
    "pixtral": "PixtralImageProcessor",
    "qwen2_5_vl_vision": "Qwen2VLImageProcessor",
}
"""By the encoder's `model_type`: what a configuration means that names no type."""


def image_rule(values: Values, family: str) -> ImageRule | None:
    """(height, width) of an image -> that of the processed one, which is cut into patches. None: no rule is known."""
    kind = str(values.get("image_processor_type") or values.get("feature_extractor_type") or TYPE_OF_FAMILY.get(family))
    kind = kind.removesuffix("Pil").removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    return RULES[kind](values) if kind in RULES else None


@dataclass(frozen=True)
class SoundRule:
    """A feature extractor like Whisper's: windows of a fixed length, padded."""

    sampling_rate: int
    hop_length: int
    num_samples: int
    """Of a window."""

    @property
    def num_frames(self) -> int:
        return self.num_samples // self.hop_length


def sound_rule(values: Values) -> SoundRule:
    rate = int(values.get("sampling_rate", 16_000))
    return SoundRule(rate, int(values.get("hop_length", 160)), int(values.get("chunk_length", 30)) * rate)


def _resized_and_cropped(size: Any, crop: Any, *, crops: bool, is_square: bool) -> Callable[[Values], ImageRule]:
    """`size`, `crop`, `crops`: the type's defaults. `is_square`: what one number for a size means."""

    def rule(values: Values) -> ImageRule:
        target = values.get("size") or size
        if not isinstance(target, Mapping):
            target = {"height": target, "width": target} if is_square else {"shortest_edge": target}
        cut = values.get("crop_size") or crop
        if values.get("do_center_crop", crops) and cut:
            height, width = (cut["height"], cut["width"]) if isinstance(cut, Mapping) else (cut, cut)
            return lambda image: (int(height), int(width))
        if not values.get("do_resize", True):
            return lambda image: image
        return lambda image: _resized(image, target)

    return rule


def _resized(image: Size, target: Mapping[str, Any]) -> Size:
    if target.get("height") and target.get("width"):
        return int(target["height"]), int(target["width"])
    edge = target.get("shortest_edge")
    if not edge or target.get("longest_edge"):
        raise UserError(f"image processor: size {dict(target)} is not supported; give height and width")
    height, width = image
    return (int(edge * height / width), int(edge)) if width <= height else (int(edge), int(edge * width / height))


def _pixtral(values: Values) -> ImageRule:
    """The longest edge is limited, the sides are rounded up to whole patches."""
    size = values.get("size") or {"longest_edge": 1024}
    limits = (size["longest_edge"],) * 2 if size.get("longest_edge") else (size["height"], size["width"])
    patch = values.get("patch_size") or 16
    rows, columns = (patch["height"], patch["width"]) if isinstance(patch, Mapping) else (patch, patch)

    def rule(image: Size) -> Size:
        height, width = image
        if values.get("do_resize", True):
            ratio = max(1.0, height / limits[0], width / limits[1])
            if ratio > 1:
                height, width = math.floor(height / ratio), math.floor(width / ratio)
            return math.ceil(height / rows) * rows, math.ceil(width / columns) * columns
        return height, width

    return rule


def _qwen2_vl(values: Values) -> ImageRule:
    """Sides of whole merged patches, the number of pixels between two limits, the aspect ratio nearly kept."""
    size = values.get("size") or {}
    fewest = values.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = values.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    step = int(values.get("patch_size") or 14) * int(values.get("merge_size") or 2)

    def rule(image: Size) -> Size:
        height, width = image
        if max(image) / min(image) > 200:
            raise UserError(f"an image of {height} x {width} pixels is refused: one side is over 200 times the other")
        if not values.get("do_resize", True):
            return image
        rows, columns = round(height / step), round(width / step)
        if rows * columns * step**2 > most:
            scale = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(side / scale / step)) for side in image)
        elif rows * columns * step**2 < fewest:
            scale = math.sqrt(fewest / (height * width))
            rows, columns = (math.ceil(side * scale / step) for side in image)
        return rows * step, columns * step

    return rule


_SQUARE = {"height": 224, "width": 224}

RULES: Mapping[str, Callable[[Values], ImageRule]] = {
    "SiglipImageProcessor": _resized_and_cropped(_SQUARE, None, crops=False, is_square=False),
    "ViTImageProcessor": _resized_and_cropped(_SQUARE, None, crops=False, is_square=True),
    "CLIPImageProcessor": _resized_and_cropped({"shortest_edge": 224}, _SQUARE, crops=True, is_square=False),
    "BitImageProcessor": _resized_and_cropped({"shortest_edge": 224}, _SQUARE, crops=True, is_square=False),
    "PixtralImageProcessor": _pixtral,
    "Qwen2VLImageProcessor": _qwen2_vl,
}
"""By the name of the processor's class, without `Fast` and `Pil`."""
