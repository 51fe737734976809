"""Shapes of the published models, from their published sizes alone: no release of transformers changes them.

Each function takes the keys of a transformers configuration. Fused linears count as their parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from motet.plan import ModuleKind
from motet.shapes.module_shape import Attention, LayerShape, Linear, ModuleWorkload

Config = Mapping[str, Any]
NUMBERS = (
    *("num_attention_heads", "num_key_value_heads", "num_heads", "encoder_attention_heads"),
    *("intermediate_size", "encoder_ffn_dim"),
)
"""Numbers that the tensor-parallel size must divide."""


def module_workload(config: Config) -> ModuleWorkload:
    """The shape of a llama, a GPT (gpt2), a ViT (clip_vision_model, siglip_vision_model), a clip_text_model, a whisper
    encoder or the vision encoder of Qwen2.5-VL."""
    makers = {
        "llama": _llama,
        "gpt2": _llama,
        "clip_vision_model": _vit,
        "siglip_vision_model": _vit,
        "clip_text_model": _clip_text,
        "whisper": _whisper,
        "qwen2_5_vl_vision": _qwen2_5_vl,
    }
    return makers[config["model_type"]](config)


def as_tower(encoder: ModuleWorkload) -> ModuleWorkload:
    return replace(encoder, kind="tower")


def _llama(config: Config) -> ModuleWorkload:
    width, heads, inner = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    attention = Attention(heads, config["num_key_value_heads"], width // heads)
    if config["model_type"] == "gpt2":
        block = _block(width, attention, inner, bias=(True,) * 4, mlp_bias=True, other_parameters=4 * width)
    else:
        block = _block(width, attention, inner, bias=(False,) * 4, gated=True, other_parameters=2 * width, saved=2)
    to_vocabulary = Linear(width, config["vocab_size"], cut="column", rows="outputs")
    embed = LayerShape("embed", width, vocabulary=config["vocab_size"])
    head = LayerShape("head", width, (to_vocabulary,), other_parameters=width, saved_vectors=1)
    blocks = [block] * config["num_hidden_layers"]
    made = _module("language_model", config, width, embed, blocks, head)
    return replace(
        made,
        arrangement="padded",
        tied=((0, made.num_layers - 1),) if config.get("tie_word_embeddings") else (),
    )


def _vit(config: Config) -> ModuleWorkload:
    width, patch = config["hidden_size"], config["patch_size"]
    patches = (config["image_size"] // patch) ** 2
    is_clip = config["model_type"] == "clip_vision_model"
    pixels = Linear(3 * patch**2, width, not is_clip, reads_layer_input=True)
    # CLIP has a class token and a norm before the blocks, which makes one more vector.
    others = (patches + 4 * is_clip) * width
    embed = LayerShape("embed", width, (pixels,), other_parameters=others, saved_vectors=int(is_clip))
    head = LayerShape("head", width, other_parameters=2 * width, saved_vectors=int(not is_clip))
    return _module("encoder", config, width, embed, [_plain_block(config)] * config["num_hidden_layers"], head)


def _clip_text(config: Config) -> ModuleWorkload:
    config = {"vocab_size": 49408, "max_position_embeddings": 77, **config}
    width = config["hidden_size"]
    rows = config["vocab_size"] + config["max_position_embeddings"]
    embed = LayerShape("embed", width, other_parameters=rows * width)
    head = LayerShape("head", width, other_parameters=2 * width, saved_vectors=1)
    return _module("encoder", config, width, embed, [_plain_block(config)] * config["num_hidden_layers"], head)


def _whisper(config: Config) -> ModuleWorkload:
    config = {"num_mel_bins": 80, "max_source_positions": 1500, **config}
    width, heads = config["d_model"], config["encoder_attention_heads"]
    attention = Attention(heads, heads, width // heads)
    bias = (True, False, True, True)
    block = _block(width, attention, config["encoder_ffn_dim"], bias=bias, mlp_bias=True, other_parameters=4 * width)
    convolutions = (
        Linear(3 * config["num_mel_bins"], width, True, rows_per_token=2.0, reads_layer_input=True, kernel_area=3),
        Linear(3 * width, width, True, kernel_area=3),
    )
    others = config["max_source_positions"] * width
    embed = LayerShape("embed", width, convolutions, other_parameters=others, saved_vectors=3)
    head = LayerShape("head", width, other_parameters=2 * width, saved_vectors=1)
    return _module("encoder", config, width, embed, [block] * config["encoder_layers"], head)


def _qwen2_5_vl(config: Config) -> ModuleWorkload:
    width, heads, inner = config["hidden_size"], config["num_heads"], config["intermediate_size"]
    whole = Attention(heads, heads, width // heads)
    windowed = replace(whole, window=(config["window_size"] // config["patch_size"]) ** 2)
    blocks = [
        _block(
            width,
            whole if index in config["fullatt_block_indexes"] else windowed,
            inner,
            bias=(True,) * 4,
            mlp_bias=True,
            gated=True,
            other_parameters=2 * width,
            saved=2,
        )
        for index in range(config["depth"])
    ]
    pixels = config["in_channels"] * config["temporal_patch_size"] * config["patch_size"] ** 2
    embed = LayerShape("embed", width, (Linear(pixels, width, reads_layer_input=True),))
    merged, out = config["spatial_merge_size"] ** 2, config["out_hidden_size"]
    merger = tuple(Linear(width * merged, size, True, rows_per_token=1 / merged) for size in (width * merged, out))
    head = LayerShape("head", out, merger, other_parameters=width, saved_vectors=2)
    return replace(_module("encoder", config, width, embed, blocks, head), output_size=out)


def _plain_block(config: Config) -> LayerShape:
    """A block with biases and two norms of mean and variance."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    attention, inner = Attention(heads, heads, width // heads), config["intermediate_size"]
    return _block(width, attention, inner, bias=(True,) * 4, mlp_bias=True, other_parameters=4 * width)


def _block(
    width: int,
    attention: Attention,
    inner: int,
    *,
    bias: tuple[bool, bool, bool, bool],
    mlp_bias: bool = False,
    gated: bool = False,
    other_parameters: int,
    saved: int = 0,
) -> LayerShape:
    """`bias`: of queries, keys, values, output. `saved`: vectors that norms without a mean keep for their weights."""
    outer = attention.num_key_value_heads * attention.head_dim
    inside = attention.num_heads * attention.head_dim
    up = Linear(width, inner, mlp_bias, cut="column")
    return LayerShape(
        "block",
        width,
        (
            Linear(width, inside, bias[0], cut="column"),
            Linear(width, outer, bias[1], cut="column"),
            Linear(width, outer, bias[2], cut="column"),
            Linear(inside, width, bias[3], cut="row"),
            *((up, up) if gated else (up,)),
            Linear(inner, width, mlp_bias, cut="row"),
        ),
        attention,
        other_parameters=other_parameters,
        saved_vectors=2,
        saved_vectors_for_weights=saved,
        gated=gated,
    )


def _module(
    kind: ModuleKind, config: Config, width: int, embed: LayerShape, blocks: Sequence[LayerShape], head: LayerShape
) -> ModuleWorkload:
    return ModuleWorkload(
        kind=kind,
        family=config["model_type"],
        config=config,
        hidden_size=width,
        output_size=width,
        layers=(embed, *blocks, head),
        must_divide={key: config[key] for key in NUMBERS if key in config},
    )
