"""Encoder families: for each, where its parts are and what is computed between them. To add one, add one entry.

An entry names the sub-modules of the transformers model (embedding parts, blocks, head parts) and gives three small
functions that call them in order; the modules themselves run unmodified. What blocks need beside their input (rotary
positions, masks, windows) is derived from the items' grids, on every stage anew, and never sent.

`grids` is always one grid for each image, video or clip of the microbatch, in order
(`motet.families.encoders.token_counts` says what a grid is). Between stages hidden states are [sum of num_tokens,
hidden_size]; inside a family they have the shape that its blocks expect, see `Arrangement`.

Limits: `encoder_layerdrop` must be 0 (a dropped block would be a block without gradient), and Pixtral does not run with
flash attention.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.models.pixtral.modeling_pixtral import generate_block_attention_mask
from transformers.utils.generic import is_flash_attention_requested
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from motet.devices import to_device
from motet.errors import UserError
from motet.families.encoders.own_encoders import (
    OwnConfig,
    adopt,
    check_norms,
    encoder_config,
    run,
    run_before_blocks,
    run_behind_blocks,
)
from motet.families.known_masks import KnownMasks
from motet.shapes.module_shape import blocks_before_features

Grids = Sequence[tuple[int, ...]]
BlockArguments = Callable[[int], dict[str, Any]]
"""From the index of a block to what it takes beside the hidden states."""


class Arrangement(Enum):
    """The shape in which the blocks take their hidden states."""

    BATCH = "[items, tokens of one, hidden_size]: items of equal length run together"
    ROW = "[1, sum of tokens, hidden_size]"
    FLAT = "[sum of tokens, hidden_size]"


@dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    model_class: str
    """The class in transformers that an encoder of this family is."""
    feature: str
    """The tensor of a sample's features that it reads."""
    embed_parts: tuple[str, ...]
    """Sub-modules of layer 0."""
    blocks: str
    """The list of blocks: layers 1 .. n."""
    head_parts: tuple[str, ...] = ()
    """Sub-modules of the head's layer, among them those whose output goes unused (poolers)."""
    num_blocks: str = "num_hidden_layers"
    """Key of the configuration."""
    output_size: str = "hidden_size"
    """Key of the configuration: width after the head."""
    arrangement: Arrangement = Arrangement.BATCH
    embed: Callable[[Any, Sequence[Tensor], Grids], Tensor]
    """(model, features of each sample, grids) -> [sum of num_tokens, hidden_size]"""
    block_arguments: Callable[[Any, Tensor, Grids], BlockArguments]
    """(model, hidden states as arranged, grids) -> what each block takes beside them"""
    finish: Callable[[Any, Tensor, Grids], Tensor] = lambda model, hidden, grids: hidden
    """(model, hidden states as arranged, grids) -> all features ("full"), as arranged"""
    pool: Callable[[Any, Tensor, Grids], Tensor] | None = None
    """Of towers: (model, all features [items, tokens, width], grids) -> [items, width], what transformers calls
    `pooler_output`, or the mean over an item where it has none. None: the family cannot be a tower."""

    @property
    def has_full_attention(self) -> bool:
        """Whether blocks know nothing but the tokens, and every token sees its whole item."""
        return self.block_arguments is _no_mask


def family_of(model: nn.Module) -> EncoderFamily:
    """Raises `ValueError` if the module is no encoder that motet knows, or is set up in a way that it cannot run."""
    name = type(model).__name__
    own = adopt(model)
    if own is not None:
        return _own_family(own)
    config = getattr(model, "config", None)
    family = ENCODER_FAMILIES.get(getattr(config, "model_type", ""))
    if family is None or family.model_class not in (base.__name__ for base in type(model).__mro__):
        known = ", ".join(family.model_class for family in ENCODER_FAMILIES.values())
        raise UserError(f"encoder: {name} is not known; known are {known}; make it known by motet.register_encoder")
    if getattr(config, "encoder_layerdrop", 0.0):
        raise UserError(f"encoder: {name} has encoder_layerdrop {config.encoder_layerdrop}; set it to 0")  # type: ignore[union-attr]
    if family is ENCODER_FAMILIES["pixtral"] and is_flash_attention_requested(config):
        raise UserError("encoder: PixtralVisionModel does not run with flash attention; set attn_implementation: sdpa")
    return family


def _own_family(config: OwnConfig) -> EncoderFamily:
    """Makes the family of a module that is not cut: one layer that is the whole module, and an empty head."""
    name, blocks = config.model_type.rpartition(".")[2], config.blocks
    if blocks is not None:

        def embed(model: Any, features: Sequence[Tensor], grids: Grids) -> Tensor:
            check_norms(model)
            return run_before_blocks(model, [item for feature in features for item in feature], blocks)

        return EncoderFamily(
            model_class=name,
            feature=config.encoder.feature,
            embed_parts=blocks.before,
            blocks=blocks.path,
            head_parts=blocks.after,
            num_blocks="num_blocks",
            output_size="output_size",
            embed=embed,
            block_arguments=lambda model, hidden, grids: lambda index: {},
            finish=lambda model, hidden, grids: run_behind_blocks(model, hidden, grids, blocks),
        )
    return EncoderFamily(
        model_class=name,
        feature=config.encoder.feature,
        embed_parts=("",),
        blocks="",
        num_blocks="num_blocks",
        embed=lambda model, features, grids: torch.cat(run(model, [item for feature in features for item in feature])),
        block_arguments=lambda model, hidden, grids: lambda index: {},
        arrangement=Arrangement.FLAT,
    )


def num_blocks(model: nn.Module) -> int:
    return getattr(encoder_config(model), family_of(model).num_blocks)


def num_running_blocks(model: nn.Module, feature_layer: int | None) -> int:
    """Returns the number of blocks before the features that are the output. `feature_layer`: None: all blocks.

    Raises `ValueError` for one that the model does not have."""
    total = num_blocks(model)
    if feature_layer is None:
        return total
    return blocks_before_features(encoder_config(model).model_type, total, feature_layer)


def _by_shape(embed: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Sequence[Tensor], Grids], Tensor]:
    """Runs `embed` ([items, ...] -> [items, tokens, hidden_size]) once for each run of samples of equal item shape."""

    def embed_all(model: Any, features: Sequence[Tensor], grids: Grids) -> Tensor:
        runs = [torch.cat(list(run)) for _, run in groupby(features, key=lambda feature: feature.shape[1:])]
        return torch.cat([embed(model, run).flatten(0, 1) for run in runs])

    return embed_all


def _no_mask(model: Any, hidden: Tensor, grids: Grids) -> BlockArguments:
    return lambda index: {"attention_mask": None}


# SigLIP and CLIP ------------------------------------------------------------------------------------------------------


def _embed_interpolated(model: Any, pixels: Tensor) -> Tensor:
    native = (model.config.image_size, model.config.image_size)
    return model.embeddings(pixels, interpolate_pos_encoding=tuple(pixels.shape[-2:]) != native)


def _embed_clip(model: Any, pixels: Tensor) -> Tensor:
    return model.pre_layrnorm(_embed_interpolated(model, pixels))


def _pool_clip(model: Any, hidden: Tensor, grids: Grids) -> Tensor:
    return model.post_layernorm(hidden[:, 0])


# Text ----------------------------------------------------------------------------------------------------------------


def _attended_tokens(hidden: Tensor, grids: Grids) -> Tensor | None:
    """[items, tokens] of 1 and 0, from grids (tokens, place of the end-of-text token, first attended, end); None where
    nothing is masked."""
    if all(len(grid) < 4 for grid in grids):
        return None
    num_tokens = hidden.shape[1]
    first, end = (
        torch.tensor([grid[k] if len(grid) > 2 else whole for grid in grids])[:, None]
        for k, whole in ((2, 0), (3, num_tokens))
    )
    place = torch.arange(num_tokens)
    attended = (first <= place) & (place < end)
    return None if attended.all() else to_device(attended.long(), hidden.device)


def _causal(model: Any, hidden: Tensor, grids: Grids) -> BlockArguments:
    attended = _attended_tokens(hidden, grids)
    with KnownMasks():
        mask = create_causal_mask(
            config=model.config, inputs_embeds=hidden, attention_mask=attended, past_key_values=None
        )
    return lambda index: {"attention_mask": mask, "is_causal": True}


def _mask_of_text(model: Any, hidden: Tensor, grids: Grids) -> BlockArguments:
    return _within(model, hidden, _attended_tokens(hidden, grids))


def _within(model: Any, hidden: Tensor, attended: Tensor | None) -> BlockArguments:
    """Attention in both directions to the tokens that are `attended`; None: to all."""
    with KnownMasks():
        mask = create_bidirectional_mask(config=model.config, inputs_embeds=hidden, attention_mask=attended)
    return lambda index: {"attention_mask": mask}


def _pool_at_end_of_text(model: Any, hidden: Tensor, grids: Grids) -> Tensor:
    """The grid says where a text ends: (tokens, place of the end-of-text token); without a place, at its last token."""
    last = hidden.shape[1] - 1
    places = torch.tensor([grid[1] if len(grid) > 1 else last for grid in grids])
    return hidden[torch.arange(len(hidden), device=hidden.device), to_device(places, hidden.device)]


# Whisper and Qwen2-Audio ----------------------------------------------------------------------------------------------


def _embed_mel(model: Any, mel: Tensor) -> Tensor:
    expected = 2 * model.config.max_source_positions
    if mel.shape[-1] != expected:
        raise UserError(f"features: {type(model).__name__} needs {expected} mel frames, not {mel.shape[-1]}; pad to it")
    hidden = functional.gelu(model.conv1(mel.to(model.conv1.weight.dtype)))
    hidden = functional.gelu(model.conv2(hidden)).transpose(1, 2)
    hidden = hidden + model.embed_positions.weight
    return functional.dropout(hidden, p=model.dropout, training=model.training)


def _valid_frames(hidden: Tensor, grids: Grids) -> tuple[Tensor, Tensor]:
    """On the host: each clip's number of frames that are no padding, and [clips, frames] which are none."""
    num_tokens = hidden.shape[1]
    valid = torch.tensor([(grid[0] + 1) // 2 if grid else num_tokens for grid in grids])
    return valid, torch.arange(num_tokens) < valid[:, None]


def _mask_padding(model: Any, hidden: Tensor, grids: Grids) -> BlockArguments:
    """Nobody attends to padding; a clip without a grid has none."""
    _, is_valid = _valid_frames(hidden, grids)
    return _within(model, hidden, None if is_valid.all() else to_device(is_valid.long(), hidden.device))


def _pool(model: Any, hidden: Tensor, grids: Grids) -> Tensor:
    return model.layer_norm(model.avg_pooler(hidden.transpose(1, 2)).transpose(1, 2))


def _mean_of_valid_frames(model: Any, hidden: Tensor, grids: Grids) -> Tensor:
    valid, is_valid = (to_device(own, hidden.device) for own in _valid_frames(hidden, grids))
    return (hidden * is_valid[..., None]).sum(1) / valid[:, None]


# Pixtral --------------------------------------------------------------------------------------------------------------


def _embed_cropped(model: Any, features: Sequence[Tensor], grids: Grids) -> Tensor:
    """Each image is cut to its own grid: a sample's images are padded to its largest."""
    dtype = model.patch_conv.weight.dtype
    images = [image for feature in features for image in model.patch_conv(feature.to(dtype))]
    patches = [image[:, :rows, :columns].flatten(1).T for image, (rows, columns) in zip(images, grids, strict=True)]
    return model.ln_pre(torch.cat(patches))


def _rotary_and_block_mask(model: Any, hidden: Tensor, grids: Grids) -> BlockArguments:
    positions = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in grids]
    rotary = model.patch_positional_embedding(hidden, to_device(torch.cat(positions), hidden.device))
    mask = generate_block_attention_mask([rows * columns for rows, columns in grids], hidden)
    return lambda index: {"attention_mask": mask, "position_embeddings": rotary}


# Qwen2.5-VL vision ----------------------------------------------------------------------------------------------------


def _windows(model: Any, grids: Grids) -> tuple[Tensor, Tensor]:
    """The order of merge units by windows, and where windows begin. Never mixes items."""
    config = model.config
    return get_vision_window_index(
        torch.tensor(grids),
        spatial_merge_size=config.spatial_merge_size,
        window_size=config.window_size,
        patch_size=config.patch_size,
    )


def _embed_in_windows(model: Any, features: Sequence[Tensor], grids: Grids) -> Tensor:
    hidden = model.patch_embed(torch.cat(list(features)))
    order, _ = _windows(model, grids)
    return model.permute_input_for_window_attn(hidden, to_device(order, hidden.device), seq_len=hidden.shape[0])


def _rotary_and_windows(model: Any, hidden: Tensor, grids: Grids) -> BlockArguments:
    order, window_bounds = _windows(model, grids)
    grid_thw = torch.tensor(grids)
    bounds = get_vision_cu_seqlens(grid_thw)
    if is_flash_attention_requested(model.config):  # Others split by bounds that the host has to know.
        bounds, window_bounds = to_device(bounds, hidden.device), to_device(window_bounds, hidden.device)
    order = to_device(order, hidden.device)
    positions = to_device(get_vision_position_ids(grid_thw, model.config.spatial_merge_size), hidden.device)
    rotary = tuple(
        model.permute_input_for_window_attn(part, order, seq_len=hidden.shape[0])
        for part in model.rotary_pos_emb(hidden, positions)
    )
    full = model.config.fullatt_block_indexes
    return lambda index: {
        "cu_seqlens": bounds if index in full else window_bounds,
        "position_embeddings": rotary,
    }


def _merge_and_restore_order(model: Any, hidden: Tensor, grids: Grids) -> Tensor:
    order, _ = _windows(model, grids)
    return model.merger(hidden)[to_device(torch.argsort(order), hidden.device)]


ENCODER_FAMILIES: Mapping[str, EncoderFamily] = {
    "siglip_vision_model": EncoderFamily(
        model_class="SiglipVisionModel",
        feature="pixel_values",
        embed_parts=("embeddings",),
        blocks="encoder.layers",
        head_parts=("post_layernorm", "head"),
        embed=_by_shape(_embed_interpolated),
        block_arguments=_no_mask,
        finish=lambda model, hidden, grids: model.post_layernorm(hidden),
        pool=lambda model, hidden, grids: model.head(hidden),
    ),
    "clip_vision_model": EncoderFamily(
        model_class="CLIPVisionModel",
        feature="pixel_values",
        embed_parts=("embeddings", "pre_layrnorm"),
        blocks="encoder.layers",
        head_parts=("post_layernorm",),
        embed=_by_shape(_embed_clip),
        block_arguments=_no_mask,
        pool=_pool_clip,
    ),
    "clip_text_model": EncoderFamily(
        model_class="CLIPTextModel",
        feature="input_ids",
        embed_parts=("embeddings",),
        blocks="encoder.layers",
        head_parts=("final_layer_norm",),
        embed=_by_shape(lambda model, ids: model.embeddings(input_ids=ids)),
        block_arguments=_causal,
        finish=lambda model, hidden, grids: model.final_layer_norm(hidden),
        pool=_pool_at_end_of_text,
    ),
    "siglip_text_model": EncoderFamily(
        model_class="SiglipTextModel",
        feature="input_ids",
        embed_parts=("embeddings",),
        blocks="encoder.layers",
        head_parts=("final_layer_norm", "head"),
        output_size="projection_size",
        embed=_by_shape(lambda model, ids: model.embeddings(input_ids=ids)),
        block_arguments=_mask_of_text,
        finish=lambda model, hidden, grids: model.final_layer_norm(hidden),
        pool=lambda model, hidden, grids: model.head(hidden[:, -1]),
    ),
    "bert": EncoderFamily(
        model_class="BertModel",
        feature="input_ids",
        embed_parts=("embeddings",),
        blocks="encoder.layer",
        head_parts=("pooler",),
        embed=_by_shape(lambda model, ids: model.embeddings(input_ids=ids)),
        block_arguments=_no_mask,
        pool=lambda model, hidden, grids: model.pooler(hidden),
    ),
    "dinov2": EncoderFamily(
        model_class="Dinov2Model",
        feature="pixel_values",
        embed_parts=("embeddings",),
        blocks="encoder.layer",
        head_parts=("layernorm",),
        embed=_by_shape(lambda model, pixels: model.embeddings(pixels)),
        block_arguments=_no_mask,
        finish=lambda model, hidden, grids: model.layernorm(hidden),
        pool=lambda model, hidden, grids: hidden[:, 0],
    ),
    "qwen2_5_vl_vision": EncoderFamily(
        model_class="Qwen2_5_VisionTransformerPretrainedModel",
        feature="pixel_values",
        embed_parts=("patch_embed",),
        blocks="blocks",
        head_parts=("merger",),
        num_blocks="depth",
        output_size="out_hidden_size",
        arrangement=Arrangement.FLAT,
        embed=_embed_in_windows,
        block_arguments=_rotary_and_windows,
        finish=_merge_and_restore_order,
    ),
    "pixtral": EncoderFamily(
        model_class="PixtralVisionModel",
        feature="pixel_values",
        embed_parts=("patch_conv", "ln_pre"),
        blocks="transformer.layers",
        arrangement=Arrangement.ROW,
        embed=_embed_cropped,
        block_arguments=_rotary_and_block_mask,
    ),
    "whisper": EncoderFamily(
        model_class="WhisperEncoder",
        feature="input_features",
        embed_parts=("conv1", "conv2", "embed_positions"),
        blocks="layers",
        head_parts=("layer_norm",),
        embed=_by_shape(_embed_mel),
        block_arguments=_no_mask,
        finish=lambda model, hidden, grids: model.layer_norm(hidden),
        pool=_mean_of_valid_frames,
    ),
    "qwen2_audio_encoder": EncoderFamily(
        model_class="Qwen2AudioEncoder",
        feature="input_features",
        embed_parts=("conv1", "conv2", "embed_positions"),
        blocks="layers",
        head_parts=("avg_pooler", "layer_norm"),
        embed=_by_shape(_embed_mel),
        block_arguments=_mask_padding,
        finish=_pool,
    ),
}
"""By the `model_type` of the configuration."""
