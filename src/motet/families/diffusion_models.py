"""Diffusion transformers of diffusers that can be trained and cut into stages: how each runs its parts.

What travels between blocks are three streams: the places of the images, their conditions and vectors of the time step.
Everything else follows from configurations and sizes. The forward of diffusers itself is what `motet verify` compares
with; nothing of it is changed.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from motet.config import PartConfig
from motet.errors import UserError
from motet.families.classes import default_dtype
from motet.families.hf_config import stored_values
from motet.shapes.diffusion_transformers import TRANSFORMERS


class Streams(NamedTuple):
    """Streams of images of one size, each with equally many conditions. All have the model's width."""

    places: Tensor
    """[images, places, width]"""
    conditions: Tensor
    """[images, conditions, width]"""
    time: Tensor
    """[images, vectors, width]"""


@dataclass(frozen=True)
class DiffusionFamily:
    """How a class of diffusers runs."""

    embed_parts: tuple[str, ...]
    """Paths of what belongs to the embedding."""
    embed: Callable[[Any, Tensor, Tensor, Tensor, Tensor | None], Streams]
    """(model, noised latents [images, channels, height, width], time steps [images], conditions [images, conditions,
    size], pooled conditions [images, size]) -> streams."""
    block: Callable[[nn.Module, Streams, tuple[int, ...]], Streams]
    """(block, streams, rows and columns of the places) -> streams."""
    head: Callable[[Any, Streams], Tensor]
    """(model, streams) -> [images, places, patch x patch x channels]"""
    blocks: str = "transformer_blocks"


def _embed_sd3(model: Any, latents: Tensor, timesteps: Tensor, conditions: Tensor, pooled: Tensor | None) -> Streams:
    time = model.time_text_embed(timesteps, pooled)
    return Streams(model.pos_embed(latents).contiguous(), model.context_embedder(conditions), time[:, None])


def _block_sd3(block: nn.Module, streams: Streams, grid: tuple[int, ...]) -> Streams:
    conditions, places = block(
        hidden_states=streams.places, encoder_hidden_states=streams.conditions, temb=streams.time[:, 0]
    )
    # The last block hands no conditions on, and nothing behind it reads any.
    return Streams(places, streams.conditions if conditions is None else conditions, streams.time)


def _head_sd3(model: Any, streams: Streams) -> Tensor:
    return model.proj_out(model.norm_out(streams.places, streams.time[:, 0]))


def _embed_pixart(model: Any, latents: Tensor, timesteps: Tensor, conditions: Tensor, pooled: Tensor | None) -> Streams:
    places = model.pos_embed(latents)
    modulation, embedded = model.adaln_single(timesteps, None, batch_size=len(latents), hidden_dtype=places.dtype)
    time = torch.cat([modulation.unflatten(1, (6, -1)), embedded[:, None]], dim=1)
    return Streams(places, model.caption_projection(conditions), time)


def _block_pixart(block: nn.Module, streams: Streams, grid: tuple[int, ...]) -> Streams:
    places = block(
        streams.places,
        encoder_hidden_states=streams.conditions,
        timestep=streams.time[:, :6].flatten(1),
        class_labels=None,
    )
    return streams._replace(places=places)


def _head_pixart(model: Any, streams: Streams) -> Tensor:
    shift, scale = (model.scale_shift_table[None] + streams.time[:, 6:]).chunk(2, dim=1)
    return model.proj_out(model.norm_out(streams.places) * (1 + scale) + shift)


def _embed_sana(model: Any, latents: Tensor, timesteps: Tensor, conditions: Tensor, pooled: Tensor | None) -> Streams:
    places = model.patch_embed(latents)
    modulation, embedded = model.time_embed(timesteps, batch_size=len(latents), hidden_dtype=places.dtype)
    time = torch.cat([modulation.unflatten(1, (6, -1)), embedded[:, None]], dim=1)
    return Streams(places, model.caption_norm(model.caption_projection(conditions)), time)


def _block_sana(block: nn.Module, streams: Streams, grid: tuple[int, ...]) -> Streams:
    places = block(
        streams.places,
        encoder_hidden_states=streams.conditions,
        timestep=streams.time[:, :6].flatten(1),
        height=grid[0],
        width=grid[1],
    )
    return streams._replace(places=places)


def _head_sana(model: Any, streams: Streams) -> Tensor:
    return model.proj_out(model.norm_out(streams.places, streams.time[:, 6], model.scale_shift_table))


DIFFUSION_FAMILIES: Mapping[str, DiffusionFamily] = {
    "SD3Transformer2DModel": DiffusionFamily(
        embed_parts=("pos_embed", "time_text_embed", "context_embedder"),
        embed=_embed_sd3,
        block=_block_sd3,
        head=_head_sd3,
    ),
    "PixArtTransformer2DModel": DiffusionFamily(
        embed_parts=("pos_embed", "adaln_single", "caption_projection"),
        embed=_embed_pixart,
        block=_block_pixart,
        head=_head_pixart,
    ),
    "SanaTransformer2DModel": DiffusionFamily(
        embed_parts=("patch_embed", "time_embed", "caption_projection", "caption_norm"),
        embed=_embed_sana,
        block=_block_sana,
        head=_head_sana,
    ),
}
"""By class of diffusers."""
assert DIFFUSION_FAMILIES.keys() == TRANSFORMERS.keys()


def diffusion_class(name: str) -> Any:
    """A class of diffusers. Raises `UserError` where diffusers is not installed."""
    try:
        return getattr(importlib.import_module("diffusers"), name)
    except ImportError as error:
        raise UserError(
            f"model.generators: needs the package diffusers ({error}); install it with: pip install 'motet[generators]'"
        ) from None


def build_diffusion_model(part: PartConfig, values: Mapping[str, Any], dtype: torch.dtype, where: str) -> Any:
    """The whole model with random weights of the present state of torch's generator.

    `values`: of the configuration. Raises `UserError` naming the key that is wrong."""
    name = stored_values(part, where)["_class_name"] if part.config is None else part.config
    model_class = diffusion_class(name)
    try:
        with default_dtype(dtype):
            return model_class.from_config({**values, "_class_name": name}).to(dtype)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"{where}.values: do not make a {name} ({' '.join(str(error).split())})") from None
