"""The shape of diffusion transformers that read a language model, with their connector.

Layers: 0 is the connector, 1 embeds patches, time step and conditions, then come the blocks, and the last one is the
head with the loss. Classes, keys and defaults are those of diffusers; a test compares both with its modules. Blocks are
cut for tensor parallelism as `motet.parallel.tensor.diffusion_cuts` cuts the modules; Sana's convolutions are not.

Blocks of SD3, Flux and Qwen-Image attend over an image's places and its conditions jointly; here pairs of two
conditions and half of those of a condition and a place are left out, which is little where an image has many more
places than conditions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from motet.errors import UserError
from motet.shapes.module_shape import Attention, Config, LayerShape, Linear, ModuleWorkload, Rows

SD3_DEFAULTS: Mapping[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 18,
    "attention_head_dim": 64,
    "num_attention_heads": 18,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1152,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 96,
    "dual_attention_layers": (),
    "qk_norm": None,
}
PIXART_DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "cross_attention_dim": 1152,
    "attention_bias": True,
    "sample_size": 128,
    "patch_size": 2,
    "use_additional_conditions": None,
    "caption_channels": None,
}
SANA_DEFAULTS: Mapping[str, Any] = {
    "in_channels": 32,
    "out_channels": 32,
    "num_attention_heads": 70,
    "attention_head_dim": 32,
    "num_layers": 20,
    "num_cross_attention_heads": 20,
    "cross_attention_head_dim": 112,
    "cross_attention_dim": 2240,
    "caption_channels": 2304,
    "mlp_ratio": 2.5,
    "attention_bias": False,
    "sample_size": 32,
    "patch_size": 1,
    "norm_elementwise_affine": False,
    "guidance_embeds": False,
    "qk_norm": None,
}
FLUX_DEFAULTS: Mapping[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "out_channels": None,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}
QWEN_IMAGE_DEFAULTS: Mapping[str, Any] = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
    "zero_cond_t": False,
    "use_additional_t_cond": False,
    "use_layer3d_rope": False,
}
PACKED = ("FluxTransformer2DModel", "QwenImageTransformer2DModel")
"""Classes that are given latents in which two by two places are one, with four times the channels."""
PACKED_SIDE = 128
"""Height and width of latents at the native size of these, whose configurations have none: that of their pipelines."""
TIME_CHANNELS = 256
"""Width of a sinusoidal time embedding."""
MLP_RATIO = 4
DERIVED = ("condition_size", "pooled_size", "latent_channels", "place_side", "native_side", "guidance")
"""Keys that `ModuleWorkload.config` of a generator has beside those of diffusers: widths of a condition and of the
pooled one (0: there is none), channels of latents, how many of their rows and columns a place covers, their height and
width at the native size, and the guidance that the model is told (None: it is told none)."""


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How a generator reads the language model."""

    incoming_size: int
    """Width of the hidden states that it reads."""
    projector: Literal["linear", "mlp"]
    guidance: float | None = None
    """Guidance scale for models with guidance embeddings; None: 1."""


def own_values(config: Config) -> dict[str, Any]:
    """The keys of diffusers in `ModuleWorkload.config` of a generator."""
    return {key: value for key, value in config.items() if key not in DERIVED}


def guidance_told(values: Mapping[str, Any], connection: Connection) -> float | None:
    """The guidance that the model is told. Raises `UserError` if it cannot be told any."""
    if values.get("guidance_embeds"):
        return 1.0 if connection.guidance is None else connection.guidance
    if connection.guidance is not None:
        raise UserError("guidance: the model has no guidance embeddings (values.guidance_embeds); leave it out")
    return None


def check_out_channels(values: Mapping[str, Any], wanted: int) -> None:
    """Raises `UserError` unless the model's output has as many channels as what the loss compares it with."""
    if values["out_channels"] not in (None, wanted):
        raise UserError(
            f"values.out_channels: is {values['out_channels']}, but the loss compares the output with latents of "
            f"{values['in_channels']} channels (in_channels); give {wanted}"
        )


def transformer_workload(config: Config, connection: Connection) -> ModuleWorkload:
    """`config`: what stands in a config.json of diffusers. Raises `UserError` for values that cannot be trained."""
    kind = str(config["_class_name"])
    transformer = TRANSFORMERS[kind]
    values = {**transformer.defaults, **config}
    width = values["num_attention_heads"] * values["attention_head_dim"]
    check_out_channels(values, values["in_channels"] // (4 if kind == "QwenImageTransformer2DModel" else 1))
    transformer.check(values, width)
    size, pooled = transformer.condition_sizes(values)
    embed, blocks, head = transformer.layers(values, width)
    is_packed = kind in PACKED
    is_cut = any(linear.cut for block in blocks for linear in block.linears)
    return ModuleWorkload(
        kind="generator",
        family=kind,
        config={
            **values,
            "condition_size": size,
            "pooled_size": pooled,
            "latent_channels": values["in_channels"] // (4 if is_packed else 1),
            "place_side": 2 if is_packed else values["patch_size"],
            "native_side": PACKED_SIDE if is_packed else values["sample_size"],
            "guidance": guidance_told(values, connection),
        },
        hidden_size=width,
        output_size=values["in_channels"] * (1 if is_packed else values["patch_size"] ** 2),
        layers=(connector_layer(connection, size, pooled), embed, *blocks, head),
        must_divide={"num_attention_heads": values["num_attention_heads"]} if is_cut else None,
        shares_tokens=False,
        num_time_vectors=transformer.num_time_vectors,
    )


def connector_layer(connection: Connection, size: int, pooled: int) -> LayerShape:
    """A norm, one or two linears, the projection of the conditions' mean, and the null condition."""
    linears = [Linear(connection.incoming_size, size, bias=True, rows="incoming")]
    if connection.projector == "mlp":
        linears.append(Linear(size, size, bias=True, rows="incoming"))
    if pooled:
        linears.append(Linear(size, pooled, bias=True, rows="sequences"))
    others = 2 * connection.incoming_size + size
    return LayerShape("projector", size, tuple(linears), other_parameters=others, saved_vectors=1)


def _per_sequence(features: int, out: int) -> Linear:
    return Linear(features, out, bias=True, rows="sequences")


def _time(width: int) -> tuple[Linear, Linear]:
    return _per_sequence(TIME_CHANNELS, width), _per_sequence(width, width)


def _patches(values: Mapping[str, Any], width: int) -> Linear:
    return Linear(values["patch_size"] ** 2 * values["in_channels"], width, bias=True, reads_layer_input=True)


def _column(features: int, out: int, bias: bool = True, rows: Rows = "tokens") -> Linear:
    return Linear(features, out, bias=bias, cut="column", rows=rows)


def _row(features: int, out: int, rows: Rows = "tokens") -> Linear:
    return Linear(features, out, bias=True, cut="row", rows=rows)


def _mlp(width: int, rows: Rows = "tokens") -> tuple[Linear, Linear]:
    return _column(width, MLP_RATIO * width, rows=rows), _row(MLP_RATIO * width, width, rows)


def _output(values: Mapping[str, Any], width: int) -> Linear:
    return Linear(width, values["patch_size"] ** 2 * values["in_channels"], bias=True)


def _timed_head(width: int, output: Linear) -> LayerShape:
    """The time shifts and scales the last norm."""
    return LayerShape("head", width, (_per_sequence(width, 2 * width), output), saved_vectors=1)


Parts = tuple[LayerShape, list[LayerShape], LayerShape]


def _sd3(values: Mapping[str, Any], width: int) -> Parts:
    heads, head_dim = values["num_attention_heads"], values["attention_head_dim"]
    pooled = values["pooled_projection_dim"]
    embed = LayerShape(
        "embed",
        width,
        (
            _patches(values, width),
            *_time(width),
            *(_per_sequence(pooled, width), _per_sequence(width, width)),
            Linear(values["joint_attention_dim"], width, bias=True, rows="incoming"),
        ),
    )
    norms = 4 * head_dim if values["qk_norm"] else 0

    def block(is_last: bool) -> LayerShape:
        """The last one's conditions are read, but not changed."""
        return _joint_block(width, heads, head_dim, norms, changes_conditions=not is_last)

    number = values["num_layers"]
    return embed, [block(i == number - 1) for i in range(number)], _timed_head(width, _output(values, width))


def _joint_block(width: int, heads: int, head_dim: int, norms: int, *, changes_conditions: bool = True) -> LayerShape:
    """Places and conditions have weights of their own and attend jointly. `norms`: parameters of norms of queries and
    keys."""
    own, context = _column(width, width), _column(width, width, rows="incoming")
    of_context = [context, context, context, *([_row(width, width, "incoming")] if changes_conditions else [])]
    mlps = (*(_mlp(width, "incoming") if changes_conditions else ()), *_mlp(width))
    time = (_per_sequence(width, 6 * width), _per_sequence(width, (6 if changes_conditions else 2) * width))
    attention = Attention(heads, heads, head_dim, normalizes=norms > 0)
    return LayerShape(
        "block",
        width,
        (own, own, own, _row(width, width), *of_context, *time, *mlps),
        attention,
        replace(attention, reads_encoder=True, num_linears=len(of_context)),
        other_parameters=norms,
        saved_vectors=2,
        saved_vectors_for_weights=2,
    )


def _flux(values: Mapping[str, Any], width: int) -> Parts:
    """Blocks with weights of their own for places and conditions, then blocks with one set of weights for both, in
    which attention and MLP run side by side, with one linear behind both. All of their linears count as the
    attention's, and of its pairs those of places."""
    heads, head_dim = values["num_attention_heads"], values["attention_head_dim"]
    pooled, inner = values["pooled_projection_dim"], MLP_RATIO * width
    told = _time(width) if values["guidance_embeds"] else ()
    embed = LayerShape(
        "embed",
        width,
        (
            Linear(values["in_channels"], width, bias=True, reads_layer_input=True),
            *_time(width),
            *told,
            *(_per_sequence(pooled, width), _per_sequence(width, width)),
            Linear(values["joint_attention_dim"], width, bias=True, rows="incoming"),
        ),
    )
    double = _joint_block(width, heads, head_dim, 4 * head_dim)
    both = _column(width, width, rows="joint")
    single = LayerShape(
        "block",
        width,
        (
            *(both, both, both, _column(width, inner, rows="joint")),
            _per_sequence(width, 3 * width),
            _row(width + inner, width, "joint"),
        ),
        Attention(heads, heads, head_dim, normalizes=True, num_linears=6),
        other_parameters=2 * head_dim,
        saved_vectors=1,
        saved_vectors_for_weights=1,
    )
    head = _timed_head(width, Linear(width, values["in_channels"], bias=True))
    return embed, [double] * values["num_layers"] + [single] * values["num_single_layers"], head


def _qwen_image(values: Mapping[str, Any], width: int) -> Parts:
    """The last block changes its conditions too, though nothing reads them."""
    embed = LayerShape(
        "embed",
        width,
        (
            Linear(values["in_channels"], width, bias=True, reads_layer_input=True),
            *_time(width),
            Linear(values["joint_attention_dim"], width, bias=True, rows="incoming"),
        ),
        other_parameters=values["joint_attention_dim"],
    )
    head_dim = values["attention_head_dim"]
    block = _joint_block(width, values["num_attention_heads"], head_dim, 4 * head_dim)
    head = _timed_head(width, Linear(width, values["in_channels"], bias=True))
    return embed, [block] * values["num_layers"], head


def _captioned_embedding(values: Mapping[str, Any], width: int) -> LayerShape:
    """Conditions enter by an MLP of two linears."""
    return LayerShape(
        "embed",
        width,
        (
            _patches(values, width),
            *_time(width),
            _per_sequence(width, 6 * width),
            Linear(values["caption_channels"], width, bias=True, rows="incoming"),
            Linear(width, width, bias=True, rows="incoming"),
        ),
    )


def _pixart(values: Mapping[str, Any], width: int) -> Parts:
    heads, head_dim = values["num_attention_heads"], values["attention_head_dim"]
    own = _column(width, width, values["attention_bias"])
    context = replace(own, rows="incoming")
    output = _row(width, width)
    attention = Attention(heads, heads, head_dim)
    block = LayerShape(
        "block",
        width,
        (*(own, own, own, output), *(own, context, context, output), *_mlp(width)),
        attention,
        replace(attention, reads_encoder=True),
        other_parameters=6 * width,
        saved_vectors=2,
        saved_vectors_for_weights=2,
    )
    head = LayerShape("head", width, (_output(values, width),), other_parameters=2 * width, saved_vectors=1)
    return _captioned_embedding(values, width), [block] * values["num_layers"], head


def _sana(values: Mapping[str, Any], width: int) -> Parts:
    """Self-attention is linear in the places; behind it comes a gated MLP with a depthwise convolution of 3 x 3."""
    heads, head_dim = values["num_attention_heads"], values["attention_head_dim"]
    crossing_heads, crossing_dim = values["num_cross_attention_heads"], values["cross_attention_head_dim"]
    crossed, inner = crossing_heads * crossing_dim, int(values["mlp_ratio"] * width)
    own = Linear(width, width, bias=values["attention_bias"])
    context = Linear(width, crossed, bias=True, rows="incoming")
    block = LayerShape(
        "block",
        width,
        (
            *(own, own, own, Linear(width, width, bias=True)),
            *(Linear(width, crossed, bias=True), context, context, Linear(crossed, width, bias=True)),
            Linear(width, 2 * inner, bias=True),
            Linear(9, 2 * inner, bias=True, kernel_area=9),
            Linear(inner, width),
        ),
        # A head's keys times its values and a one are summed over the places; each query then reads the sum.
        Attention(heads, heads, head_dim, window=0, flops_per_token=4.0 * heads * head_dim * (head_dim + 1)),
        Attention(crossing_heads, crossing_heads, crossing_dim, reads_encoder=True),
        other_parameters=6 * width,
        saved_vectors=2,
        saved_vectors_for_weights=2,
        gated=True,
    )
    head = LayerShape("head", width, (_output(values, width),), other_parameters=2 * width, saved_vectors=1)
    return replace(_captioned_embedding(values, width), other_parameters=width), [block] * values["num_layers"], head


def _check_width(values: Mapping[str, Any], key: str, width: int) -> None:
    if values[key] != width:
        raise UserError(
            f"values.{key}: is {values[key]}, but num_attention_heads times attention_head_dim are {width}; "
            f"give {width}"
        )


def _check_left_out(values: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if values[key]:
            raise UserError(f"values.{key}: is not supported; leave it out")


def _check_sana(values: Mapping[str, Any], width: int) -> None:
    _check_width(values, "cross_attention_dim", width)
    _check_left_out(values, "guidance_embeds", "qk_norm", "norm_elementwise_affine")


def _check_sd3(values: Mapping[str, Any], width: int) -> None:
    _check_width(values, "caption_projection_dim", width)
    _check_left_out(values, "dual_attention_layers")


def _check_pixart(values: Mapping[str, Any], width: int) -> None:
    _check_width(values, "cross_attention_dim", width)
    if values["caption_channels"] is None:
        raise UserError("values.caption_channels: is missing; give the width of the conditions, such as 4096")
    uses = values["use_additional_conditions"]
    if uses or (uses is None and values["sample_size"] == 128):
        raise UserError(
            "values.use_additional_conditions: is true (as it is for sample_size 128 unless it is given), but sizes "
            "and aspect ratios are not among the conditions; give false"
        )


def _check_flux(values: Mapping[str, Any], width: int) -> None:
    _check_packed(values)
    if values["patch_size"] != 1:
        raise UserError(f"values.patch_size: is {values['patch_size']}, but latents are packed before; give 1")
    if values["num_single_layers"] < 1:
        raise UserError(f"values.num_single_layers: is {values['num_single_layers']}; give at least 1")


def _check_qwen_image(values: Mapping[str, Any], width: int) -> None:
    _check_packed(values)
    if values["patch_size"] != 2 or values["out_channels"] is None:
        raise UserError("values.patch_size: latents are packed two by two; give 2, and out_channels")
    _check_left_out(values, "guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")


def _check_packed(values: Mapping[str, Any]) -> None:
    if values["in_channels"] % 4:
        raise UserError(
            f"values.in_channels: is {values['in_channels']}, but two by two places of the latents are packed into "
            "one; give four times the latents' channels"
        )
    axes, head_dim = list(values["axes_dims_rope"]), values["attention_head_dim"]
    if sum(axes) != head_dim or len(axes) != 3 or any(axis % 2 for axis in axes):
        raise UserError(
            f"values.axes_dims_rope: is {axes}; give three even numbers whose sum is attention_head_dim, {head_dim}"
        )


@dataclass(frozen=True, kw_only=True)
class _Transformer:
    """A class of diffusers. Functions are given the values of a configuration, and the width of the blocks."""

    defaults: Mapping[str, Any]
    condition_sizes: Callable[[Mapping[str, Any]], tuple[int, int]]
    """Width of a condition, and of the pooled condition (0: there is none)."""
    layers: Callable[[Mapping[str, Any], int], Parts]
    check: Callable[[Mapping[str, Any], int], None]
    num_time_vectors: int = 1
    """Vectors that a time step becomes: those that blocks read, and one more if the head reads another."""


def _joint_and_pooled(values: Mapping[str, Any]) -> tuple[int, int]:
    return values["joint_attention_dim"], values["pooled_projection_dim"]


def _captions(values: Mapping[str, Any]) -> tuple[int, int]:
    return values["caption_channels"], 0


TRANSFORMERS: Mapping[str, _Transformer] = {
    "SD3Transformer2DModel": _Transformer(
        defaults=SD3_DEFAULTS, condition_sizes=_joint_and_pooled, layers=_sd3, check=_check_sd3
    ),
    "PixArtTransformer2DModel": _Transformer(
        defaults=PIXART_DEFAULTS, condition_sizes=_captions, layers=_pixart, check=_check_pixart, num_time_vectors=7
    ),
    "SanaTransformer2DModel": _Transformer(
        defaults=SANA_DEFAULTS, condition_sizes=_captions, layers=_sana, check=_check_sana, num_time_vectors=7
    ),
    "FluxTransformer2DModel": _Transformer(
        defaults=FLUX_DEFAULTS, condition_sizes=_joint_and_pooled, layers=_flux, check=_check_flux
    ),
    "QwenImageTransformer2DModel": _Transformer(
        defaults=QWEN_IMAGE_DEFAULTS,
        condition_sizes=lambda values: (values["joint_attention_dim"], 0),
        layers=_qwen_image,
        check=_check_qwen_image,
    ),
}
"""By class of diffusers."""
