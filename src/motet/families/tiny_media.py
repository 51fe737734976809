"""Inputs of tiny models of several modalities: one image or sound, in the form that the model's own functions take.

Processors differ from model to model; what their tensors look like follows from the names of a function's parameters,
and where it does not, the function is tried with the forms that there are.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from motet.errors import UserError, one_line
from motet.families.discovery.composite import FeatureFunction
from motet.families.tiny import NUM_PATCHES

SIDE = 4
"""Patches of an image's side."""
assert SIDE * SIDE == NUM_PATCHES
NUM_FRAMES = 32
"""Frames of a sound, before the encoder's own convolutions."""
MOST_PLACEHOLDERS = 80


def tiny_medium(model: Any, function: FeatureFunction, generator: torch.Generator) -> tuple[dict[str, Tensor], int]:
    """Tensors of one medium as a processor returns them, and the number of its placeholders.

    `model`: a tiny one with weights, in float64. Raises `UserError` if it takes none of the forms."""
    reasons = []
    for tensors in _forms(model, function, generator):
        given = {key: value for key, value in tensors.items() if key in function.inputs}
        try:
            return given, _num_placeholders(model, function, given)
        except Exception as error:  # Whatever a model raises for tensors that are not its own.
            reasons.append(f"{type(error).__name__}: {one_line(error)[:120]}")
    raise UserError(
        f"{type(model).__name__}: no input of {function.modality} is known that it takes ({'; '.join(reasons[:2])})"
    )


def _num_placeholders(model: Any, function: FeatureFunction, given: Mapping[str, Tensor]) -> int:
    width = int(model.config.get_text_config().hidden_size)
    if not function.name:
        for number in range(1, MOST_PLACEHOLDERS):
            ids = torch.tensor([[5, *[function.token_id] * number, 6]])
            try:
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given).logits
            except ValueError:
                continue
            # A single placeholder may stand for a whole medium; processors write all of them.
            if logits.shape[1] == ids.shape[1]:
                return number
        raise ValueError(f"no number of placeholders up to {MOST_PLACEHOLDERS} fits")
    owner = model.base_model if hasattr(model.base_model, function.name) else model
    with torch.no_grad():
        made = getattr(owner, function.name)(**given, return_dict=True)
    first = getattr(made, "pooler_output", None)
    first = made.last_hidden_state if first is None else first
    pieces = first if isinstance(first, list | tuple) else [first]
    return sum(piece.reshape(-1, width).shape[0] for piece in pieces)


def _forms(model: Any, function: FeatureFunction, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    config = model.get_encoder(modality=function.modality).config
    if function.modality == "audio":
        bins = _first(config, "num_mel_bins", "input_dim", "feature_size", default=16)
        frames = 2 * _first(config, "max_source_positions", default=NUM_FRAMES // 2)
        for shape, length in (((1, bins, frames), frames), ((1, frames, bins), frames)):
            yield {
                function.raw: drawn(*shape),
                **{name: torch.ones(1, length, dtype=torch.long) for name in function.inputs if "mask" in name},
                **{name: torch.tensor([length]) for name in function.inputs if "length" in name},
            }
        return
    patch = _first(config, "patch_size", default=14)
    channels = _first(config, "num_channels", "in_channels", "in_chans", default=3)
    side = SIDE * patch
    values = channels * patch * patch
    grid = {f"{function.modality}_grid_thw": torch.tensor([[1, SIDE, SIDE]])}
    if any(name.endswith("grid_thw") for name in function.inputs):
        frames = _first(config, "temporal_patch_size", default=1)
        merge = {name: torch.tensor([1]) for name in function.inputs if name.endswith("merge_sizes")}
        for width in (frames * values, values, 2 * values):
            yield {function.raw: drawn(NUM_PATCHES, width), **grid, **merge}
        yield {function.raw: drawn(NUM_PATCHES, channels, patch, patch), **grid, **merge}
        return
    if "spatial_shapes" in function.inputs:
        yield {
            function.raw: drawn(1, NUM_PATCHES, values),
            "pixel_attention_mask": torch.ones(1, NUM_PATCHES, dtype=torch.long),
            "spatial_shapes": torch.tensor([[SIDE, SIDE]]),
        }
    size = {"image_sizes": torch.tensor([[side, side]])}
    yield {function.raw: drawn(1, channels, side, side), **size}
    yield {function.raw: drawn(1, channels, side, side)}
    if "pixel_attention_mask" in function.inputs:
        seen = torch.ones(1, 1, side, side, dtype=torch.bool)
        yield {function.raw: drawn(1, 1, channels, side, side), "pixel_attention_mask": seen}
    for tiles in (1, 2, 3):
        yield {function.raw: drawn(1, tiles, channels, side, side), **size}


def _first(config: Any, *names: str, default: int) -> int:
    found = next((value for name in names if (value := getattr(config, name, None)) is not None), default)
    return int(found[0] if isinstance(found, list | tuple) else found)
