"""The shape of U-Nets from their configurations.

Configurations are diffusers' (`UNet2DConditionModel`, Rombach et al. 2022). A token is a place of the latent image at
full resolution; inner levels have a quarter as many each (`LayerShape.resolution`). Text or language-model outputs that
condition a U-Net are `incoming` tokens.

Its layers are its residual blocks, the two halves of its transformer blocks (self-attention; cross-attention and MLP,
with the projections in and out), and the changes of resolution.

`generator_workload` is the U-Net alone, as papers describe it; `unet_workload` has the connector before it and is what
can be trained, in one stage: the skips that would travel between two stages of Stable Diffusion 1.5 are 81 times what
its middle outputs.

Limits: skip connections are not among what a layer saves.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from motet.errors import UserError
from motet.shapes.diffusion_transformers import Connection, check_out_channels, connector_layer, guidance_told
from motet.shapes.module_shape import Attention, Config, LayerShape, Linear, ModuleWorkload

UNET_DEFAULTS: Mapping[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "cross_attention_dim": 1280,
    "attention_head_dim": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "transformer_layers_per_block": 1,
}
FREE = (*UNET_DEFAULTS, "up_block_types", "sample_size", "use_linear_projection", "norm_num_groups")
"""Keys that a U-Net to be trained may give."""
FIXED: Mapping[str, Any] = {
    "center_input_sample": False,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "only_cross_attention": False,
    "num_attention_heads": None,
    "downsample_padding": 1,
    "mid_block_scale_factor": 1,
    "dropout": 0.0,
    "act_fn": "silu",
    "norm_eps": 1e-5,
    "reverse_transformer_layers_per_block": None,
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "dual_cross_attention": False,
    "class_embed_type": None,
    "addition_embed_type": None,
    "addition_time_embed_dim": None,
    "num_class_embeds": None,
    "upcast_attention": False,
    "resnet_time_scale_shift": "default",
    "resnet_skip_time_act": False,
    "resnet_out_scale_factor": 1.0,
    "time_embedding_type": "positional",
    "time_embedding_dim": None,
    "time_embedding_act_fn": None,
    "timestep_post_act": None,
    "time_cond_proj_dim": None,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "projection_class_embeddings_input_dim": None,
    "attention_type": "default",
    "class_embeddings_concat": False,
    "mid_block_only_cross_attention": None,
    "cross_attention_norm": None,
    "addition_embed_type_num_heads": 64,
}
"""diffusers' defaults of its other keys, which have been shown equal."""
BLOCK_TYPES = {"CrossAttnDownBlock2D": "CrossAttnUpBlock2D", "DownBlock2D": "UpBlock2D"}
"""Blocks downwards, and the blocks upwards that mirror them."""
UNET_NATIVE_SIDE = 64
"""Height and width of latents at the native size of Stable Diffusion 1.5, where `sample_size` is not given."""


def unet_workload(config: Config, connection: Connection) -> ModuleWorkload:
    """`config`: what stands in a config.json of diffusers. Raises `UserError` for values that cannot be trained."""
    values = {**UNET_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    down = values["down_block_types"]
    values.setdefault("up_block_types", [BLOCK_TYPES.get(kind, kind) for kind in reversed(down)])
    _check(values)
    alone = generator_workload({**values, "_class_name": "UNet2DConditionModel"})
    size = values["cross_attention_dim"]
    return replace(
        alone,
        config={
            **{key: value for key, value in values.items() if not key.startswith("_")},
            "condition_size": size,
            "pooled_size": 0,
            "latent_channels": values["in_channels"],
            "place_side": 1,
            "native_side": values.get("sample_size", UNET_NATIVE_SIDE),
            "guidance": guidance_told(values, connection),
        },
        layers=(connector_layer(connection, size, 0), *alone.layers),
        max_stages=1,
        shares_tokens=False,
    )


def _check(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key.startswith("_") or key in FREE:
            continue
        if key not in FIXED:
            raise UserError(f"values.{key}: is not known; see UNet2DConditionModel of diffusers")
        if value != FIXED[key]:
            raise UserError(f"values.{key}: is {value}, which is not supported; leave it out")
    check_out_channels(values, values["in_channels"])
    if not isinstance(values["cross_attention_dim"], int):
        raise UserError("values.cross_attention_dim: one width of conditions is supported; give one number")
    if not isinstance(values.get("sample_size", UNET_NATIVE_SIDE), int):
        raise UserError("values.sample_size: give one number, the height and width of latents at the native size")
    down = list(values["down_block_types"])
    for kind in down:
        if kind not in BLOCK_TYPES:
            raise UserError(f"values.down_block_types: {kind} is not supported; give {' or '.join(BLOCK_TYPES)}")
    mirrored, up = [BLOCK_TYPES[kind] for kind in reversed(down)], list(values["up_block_types"])
    if up != mirrored:
        raise UserError(
            f"values.up_block_types: is {', '.join(up)}; give the mirror image of down_block_types, "
            f"{', '.join(mirrored)}"
        )
    if values["transformer_layers_per_block"] != 1:
        raise UserError("values.transformer_layers_per_block: more than 1 is not supported; leave it out")


def generator_workload(config: Config) -> ModuleWorkload:
    """`config`: what stands in a config.json of diffusers. Raises `UserError` for a class that is not known."""
    kind = str(config.get("_class_name"))
    if kind not in GENERATORS:
        raise UserError(f"model: _class_name {kind!r} is not known; known are {', '.join(GENERATORS)}")
    return GENERATORS[kind](config)


def _convolution(channels_in: int, channels_out: int, *, area: int = 9, reads_layer_input: bool = False) -> Linear:
    return Linear(area * channels_in, channels_out, bias=True, kernel_area=area, reads_layer_input=reads_layer_input)


def _residual_block(channels_in: int, channels_out: int, time_width: int, resolution: float) -> LayerShape:
    time = Linear(time_width, channels_out, bias=True, rows="sequences")
    shortcut = (_convolution(channels_in, channels_out, area=1, reads_layer_input=True),)
    return LayerShape(
        "block",
        channels_out,
        (
            _convolution(channels_in, channels_out),
            time,
            *(shortcut if channels_in != channels_out else ()),
            _convolution(channels_out, channels_out),
        ),
        other_parameters=2 * channels_in + 2 * channels_out,
        saved_vectors=2,
        resolution=resolution,
    )


def _transformer_halves(channels: int, heads: int, text_width: int, resolution: float) -> tuple[LayerShape, LayerShape]:
    """Self-attention; cross-attention and MLP."""

    def square(bias: bool = False) -> Linear:
        return Linear(channels, channels, bias)

    from_text = Linear(text_width, channels, rows="incoming")
    inner = 4 * channels
    own = LayerShape(
        "block",
        channels,
        (square(), square(), square(), square(bias=True)),
        Attention(heads, heads, channels // heads),
        other_parameters=4 * channels,
        saved_vectors=2,
        resolution=resolution,
    )
    crossing = LayerShape(
        "block",
        channels,
        (
            *(square(), from_text, from_text, square(bias=True)),
            *(square(bias=True), square(bias=True)),
            *(Linear(channels, 2 * inner, bias=True), Linear(inner, channels, bias=True)),
        ),
        Attention(heads, heads, channels // heads, reads_encoder=True),
        other_parameters=4 * channels,
        saved_vectors=2,
        gated=True,
        resolution=resolution,
    )
    return own, crossing


def _resized(channels: int, resolution: float) -> LayerShape:
    """The convolution after a change of resolution."""
    return LayerShape("block", channels, (_convolution(channels, channels),), resolution=resolution)


def _unet(config: Config) -> ModuleWorkload:
    values = {**UNET_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    widths = list(values["block_out_channels"])
    time_width, text_width = 4 * widths[0], values["cross_attention_dim"]
    crosses = ["CrossAttn" in kind for kind in values["down_block_types"]]
    per_level = _per_level(values["layers_per_block"], len(widths))
    transformers = _per_level(values["transformer_layers_per_block"], len(widths))
    # diffusers' `attention_head_dim` is the number of heads, for historical reasons.
    heads = _per_level(values.get("num_attention_heads") or values["attention_head_dim"], len(widths))

    def level(index: int, channels_in: list[int], *, attends: bool) -> Iterator[LayerShape]:
        resolution = 0.25**index
        for channels in channels_in:
            yield _residual_block(channels, widths[index], time_width, resolution)
            for _ in range(transformers[index] if attends else 0):
                yield from _transformer_halves(widths[index], heads[index], text_width, resolution)

    layers = [_unet_embed(values["in_channels"], widths[0], time_width)]
    skips, channels, last = [widths[0]], widths[0], len(widths) - 1
    for index, width in enumerate(widths):
        inputs = [channels] + [width] * (per_level[index] - 1)
        layers += level(index, inputs, attends=crosses[index])
        skips += [width] * per_level[index]
        channels = width
        if index < last:
            layers.append(_resized(width, 0.25 ** (index + 1)))
            skips.append(width)
    layers += level(last, [channels], attends=True)
    layers.append(_residual_block(channels, channels, time_width, 0.25**last))
    for index in range(last, -1, -1):
        inputs = []
        for _ in range(per_level[index] + 1):
            inputs.append(channels + skips.pop())
            channels = widths[index]
        layers += level(index, inputs, attends=crosses[index])
        if index:
            layers.append(_resized(channels, 0.25 ** (index - 1)))
    out = values["out_channels"]
    layers.append(LayerShape("head", out, (_convolution(channels, out),), other_parameters=2 * channels))
    return ModuleWorkload(
        kind="generator",
        family="UNet2DConditionModel",
        config=values,
        hidden_size=widths[0],
        output_size=out,
        layers=tuple(layers),
    )


def _unet_embed(channels_in: int, width: int, time_width: int) -> LayerShape:
    time = (Linear(width, time_width, True, rows="sequences"), Linear(time_width, time_width, True, rows="sequences"))
    return LayerShape("embed", width, (_convolution(channels_in, width, reads_layer_input=True), *time))


def _per_level(value: Any, num_levels: int) -> list[int]:
    return [value] * num_levels if isinstance(value, int) else list(value)


GENERATORS: Mapping[str, Callable[[Config], ModuleWorkload]] = {
    "UNet2DConditionModel": _unet,
}
"""Readers by the class that diffusers' configuration names."""
