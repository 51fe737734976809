"""What one encoder will make of an image or a clip of a given size. Pure: sizes and configurations, no pixels."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, gcd
from typing import Any

from motet.assignment.sample import Segment
from motet.data.conversation.example import PLACEHOLDERS, Media, Modality
from motet.data.preparation.processor_sizes import ImageRule, Size, SoundRule, image_rule, sound_rule
from motet.errors import UserError
from motet.families.token_counts import FeatureSelect, config_value, encoder_segment, grid_of

FIXED_SIZE_FAMILIES = ("siglip_vision_model", "clip_vision_model")
"""Their positions are tables for images of one size."""


@dataclass(frozen=True)
class EncoderLayout:
    modality: Modality
    processor: Any
    """The values of its preprocessor_config.json."""
    config: Any
    """The encoder's configuration: its values, or the transformers object."""
    feature_select: FeatureSelect = "patch"
    placeholder: str | None = None
    """The tokenizer's token for it; None: the same as in conversations, `<image>` or `<audio>`."""
    name: str = "encoder"
    """Of the module, for messages."""
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
    def token(self) -> str:
        """The placeholder in the tokenizer's words."""
        return self.placeholder or PLACEHOLDERS[self.modality]

    @property
    def family(self) -> str:
        return config_value(self.config, "model_type")

    @property
    def has_rule(self) -> bool:
        """Whether sizes can be told without asking the processor itself."""
        return self.modality == "audio" or self._image_rule is not None

    def segment(self, item: int, media: Media) -> Segment:
        """The item's entry in the encoder's layout. Raises `ValueError` if the encoder cannot take it."""
        return encoder_segment(self.config, item=item, grid=self.grid(media.size()), feature_select=self.feature_select)

    def grid(self, size: Size) -> tuple[int, ...]:
        """Of an image of (height, width) pixels or a sound of (samples, Hz)."""
        if size not in self._grids:
            self._grids[size] = self._audio_grid(size) if self.modality == "audio" else self._image_grid(size)
        return self._grids[size]

    def processor_values(self) -> Mapping[str, Any]:
        return self.processor

    def processed_size(self, size: Size) -> Size:
        """(height, width) of the processed image, from that of the image."""
        assert self._image_rule is not None, "`has_rule` was not asked"
        return self._image_rule(size)

    @cached_property
    def _image_rule(self) -> ImageRule | None:
        return image_rule(self.processor_values(), self.family)

    @cached_property
    def _sound_rule(self) -> SoundRule:
        return sound_rule(self.processor_values())

    def _audio_grid(self, size: Size) -> tuple[int, ...]:
        rule = self._sound_rule
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
        return grid_of(self.config, image_size=(height, width))


def resampled_length(size: Size, rate: int) -> int:
    """Samples of a sound of (samples, Hz) at another rate."""
    num_samples, own_rate = size
    divisor = gcd(own_rate, rate)
    return ceil(num_samples * (rate // divisor) / (own_rate // divisor))
