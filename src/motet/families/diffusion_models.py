"""Diffusion models of diffusers that can be trained: how each runs its parts.

What travels between a transformer's blocks are three streams: the places of the images, their conditions and vectors of
the time step. Everything else follows from configurations and sizes. A U-Net runs as a whole. The forward of diffusers
itself is what `motet verify` compares with; nothing of it is changed.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from motet.config import PartConfig
from motet.errors import UserError, one_line
from motet.families.classes import default_dtype
from motet.families.hf_config import stored_values
from motet.shapes.diffusion import GENERATORS
from motet.shapes.diffusion_transformers import TRANSFORMERS


class Streams(NamedTuple):
    """Streams of images of one size, each with equally many conditions. All have the model's width."""

    places: Tensor
    """[images, places, width]"""
    conditions: Tensor
    """[images, conditions, width]"""
    time: Tensor
    """[images, vectors, width]"""


class Given(NamedTuple):
    """Input of a diffusion model: images of one size, each with equally many conditions."""

    latents: Tensor
    """[images, channels, height, width], with their noise."""
    timesteps: Tensor
    """[images], from 0 to 1000."""
    conditions: Tensor
    """[images, conditions, size]"""
    pooled: Tensor | None
    """[images, size]"""
    guidance: float | None
    """Guidance scale for models with guidance embeddings; None: the model has none."""


Grid = tuple[int, ...]
"""Rows and columns of an image's places."""


@dataclass(frozen=True)
class DiffusionFamily:
    """How a transformer of diffusers runs."""

    embed_parts: tuple[str, ...]
    """Paths of what belongs to the embedding."""
    embed: Callable[[Any, Given], Streams]
    block: Callable[[nn.Module, Streams, Grid, Any], Streams]
    """(block, streams, grid, what `positions` gives) -> streams."""
    head: Callable[[Any, Streams, Grid], Tensor]
    """(model, streams, grid) -> [images, channels, height, width]"""
    blocks: tuple[str, ...] = ("transformer_blocks",)
    """Paths of the lists of blocks, in the order in which they run."""
    position_part: str | None = None
    """Path of a part without parameters by which every stage with blocks makes their rotary positions."""
    positions: Callable[[Any, Streams, Grid], Any] = lambda model, streams, grid: None
    """(model, streams, grid) -> what the blocks are told of positions."""


@dataclass(frozen=True)
class WholeModel:
    """A model of diffusers that runs in one stage."""

    predict: Callable[[Any, Given], Tensor]
    """-> [images, channels, height, width]"""
    layer_parts: Callable[[Any], list[tuple[str, ...]]]
    """Paths of the parts of each layer, as the shape numbers them, without the connector."""
    recomputed: Callable[[Any], dict[int, nn.Module]]
    """Blocks that can be recomputed, by their numbers."""


def _unpatched(patches: Tensor, grid: Grid, side: int) -> Tensor:
    """[images, places, side x side x channels] -> [images, channels, height, width]"""
    cut = patches.unflatten(1, grid).unflatten(3, (side, side, -1))
    return cut.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def _packed(latents: Tensor) -> Tensor:
    """[images, channels, height, width] -> [images, places, channels x 2 x 2]"""
    return pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)


def _unpacked(places: Tensor, grid: Grid) -> Tensor:
    return pixel_shuffle(places.transpose(1, 2).unflatten(2, grid), 2)


def _embed_sd3(model: Any, given: Given) -> Streams:
    time = model.time_text_embed(given.timesteps, given.pooled)
    places = model.pos_embed(given.latents).contiguous()
    return Streams(places, model.context_embedder(given.conditions), time[:, None])


def _block_with_conditions(block: nn.Module, streams: Streams, grid: Grid, positions: Any, **options: Any) -> Streams:
    """Of a transformer whose blocks change the conditions too."""
    if positions is not None:
        options["image_rotary_emb"] = positions
    conditions, places = block(
        hidden_states=streams.places, encoder_hidden_states=streams.conditions, temb=streams.time[:, 0], **options
    )
    # The last block of Stable Diffusion 3 hands no conditions on, and nothing behind it reads any.
    return Streams(places, streams.conditions if conditions is None else conditions, streams.time)


def _head_sd3(model: Any, streams: Streams, grid: Grid) -> Tensor:
    patches = model.proj_out(model.norm_out(streams.places, streams.time[:, 0]))
    return _unpatched(patches, grid, model.config.patch_size)


def _embed_pixart(model: Any, given: Given) -> Streams:
    places = model.pos_embed(given.latents)
    modulation, embedded = model.adaln_single(given.timesteps, None, batch_size=len(places), hidden_dtype=places.dtype)
    time = torch.cat([modulation.unflatten(1, (6, -1)), embedded[:, None]], dim=1)
    return Streams(places, model.caption_projection(given.conditions), time)


def _block_pixart(block: nn.Module, streams: Streams, grid: Grid, positions: Any) -> Streams:
    places = block(
        streams.places,
        encoder_hidden_states=streams.conditions,
        timestep=streams.time[:, :6].flatten(1),
        class_labels=None,
    )
    return streams._replace(places=places)


def _head_pixart(model: Any, streams: Streams, grid: Grid) -> Tensor:
    shift, scale = (model.scale_shift_table[None] + streams.time[:, 6:]).chunk(2, dim=1)
    patches = model.proj_out(model.norm_out(streams.places) * (1 + scale) + shift)
    return _unpatched(patches, grid, model.config.patch_size)


def _embed_sana(model: Any, given: Given) -> Streams:
    places = model.patch_embed(given.latents)
    modulation, embedded = model.time_embed(given.timesteps, batch_size=len(places), hidden_dtype=places.dtype)
    time = torch.cat([modulation.unflatten(1, (6, -1)), embedded[:, None]], dim=1)
    return Streams(places, model.caption_norm(model.caption_projection(given.conditions)), time)


def _block_sana(block: nn.Module, streams: Streams, grid: Grid, positions: Any) -> Streams:
    places = block(
        streams.places,
        encoder_hidden_states=streams.conditions,
        timestep=streams.time[:, :6].flatten(1),
        height=grid[0],
        width=grid[1],
    )
    return streams._replace(places=places)


def _head_sana(model: Any, streams: Streams, grid: Grid) -> Tensor:
    patches = model.proj_out(model.norm_out(streams.places, streams.time[:, 6], model.scale_shift_table))
    return _unpatched(patches, grid, model.config.patch_size)


def _embed_flux(model: Any, given: Given) -> Streams:
    """Flux is given time steps between 0 and 1, and casts them to its dtype before it multiplies them by 1000 again."""
    places = model.x_embedder(_packed(given.latents))
    timesteps = (given.timesteps / 1000).to(places.dtype) * 1000
    told = [timesteps]
    if given.guidance is not None:
        told.append(torch.full_like(timesteps, given.guidance) * 1000)
    time = model.time_text_embed(*told, given.pooled)
    return Streams(places, model.context_embedder(given.conditions), time[:, None])


def _positions_flux(model: Any, streams: Streams, grid: Grid) -> Any:
    """Conditions stand at the origin, places at their row and column."""
    return model.pos_embed(flux_ids(streams.conditions.shape[1], grid, streams.places.device))


def flux_ids(num_conditions: int, grid: Grid, device: torch.device) -> Tensor:
    """[conditions and places, 3]"""
    rows, columns = torch.meshgrid(*(torch.arange(size, device=device) for size in grid), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1)
    return torch.cat([places.new_zeros(num_conditions, 3), places])


def _head_flux(model: Any, streams: Streams, grid: Grid) -> Tensor:
    return _unpacked(model.proj_out(model.norm_out(streams.places, streams.time[:, 0])), grid)


def _embed_qwen_image(model: Any, given: Given) -> Streams:
    """Qwen-Image is given time steps between 0 and 1."""
    places = model.img_in(_packed(given.latents))
    time = model.time_text_embed((given.timesteps / 1000).to(places.dtype), places)
    return Streams(places, model.txt_in(model.txt_norm(given.conditions)), time[:, None])


def _positions_qwen_image(model: Any, streams: Streams, grid: Grid) -> Any:
    shapes = [[(1, *grid)]] * len(streams.places)
    return model.pos_embed(shapes, max_txt_seq_len=streams.conditions.shape[1], device=streams.places.device)


def _predict_unet(model: Any, given: Given) -> Tensor:
    return model(given.latents, given.timesteps, encoder_hidden_states=given.conditions).sample


def _unet_levels(model: Any) -> Iterator[tuple[str, Any]]:
    """Paths and modules of what lies between the first and the last convolution, in the order in which they run."""
    yield from ((f"down_blocks.{i}", block) for i, block in enumerate(model.down_blocks))
    yield "mid_block", model.mid_block
    yield from ((f"up_blocks.{i}", block) for i, block in enumerate(model.up_blocks))


def _unet_blocks(model: Any) -> Iterator[tuple[tuple[str, ...], nn.Module | None]]:
    """Yields the paths of the parts of each block of the shape, and the module that runs it (None: the one before)."""
    for path, level in _unet_levels(model):
        attentions = list(getattr(level, "attentions", ()))
        for i, resnet in enumerate(level.resnets):
            yield (f"{path}.resnets.{i}",), resnet
            if i < len(attentions):
                at = f"{path}.attentions.{i}"
                inner = f"{at}.transformer_blocks.0"
                yield (f"{at}.norm", f"{inner}.norm1", f"{inner}.attn1"), attentions[i]
                own = ("norm2", "attn2", "norm3", "ff")
                yield (f"{at}.proj_in", *(f"{inner}.{name}" for name in own), f"{at}.proj_out"), None
        for name in ("downsamplers", "upsamplers"):
            for i, part in enumerate(getattr(level, name, None) or ()):
                yield (f"{path}.{name}.{i}",), part


def _unet_layers(model: Any) -> list[tuple[str, ...]]:
    blocks = [paths for paths, _ in _unet_blocks(model)]
    return [("conv_in", "time_embedding"), *blocks, ("conv_norm_out", "conv_out")]


def _unet_recomputed(model: Any) -> dict[int, nn.Module]:
    return {index: module for index, (_, module) in enumerate(_unet_blocks(model)) if module is not None}


DIFFUSION_FAMILIES: Mapping[str, DiffusionFamily | WholeModel] = {
    "SD3Transformer2DModel": DiffusionFamily(
        embed_parts=("pos_embed", "time_text_embed", "context_embedder"),
        embed=_embed_sd3,
        block=_block_with_conditions,
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
    "FluxTransformer2DModel": DiffusionFamily(
        embed_parts=("time_text_embed", "context_embedder", "x_embedder"),
        embed=_embed_flux,
        block=_block_with_conditions,
        head=_head_flux,
        blocks=("transformer_blocks", "single_transformer_blocks"),
        position_part="pos_embed",
        positions=_positions_flux,
    ),
    "QwenImageTransformer2DModel": DiffusionFamily(
        embed_parts=("time_text_embed", "txt_norm", "img_in", "txt_in"),
        embed=_embed_qwen_image,
        block=partial(_block_with_conditions, encoder_hidden_states_mask=None),
        head=_head_flux,
        position_part="pos_embed",
        positions=_positions_qwen_image,
    ),
    "UNet2DConditionModel": WholeModel(predict=_predict_unet, layer_parts=_unet_layers, recomputed=_unet_recomputed),
}
"""By class of diffusers."""
assert DIFFUSION_FAMILIES.keys() == {*TRANSFORMERS, *GENERATORS}


def diffusion_class(name: str) -> Any:
    """A class, or submodule, of diffusers. Raises `UserError` where diffusers is not installed, or lacks it."""
    try:
        diffusers = importlib.import_module("diffusers")
        return getattr(diffusers, name)
    except ImportError as error:
        raise UserError(
            f"model.generators: needs the package diffusers ({error}); install it with: pip install 'motet[generators]'"
        ) from None
    except AttributeError:
        raise UserError(
            f"model.generators: diffusers {diffusers.__version__} has no {name}; install a version that has, with: "
            "pip install 'motet[generators]'"
        ) from None


def build_diffusion_model(part: PartConfig, values: Mapping[str, Any], dtype: torch.dtype, where: str) -> Any:
    """The whole model with random weights of the present state of torch's generator.

    `values`: of the configuration. Raises `UserError` naming the key that is wrong."""
    name = stored_values(part, where)["_class_name"] if part.config is None else part.config
    model_class = diffusion_class(name)
    known = inspect.signature(model_class.__init__).parameters
    for key in values:
        if not key.startswith("_") and key not in known:
            raise UserError(f"{where}.values.{key}: is not known; see {name} of diffusers")
    if values.get("dropout"):
        raise UserError(f"{where}.values.dropout: is {values['dropout']}, which is not supported; leave it out")
    try:
        with default_dtype(dtype):
            return model_class.from_config({**values, "_class_name": name}).to(dtype)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"{where}.values: do not make a {name} ({one_line(error)})") from None
