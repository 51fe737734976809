"""The shape of U-Nets from their configurations. Pure, for costs alone.

Configurations are diffusers' (`UNet2DConditionModel`, Rombach et al. 2022). A token is a place of the latent image at
full resolution; inner levels have a quarter as many each (`LayerShape.resolution`). Text or language-model outputs that
condition a U-Net are `incoming` tokens.

Its layers are its residual blocks, the two halves of its transformer blocks (self-attention; cross-attention and MLP,
with the projections in and out), and the changes of resolution.

Limits: skip connections are not among what a layer saves; U-Nets are planned and simulated, but not trained.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from motet.errors import UserError
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
    return _generator("UNet2DConditionModel", values, widths[0], out, layers)


def _unet_embed(channels_in: int, width: int, time_width: int) -> LayerShape:
    time = (Linear(width, time_width, True, rows="sequences"), Linear(time_width, time_width, True, rows="sequences"))
    return LayerShape("embed", width, (_convolution(channels_in, width, reads_layer_input=True), *time))


def _per_level(value: Any, num_levels: int) -> list[int]:
    return [value] * num_levels if isinstance(value, int) else list(value)


def _generator(
    family: str, values: Mapping[str, Any], width: int, out: int, layers: list[LayerShape]
) -> ModuleWorkload:
    return ModuleWorkload(
        kind="generator", family=family, config=values, hidden_size=width, output_size=out, layers=tuple(layers)
    )


GENERATORS: Mapping[str, Callable[[Config], ModuleWorkload]] = {
    "UNet2DConditionModel": _unet,
}
"""Readers by the class that diffusers' configuration names."""
