"""The shape of diffusion transformers that read a language model (SD3, PixArt, Sana), with their connector.

Layers: 0 is the connector, 1 embeds patches, time step and conditions, then come the blocks, and the last one is the
head with the loss. Classes, keys and defaults are those of diffusers; a test compares both with its modules.

An SD3 block attends over an image's places and its conditions jointly; here pairs of two conditions and half of those
of a condition and a place are left out, which is little where an image has many more places than conditions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from motet.errors import UserError
from motet.shapes.module_shape import Attention, Config, LayerShape, Linear, ModuleWorkload

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
NUM_TIME_VECTORS: Mapping[str, int] = {
    "SD3Transformer2DModel": 1,
    "PixArtTransformer2DModel": 7,
    "SanaTransformer2DModel": 7,
}
"""Vectors that a time step becomes: SD3's blocks read one, those of the others six, and their heads one more."""
TIME_CHANNELS = 256
"""Width of a sinusoidal time embedding."""
MLP_RATIO = 4


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How a generator reads the language model."""

    incoming_size: int
    """Width of the hidden states that it reads."""
    projector: Literal["linear", "mlp"]


def transformer_workload(config: Config, connection: Connection) -> ModuleWorkload:
    """`config`: what stands in a config.json of diffusers. Raises `UserError` for values that cannot be trained."""
    kind = str(config["_class_name"])
    defaults, conditions, layers_of, checks = TRANSFORMERS[kind]
    values = {**defaults, **config}
    width = values["num_attention_heads"] * values["attention_head_dim"]
    if values["out_channels"] not in (None, values["in_channels"]):
        raise UserError(
            f"values.out_channels: is {values['out_channels']}, but the loss compares the {values['in_channels']} "
            "channels of in_channels; give as many"
        )
    checks(values, width)
    size, pooled = conditions(values)
    embed, blocks, head = layers_of(values, width)
    return ModuleWorkload(
        kind="generator",
        family=kind,
        config={**values, "condition_size": size, "pooled_size": pooled},
        hidden_size=width,
        output_size=values["patch_size"] ** 2 * values["in_channels"],
        layers=(_connector(connection, size, pooled), embed, *blocks, head),
        shares_tokens=False,
        num_time_vectors=NUM_TIME_VECTORS[kind],
    )


def _connector(connection: Connection, size: int, pooled: int) -> LayerShape:
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


def _mlp(width: int, rows: Literal["tokens", "incoming"] = "tokens") -> tuple[Linear, Linear]:
    inner = MLP_RATIO * width
    return Linear(width, inner, bias=True, rows=rows), Linear(inner, width, bias=True, rows=rows)


def _output(values: Mapping[str, Any], width: int) -> Linear:
    return Linear(width, values["patch_size"] ** 2 * values["in_channels"], bias=True)


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
    own, context = Linear(width, width, bias=True), Linear(width, width, bias=True, rows="incoming")
    attention = Attention(heads, heads, head_dim, normalizes=values["qk_norm"] is not None)
    norms = 4 * head_dim if values["qk_norm"] else 0

    def block(is_last: bool) -> LayerShape:
        """The last one's conditions are read, but not changed."""
        of_context = [context] * (3 if is_last else 4)
        mlps = (*_mlp(width), *(() if is_last else _mlp(width, "incoming")))
        time = (_per_sequence(width, 6 * width), _per_sequence(width, (2 if is_last else 6) * width))
        return LayerShape(
            "block",
            width,
            (*[own] * 4, *of_context, *mlps, *time),
            attention,
            replace(attention, reads_encoder=True, num_linears=len(of_context)),
            other_parameters=norms,
            saved_vectors=2,
            saved_vectors_for_weights=2,
        )

    head = LayerShape("head", width, (_per_sequence(width, 2 * width), _output(values, width)), saved_vectors=1)
    number = values["num_layers"]
    return embed, [block(i == number - 1) for i in range(number)], head


def _pixart(values: Mapping[str, Any], width: int) -> Parts:
    heads, head_dim = values["num_attention_heads"], values["attention_head_dim"]
    embed = LayerShape(
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
    own = Linear(width, width, bias=values["attention_bias"])
    context = replace(own, rows="incoming")
    output = replace(own, bias=True)
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
    return embed, [block] * values["num_layers"], head


def _sana(values: Mapping[str, Any], width: int) -> Parts:
    """Self-attention is linear in the places; behind it comes a gated MLP with a depthwise convolution of 3 x 3."""
    heads, head_dim = values["num_attention_heads"], values["attention_head_dim"]
    crossing_heads, crossing_dim = values["num_cross_attention_heads"], values["cross_attention_head_dim"]
    crossed, inner = crossing_heads * crossing_dim, int(values["mlp_ratio"] * width)
    embed = LayerShape(
        "embed",
        width,
        (
            _patches(values, width),
            *_time(width),
            _per_sequence(width, 6 * width),
            Linear(values["caption_channels"], width, bias=True, rows="incoming"),
            Linear(width, width, bias=True, rows="incoming"),
        ),
        other_parameters=width,
    )
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
    return embed, [block] * values["num_layers"], head


def _check_sana(values: Mapping[str, Any], width: int) -> None:
    if values["cross_attention_dim"] != width:
        raise UserError(
            f"values.cross_attention_dim: is {values['cross_attention_dim']}, but num_attention_heads times "
            f"attention_head_dim are {width}; give {width}"
        )
    for key in ("guidance_embeds", "qk_norm", "norm_elementwise_affine"):
        if values[key]:
            raise UserError(f"values.{key}: is not supported; leave it out")


def _check_sd3(values: Mapping[str, Any], width: int) -> None:
    if values["caption_projection_dim"] != width:
        raise UserError(
            f"values.caption_projection_dim: is {values['caption_projection_dim']}, but num_attention_heads times "
            f"attention_head_dim are {width}; give {width}"
        )
    if values["dual_attention_layers"]:
        raise UserError("values.dual_attention_layers: is not supported; leave it out")


def _check_pixart(values: Mapping[str, Any], width: int) -> None:
    if values["cross_attention_dim"] != width:
        raise UserError(
            f"values.cross_attention_dim: is {values['cross_attention_dim']}, but num_attention_heads times "
            f"attention_head_dim are {width}; give {width}"
        )
    if values["caption_channels"] is None:
        raise UserError("values.caption_channels: is missing; give the width of the conditions, such as 4096")
    uses = values["use_additional_conditions"]
    if uses or (uses is None and values["sample_size"] == 128):
        raise UserError(
            "values.use_additional_conditions: is true (as it is for sample_size 128 unless it is given), but sizes "
            "and aspect ratios are not among the conditions; give false"
        )


Sizes = Callable[[Mapping[str, Any]], tuple[int, int]]
"""Width of a condition, and of the pooled condition (0: there is none)."""
TRANSFORMERS: Mapping[
    str,
    tuple[
        Mapping[str, Any],
        Sizes,
        Callable[[Mapping[str, Any], int], Parts],
        Callable[[Mapping[str, Any], int], None],
    ],
] = {
    "SD3Transformer2DModel": (
        SD3_DEFAULTS,
        lambda values: (values["joint_attention_dim"], values["pooled_projection_dim"]),
        _sd3,
        _check_sd3,
    ),
    "PixArtTransformer2DModel": (
        PIXART_DEFAULTS,
        lambda values: (values["caption_channels"], 0),
        _pixart,
        _check_pixart,
    ),
    "SanaTransformer2DModel": (SANA_DEFAULTS, lambda values: (values["caption_channels"], 0), _sana, _check_sana),
}
"""By class of diffusers: defaults, sizes of conditions, layers, and checks."""
