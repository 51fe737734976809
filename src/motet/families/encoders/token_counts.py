"""Numbers of tokens of an image or clip inside an encoder and at its output, from the configuration alone.

Pure: no torch, so that layouts can be written (and iterations simulated) without a model. A `grid` is what a family's
positions and masks derive from:

| family (`model_type` of its configuration) | grid | tokens inside | output tokens: "patch" / "full" |
|---|---|---|---|
| SigLIP | (patch rows, patch columns) | rows x columns | the same |
| CLIP, DINOv2 | (patch rows, patch columns) | 1 + rows x columns | rows x columns / with the class token |
| Pixtral | (patch rows, patch columns) | rows x columns | the same |
| Qwen2.5-VL vision | (frames, patch rows, patch columns) | their product | divided by spatial_merge_size squared |
| Whisper | (valid mel frames,) | max_source_positions | half of the valid frames / of all frames |
| CLIP, SigLIP and BERT text | (tokens, place of the end-of-text token, first attended, end) | tokens | the same |
| Qwen2-Audio | (valid mel frames,) | max_source_positions | a quarter of the valid frames / of all frames |

An empty grid means the configuration's own image size or clip length, where it has one. What a layout's
`Segment.num_outputs` says is what the encoder's head selects: see `selection_of`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from motet.assignment.sample import Segment
from motet.errors import UserError

FeatureSelect = Literal["patch", "full"]
"""The hidden states that are the output: "patch" leaves out class tokens and padding, "full" keeps all."""

Config = Mapping[str, Any] | Any
"""A transformers configuration: the object, or its complete `to_dict()`."""

LEGACY_END = 2
"""CLIP configurations with this `eos_token_id` take the features at the token with the highest number."""


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of one image, video or clip."""

    num_tokens: int
    """Inside the encoder."""
    num_patch: int
    """Handed on by the head under "patch"."""
    num_full: int
    """Handed on by the head under "full"."""
    first_patch: int = 0
    """Index of the first token of "patch" among those of "full"."""


def token_counts(config: Config, grid: tuple[int, ...]) -> TokenCounts:
    """Raises `ValueError` for a family that is not known, and for a grid that the family cannot take."""
    return _COUNTERS[_model_type(config)](config, grid)


def has_token_counts(config: Config) -> bool:
    """Whether `token_counts` knows the family."""
    return str(config_value(config, "model_type")) in _COUNTERS


def grid_of(
    config: Config,
    *,
    image_size: tuple[int, int] | None = None,
    image_grid_thw: tuple[int, int, int] | None = None,
    num_mel_frames: int | None = None,
) -> tuple[int, ...]:
    """The grid of one item, from what its processor returned.

    Args:
        image_size: (height, width) in pixels after processing, without padding (Pixtral: its row of `image_sizes`).
        image_grid_thw: Qwen2.5-VL: the item's row of `image_grid_thw` or `video_grid_thw`.
        num_mel_frames: audio: the mel frames that are not padding (the sum of `feature_attention_mask`).

    Raises `ValueError` if the one that the family needs is missing.
    """
    model_type = _model_type(config)
    needed = _GRID_FROM.get(model_type, "image_size")
    given: Any = {"image_size": image_size, "image_grid_thw": image_grid_thw, "num_mel_frames": num_mel_frames}[needed]
    if given is None:
        raise UserError(f"encoder: {model_type} needs {needed} of every item")
    grid = (int(given),) if needed == "num_mel_frames" else tuple(int(size) for size in given)
    if needed == "image_size":
        rows, columns = _pair(config, "patch_size")
        grid = (grid[0] // rows, grid[1] // columns)
    token_counts(config, grid)
    return grid


Pooling = Literal["alone", "first"]
"""Output of a contrastive model's encoder for an item: its pooled feature alone, or followed by all features."""


def pooled(segment: Segment, pooling: Pooling | None) -> Segment:
    """An item's entry in the layout of an encoder that pools; None: of one that does not."""
    if pooling is None:
        return segment
    return replace(segment, num_outputs=1 if pooling == "alone" else 1 + segment.num_tokens)


def encoder_segment(
    config: Config,
    *,
    item: int,
    grid: tuple[int, ...],
    feature_select: FeatureSelect = "patch",
    num_tiles: int = 1,
) -> Segment:
    """The entry of one item in its encoder's own layout.

    `num_tiles`: how many equal images a `preprocess_callback` makes of the item (AnyRes); `grid` is then one tile's.
    """
    counts = token_counts(config, grid)
    num_outputs = counts.num_full if feature_select == "full" else counts.num_patch
    return Segment(
        num_tokens=num_tiles * counts.num_tokens, item=item, num_outputs=num_tiles * num_outputs, grid=tuple(grid)
    )


@dataclass(frozen=True)
class Selection:
    """Selection of one item's features after the head: of the `num_full` features of each tile, [first, first +
    num_tokens)."""

    num_tiles: int
    num_full: int
    first: int
    num_tokens: int

    @property
    def num_outputs(self) -> int:
        return self.num_tiles * self.num_tokens


def selection_of(config: Config, segment: Segment) -> Selection:
    """Reads from the layout which features the head selects, so that the choice is written down once.

    "full" where `segment.num_outputs` is what "full" gives, else "patch". A callback or a projector of the user's own
    may then still change the number. Raises `ValueError` if `segment.num_tokens` does not fit the grid.
    """
    counts = token_counts(config, segment.grid)
    num_tiles, rest = divmod(segment.num_tokens, counts.num_tokens)
    if rest or not num_tiles:
        raise UserError(
            f"layout: item {segment.item} has num_tokens {segment.num_tokens}, but its grid {segment.grid} makes "
            f"{counts.num_tokens} (or a multiple of it)"
        )
    if segment.outputs == num_tiles * counts.num_full:
        return Selection(num_tiles, counts.num_full, 0, counts.num_full)
    return Selection(num_tiles, counts.num_full, counts.first_patch, counts.num_patch)


def config_value(config: Config, key: str) -> Any:
    """Raises `UserError` if it is missing."""
    value = config.get(key) if isinstance(config, dict | Mapping) else getattr(config, key, None)
    if value is None:
        raise UserError(f"encoder configuration: {key} is missing")
    return value


def temporal_patch_size(config: Config) -> int:
    """Frames of a video that make up one patch; 1 for encoders of images, which take each frame as one."""
    value = (
        config.get("temporal_patch_size") if isinstance(config, Mapping) else getattr(config, "temporal_patch_size", 1)
    )
    return value or 1


def _model_type(config: Config) -> str:
    model_type = config_value(config, "model_type")
    if model_type not in _COUNTERS:
        raise UserError(f"encoder: model_type {model_type!r} is not known; known are {', '.join(_COUNTERS)}")
    return model_type


def _pair(config: Config, key: str) -> tuple[int, int]:
    value = config_value(config, key)
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _check_grid(config: Config, grid: tuple[int, ...], names: str) -> None:
    if len(grid) != len(names.split(", ")) or any(size < 1 for size in grid):
        raise UserError(
            f"layout: {config_value(config, 'model_type')} needs a grid ({names}) of at least 1 each, not {grid}"
        )


def _patches(config: Config, grid: tuple[int, ...]) -> int:
    """rows x columns; of the configuration's own image size if the grid is empty."""
    if not grid:
        (height, width), (rows, columns) = _pair(config, "image_size"), _pair(config, "patch_size")
        grid = (height // rows, width // columns)
    _check_grid(config, grid, "patch rows, patch columns")
    return grid[0] * grid[1]


def _count_patches(config: Config, grid: tuple[int, ...]) -> TokenCounts:
    patches = _patches(config, grid)
    return TokenCounts(patches, patches, patches)


def _count_patches_and_class_token(config: Config, grid: tuple[int, ...]) -> TokenCounts:
    patches = _patches(config, grid)
    return TokenCounts(1 + patches, patches, 1 + patches, first_patch=1)


def _count_ragged_patches(config: Config, grid: tuple[int, ...]) -> TokenCounts:
    _check_grid(config, grid, "patch rows, patch columns")
    return _count_patches(config, grid)


def _count_merged_patches(config: Config, grid: tuple[int, ...]) -> TokenCounts:
    _check_grid(config, grid, "frames, patch rows, patch columns")
    frames, rows, columns = grid
    merge = config_value(config, "spatial_merge_size")
    if rows % merge or columns % merge:
        raise UserError(f"layout: grid {grid}: rows and columns must be multiples of spatial_merge_size ({merge})")
    merged = frames * (rows // merge) * (columns // merge)
    return TokenCounts(frames * rows * columns, merged, merged)


def _valid_frames(config: Config, grid: tuple[int, ...], minimum: int) -> int:
    all_frames = 2 * config_value(config, "max_source_positions")
    grid = grid or (all_frames,)
    if len(grid) != 1 or not minimum <= grid[0] <= all_frames:
        raise UserError(
            f"layout: {_model_type(config)} needs a grid (valid mel frames,) of {minimum} to {all_frames}, "
            f"not {grid}; shorten or lengthen the clip"
        )
    return grid[0]


def _count_whisper(config: Config, grid: tuple[int, ...]) -> TokenCounts:
    positions = config_value(config, "max_source_positions")
    return TokenCounts(positions, (_valid_frames(config, grid, minimum=1) + 1) // 2, positions)


def _count_text(config: Config, grid: tuple[int, ...]) -> TokenCounts:
    """`max_position_embeddings` tokens if the grid is empty. The place may be left out, and so may which tokens are
    attended to, if all are."""
    most = config_value(config, "max_position_embeddings")
    num_tokens = grid[0] if grid else most
    is_placed = len(grid) < 2 or 0 <= grid[1] < num_tokens
    is_attended = len(grid) < 3 or (len(grid) == 4 and 0 <= grid[2] < grid[3] <= num_tokens)
    if not (1 <= num_tokens <= most and is_placed and is_attended):
        raise UserError(
            f"layout: {_model_type(config)} needs a grid (tokens, place of the end-of-text token, first attended, end) "
            f"of at most {most} tokens, not {grid}; shorten the text"
        )
    return TokenCounts(num_tokens, num_tokens, num_tokens)


def _count_qwen2_audio(config: Config, grid: tuple[int, ...]) -> TokenCounts:
    positions = config_value(config, "max_source_positions")
    # A second convolution of stride 2, then a pooling of width and stride 2 that drops an odd last one.
    convolved = (_valid_frames(config, grid, minimum=3) + 1) // 2
    return TokenCounts(positions, convolved // 2, positions // 2)


_GRID_FROM = {
    "qwen2_5_vl_vision": "image_grid_thw",
    "whisper": "num_mel_frames",
    "qwen2_audio_encoder": "num_mel_frames",
}
"""Argument of `grid_of` that gives the grid, for families whose grid does not follow from the image's size."""


def reads_text(config: Config) -> bool:
    """Whether it is a text encoder, which takes token ids."""
    return _COUNTERS[_model_type(config)] is _count_text


def modality_of(config: Config) -> str:
    """Returns an encoder's modality: "image", "audio", or what a user's own encoder was registered with. Raises
    `UserError` for one of text."""
    if _model_type(config) in _OWN_MODALITIES:
        return _OWN_MODALITIES[_model_type(config)]
    if reads_text(config):
        raise UserError(
            f"encoder: {_model_type(config)} reads text; it can be a tower, but not an encoder of a language model"
        )
    return "audio" if _GRID_FROM.get(_model_type(config)) == "num_mel_frames" else "image"


def modalities_of(config: Config) -> tuple[str, ...]:
    """The modalities of the media that the encoder takes: an encoder of images also takes the frames of videos."""
    if isinstance(config, Mapping) and "modalities" in config:
        return tuple(config["modalities"])
    modality = modality_of(config)
    is_own = _model_type(config) in _OWN_MODALITIES
    return ("image", "video") if modality == "image" and not is_own else (modality,)


_OWN_MODALITIES: dict[str, str] = {}


def register_counter(model_type: str, counter: Callable[[Config, tuple[int, ...]], TokenCounts], modality: str) -> None:
    """Makes an encoder of the user's own known, whose grids are the shapes of its items."""
    _COUNTERS[model_type], _OWN_MODALITIES[model_type] = counter, modality


_COUNTERS: dict[str, Callable[[Config, tuple[int, ...]], TokenCounts]] = {
    "siglip_vision_model": _count_patches,
    "clip_vision_model": _count_patches_and_class_token,
    "dinov2": _count_patches_and_class_token,
    "qwen2_5_vl_vision": _count_merged_patches,
    "pixtral": _count_ragged_patches,
    "clip_text_model": _count_text,
    "siglip_text_model": _count_text,
    "bert": _count_text,
    "whisper": _count_whisper,
    "qwen2_audio_encoder": _count_qwen2_audio,
}
