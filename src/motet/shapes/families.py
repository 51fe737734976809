"""For each family: the shape of its layers, read from its configuration. Data for `motet.shapes.module_shape`.

To add a family, write one function from `Reader` to `ModuleWorkload`, one entry in `FAMILIES` and its default values in
`motet.shapes.defaults`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from motet.errors import UserError
from motet.shapes.defaults import DEFAULTS
from motet.shapes.module_shape import Attention, LayerShape, Linear, ModuleWorkload

MOST_LAYERS, MOST_OF_A_SIZE = 10_000, 10**8


class Reader:
    """Values of a configuration, with the family's defaults."""

    def __init__(self, family: str, values: Mapping[str, Any]) -> None:
        self.family = family
        self.values = {**DEFAULTS[family], **{k: v for k, v in values.items() if v is not None}}

    def __call__(self, key: str) -> int:
        value = self.values.get(key)
        if not _is_count(value):
            raise UserError(f"model: {self.family}: {key} is {value!r}; give a whole number of at least 1")
        most = MOST_LAYERS if "layer" in key or key == "depth" else MOST_OF_A_SIZE
        if value > most:
            raise UserError(f"model: {self.family}: {key} is {value}; give at most {most}")
        return value

    def flag(self, key: str) -> bool:
        return bool(self.values.get(key, False))

    def pair(self, key: str) -> tuple[int, int]:
        value = self.values.get(key)
        sizes = [value, value] if isinstance(value, int) else value
        if not isinstance(sizes, list | tuple) or len(sizes) != 2 or not all(_is_count(size) for size in sizes):
            raise UserError(
                f"model: {self.family}: {key} is {value!r}; give a whole number of at least 1, or a list of two"
            )
        return sizes[0], sizes[1]

    def optional(self, key: str, otherwise: int) -> int:
        return self(key) if key in self.values else otherwise

    def share(self, key: str, parts: str) -> int:
        """Value of `key` for each of `parts`, which must divide it."""
        whole, number = self(key), self(parts)
        if whole % number:
            raise UserError(f"model: {self.family}: {parts} is {number}, which does not divide {key} {whole}")
        return whole // number

    def blocks(self, key: str) -> range:
        return range(self(key))


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# Language models ------------------------------------------------------------------------------------------------------


def _attention_linears(
    width: int, heads: int, key_value_heads: int, head_dim: int, bias: tuple[bool, bool, bool, bool]
) -> tuple[Linear, ...]:
    """Queries, keys, values, output."""
    inner, outer = heads * head_dim, key_value_heads * head_dim
    return (
        Linear(width, inner, bias[0], cut="column"),
        Linear(width, outer, bias[1], cut="column"),
        Linear(width, outer, bias[2], cut="column"),
        Linear(inner, width, bias[3], cut="row"),
    )


def _mlp_linears(width: int, inner: int, *, gated: bool, bias: bool) -> tuple[Linear, ...]:
    up = Linear(width, inner, bias, cut="column")
    return (*((up, up) if gated else (up,)), Linear(inner, width, bias, cut="row"))


def _language_model(
    read: Reader, *, num_norms: int = 2, query_key_norm: bool = False, cross_attention: bool = False
) -> ModuleWorkload:
    width, heads, vocabulary = read("hidden_size"), read("num_attention_heads"), read("vocab_size")
    key_value_heads = read.optional("num_key_value_heads", heads)
    head_dim = read("head_dim") if "head_dim" in read.values else read.share("hidden_size", "num_attention_heads")
    if "num_key_value_heads" in read.values:
        read.share("num_attention_heads", "num_key_value_heads")
    mlp = _mlp_linears(width, read("intermediate_size"), gated=True, bias=read.flag("mlp_bias"))
    bias = (read.flag("attention_bias"),) * 4
    block = LayerShape(
        "block",
        width,
        (*_attention_linears(width, heads, key_value_heads, head_dim, bias), *mlp),
        Attention(heads, key_value_heads, head_dim, normalizes=query_key_norm),
        other_parameters=num_norms * width + (2 * head_dim if query_key_norm else 0),
        saved_vectors=num_norms,
        saved_vectors_for_weights=num_norms,
        gated=True,
    )
    blocks = [block for _ in read.blocks("num_hidden_layers")]
    extra_rows = 0
    if cross_attention:
        extra_rows = 8  # Mllama's image tokens
        for index in read.values["cross_attention_layers"]:
            blocks[index] = _cross_attention_block(block, width, heads, key_value_heads, head_dim)
    embed = LayerShape("embed", width, vocabulary=vocabulary + extra_rows)
    to_vocabulary = Linear(width, vocabulary, cut="column", rows="outputs")
    head = LayerShape("head", width, (to_vocabulary,), other_parameters=width, saved_vectors=1)
    layers = (embed, *blocks, head)
    return ModuleWorkload(
        kind="language_model",
        family=read.family,
        config=read.values,
        hidden_size=width,
        output_size=width,
        layers=layers,
        tied=((0, len(layers) - 1),) if read.flag("tie_word_embeddings") else (),
    )


def _cross_attention_block(
    block: LayerShape, width: int, heads: int, key_value_heads: int, head_dim: int
) -> LayerShape:
    """Queries from the text, keys and values from the encoder; norms over heads, and two gates."""
    inner, outer = heads * head_dim, key_value_heads * head_dim
    keys = Linear(width, outer, cut="column", rows="incoming")
    attention = (
        Linear(width, inner, cut="column"),
        keys,
        keys,
        Linear(inner, width, cut="row"),
    )
    return LayerShape(
        "block",
        width,
        (*attention, *block.linears[4:]),
        Attention(heads, key_value_heads, head_dim, reads_encoder=True, normalizes=True),
        other_parameters=2 * width + 2 * head_dim + 2,
        saved_vectors=block.saved_vectors,
        saved_vectors_for_weights=block.saved_vectors_for_weights,
        gated=True,
    )


def _phi3(read: Reader) -> ModuleWorkload:
    """Fused linears are as many FLOPs and parameters as their parts, so they need no shape of their own."""
    return _language_model(read)


# Encoders -------------------------------------------------------------------------------------------------------------


def _encoder(
    read: Reader,
    *,
    width: int,
    output_size: int | None = None,
    embed: LayerShape,
    blocks: list[LayerShape],
    head: LayerShape,
    packed: bool = False,
) -> ModuleWorkload:
    return ModuleWorkload(
        kind="encoder",
        family=read.family,
        config=read.values,
        hidden_size=width,
        output_size=output_size or width,
        layers=(embed, *blocks, head),
        arrangement="packed" if packed else "separate",
    )


def _encoder_block(
    width: int,
    heads: int,
    inner: int,
    *,
    bias: tuple[bool, bool, bool, bool],
    mlp_bias: bool = True,
    gated: bool = False,
    norm_parameters: int,
    saved_for_weights: int = 0,
    window: int | None = None,
) -> LayerShape:
    if width % heads:
        raise UserError(f"model: the width {width} is no multiple of the number of attention heads {heads}; change one")
    head_dim = width // heads
    return LayerShape(
        "block",
        width,
        (
            *_attention_linears(width, heads, heads, head_dim, bias),
            *_mlp_linears(width, inner, gated=gated, bias=mlp_bias),
        ),
        Attention(heads, heads, head_dim, window=window),
        other_parameters=norm_parameters,
        saved_vectors=2,
        saved_vectors_for_weights=saved_for_weights,
        gated=gated,
    )


def _patches(read: Reader, width: int, *, bias: bool, channels: str = "num_channels", frames: int = 1) -> Linear:
    rows, columns = read.pair("patch_size")
    return Linear(read(channels) * frames * rows * columns, width, bias, reads_layer_input=True)


def _num_patches(read: Reader) -> int:
    (height, image_width), (rows, columns) = read.pair("image_size"), read.pair("patch_size")
    if rows > height or columns > image_width:
        raise UserError(
            f"model: {read.family}: patch_size is {rows} x {columns}, more than image_size {height} x {image_width}"
        )
    return (height // rows) * (image_width // columns)


def _siglip(read: Reader) -> ModuleWorkload:
    width, inner = read("hidden_size"), read("intermediate_size")
    block = _encoder_block(width, read("num_attention_heads"), inner, bias=(True,) * 4, norm_parameters=4 * width)
    embed = LayerShape("embed", width, (_patches(read, width, bias=True),), other_parameters=_num_patches(read) * width)
    # The pooling head's parameters are there, but its output goes unused: probe, attention, norm, MLP.
    pooler = 5 * width + 4 * width * width + 2 * width + 2 * width * inner + width + inner
    unused = pooler if read.flag("vision_use_head") else 0
    head = LayerShape("head", width, other_parameters=2 * width + unused, saved_vectors=1)
    return _encoder(read, width=width, embed=embed, blocks=[block] * read("num_hidden_layers"), head=head)


def pooling_head(encoder: ModuleWorkload, head: LayerShape) -> LayerShape:
    """The head of a tower. SigLIP's attends to all tokens from one probe, which other uses of the encoder leave out."""
    if encoder.family != "siglip_vision_model" or not encoder.config["vision_use_head"]:
        return head
    width, inner = encoder.hidden_size, encoder.config["intermediate_size"]
    keys_and_values = (Linear(width, width, True),) * 2
    query_and_output = (Linear(width, width, True, rows="outputs"),) * 2
    mlp = (Linear(width, inner, True, rows="outputs"), Linear(inner, width, True, rows="outputs"))
    # Two norms and the probe.
    return LayerShape(
        "head", width, (*keys_and_values, *query_and_output, *mlp), other_parameters=5 * width, saved_vectors=1
    )


def _clip(read: Reader) -> ModuleWorkload:
    width = read("hidden_size")
    block = _encoder_block(
        width, read("num_attention_heads"), read("intermediate_size"), bias=(True,) * 4, norm_parameters=4 * width
    )
    # Class token, positions, first norm.
    others = width + (_num_patches(read) + 1) * width + 2 * width
    embed = LayerShape("embed", width, (_patches(read, width, bias=False),), other_parameters=others, saved_vectors=1)
    head = LayerShape("head", width, other_parameters=2 * width)
    return _encoder(read, width=width, embed=embed, blocks=[block] * read("num_hidden_layers"), head=head)


def _text(
    read: Reader, *, head: LayerShape, embedding_norm: bool = False, output_size: int | None = None
) -> ModuleWorkload:
    width = read("hidden_size")
    block = _encoder_block(
        width, read("num_attention_heads"), read("intermediate_size"), bias=(True,) * 4, norm_parameters=4 * width
    )
    # Words, positions and kinds of token: whole on every rank.
    rows = read("vocab_size") + read("max_position_embeddings") + read.optional("type_vocab_size", 0)
    embed = LayerShape(
        "embed", width, other_parameters=(rows + 2 * embedding_norm) * width, saved_vectors=int(embedding_norm)
    )
    blocks = [block] * read("num_hidden_layers")
    return _encoder(read, width=width, output_size=output_size, embed=embed, blocks=blocks, head=head)


def _clip_text(read: Reader) -> ModuleWorkload:
    width = read("hidden_size")
    return _text(read, head=LayerShape("head", width, other_parameters=2 * width, saved_vectors=1))


def _siglip_text(read: Reader) -> ModuleWorkload:
    """Its head projects one vector of each text, to its own width unless `projection_size` says otherwise."""
    width = read("hidden_size")
    out = read.optional("projection_size", width)
    pooled = Linear(width, out, True, rows="outputs")
    head = LayerShape("head", out, (pooled,), other_parameters=2 * width, saved_vectors=1)
    return _text(read, head=head, output_size=out)


def _bert(read: Reader) -> ModuleWorkload:
    width = read("hidden_size")
    return _text(
        read, head=LayerShape("head", width, (Linear(width, width, True, rows="outputs"),)), embedding_norm=True
    )


def _dinov2(read: Reader) -> ModuleWorkload:
    width, gated = read("hidden_size"), read.flag("use_swiglu_ffn")
    inner = int(width * read.values["mlp_ratio"])
    if gated:
        inner = (int(inner * 2 / 3) + 7) // 8 * 8
    qkv = read.flag("qkv_bias")
    # Two norms and two layer scales.
    block = _encoder_block(
        width,
        read("num_attention_heads"),
        inner,
        bias=(qkv, qkv, qkv, True),
        gated=gated,
        norm_parameters=6 * width,
        saved_for_weights=2,
    )
    tokens = _num_patches(read) + 2 + (1 if read.flag("use_mask_token") else 0)
    embed = LayerShape("embed", width, (_patches(read, width, bias=True),), other_parameters=tokens * width)
    head = LayerShape("head", width, other_parameters=2 * width, saved_vectors=1)
    return _encoder(read, width=width, embed=embed, blocks=[block] * read("num_hidden_layers"), head=head)


def _pixtral(read: Reader) -> ModuleWorkload:
    width = read("hidden_size")
    block = _encoder_block(
        width,
        read("num_attention_heads"),
        read("intermediate_size"),
        bias=(False,) * 4,
        mlp_bias=False,
        gated=True,
        norm_parameters=2 * width,
        saved_for_weights=2,
    )
    embed = LayerShape("embed", width, (_patches(read, width, bias=False),), other_parameters=width, saved_vectors=1)
    head = LayerShape("head", width)
    return _encoder(read, width=width, embed=embed, blocks=[block] * read("num_hidden_layers"), head=head, packed=True)


def _qwen2_5_vl(read: Reader) -> ModuleWorkload:
    width, out, merge = read("hidden_size"), read("out_hidden_size"), read("spatial_merge_size")
    window = (read("window_size") // read("patch_size")) ** 2

    def block(index: int) -> LayerShape:
        return _encoder_block(
            width,
            read("num_heads"),
            read("intermediate_size"),
            bias=(True,) * 4,
            gated=True,
            norm_parameters=2 * width,
            saved_for_weights=2,
            window=None if index in read.values["fullatt_block_indexes"] else window,
        )

    frames = read("temporal_patch_size")
    embed = LayerShape("embed", width, (_patches(read, width, bias=False, channels="in_channels", frames=frames),))
    wide = width * merge**2
    merger = (
        Linear(wide, wide, True, rows_per_token=1 / merge**2),
        Linear(wide, out, True, rows_per_token=1 / merge**2),
    )
    # The norm's input and the GELU's: as wide together as the tokens before merging.
    head = LayerShape("head", out, merger, other_parameters=width, saved_vectors=2)
    return _encoder(
        read, width=width, output_size=out, embed=embed, blocks=[block(i) for i in read.blocks("depth")], head=head
    )


def _whisper(read: Reader) -> ModuleWorkload:
    width = read("d_model")
    block = _encoder_block(
        width,
        read("encoder_attention_heads"),
        read("encoder_ffn_dim"),
        bias=(True, False, True, True),
        norm_parameters=4 * width,
    )
    convolutions = (
        Linear(3 * read("num_mel_bins"), width, True, rows_per_token=2.0, reads_layer_input=True, kernel_area=3),
        Linear(3 * width, width, True, kernel_area=3),
    )
    embed = LayerShape(
        "embed", width, convolutions, other_parameters=read("max_source_positions") * width, saved_vectors=3
    )
    head = LayerShape("head", width, other_parameters=2 * width, saved_vectors=1)
    return _encoder(read, width=width, embed=embed, blocks=[block] * read("encoder_layers"), head=head)


FAMILIES: Mapping[str, Callable[[Reader], ModuleWorkload]] = {
    "llama": _language_model,
    "mistral": _language_model,
    "qwen3": lambda read: _language_model(read, query_key_norm=True),
    "gemma3_text": lambda read: _language_model(read, num_norms=4, query_key_norm=True),
    "phi3": _phi3,
    "mllama_text_model": lambda read: _language_model(read, cross_attention=True),
    "siglip_vision_model": _siglip,
    "clip_vision_model": _clip,
    "clip_text_model": _clip_text,
    "siglip_text_model": _siglip_text,
    "bert": _bert,
    "dinov2": _dinov2,
    "qwen2_5_vl_vision": _qwen2_5_vl,
    "pixtral": _pixtral,
    "whisper": _whisper,
    "qwen2_audio_encoder": _whisper,
}
"""Readers by the `model_type` of the configuration."""

# For each family of caption decoders: the shape of its layers, read from its configuration (CoCa-like models).
#
# Every block has two attentions, of its own tokens and of them to an image's features, and an MLP.


GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
}
"""GPT-2's own names of settings, and those of all other families."""


def decoder_workload(values: Mapping[str, Any]) -> ModuleWorkload:
    """The shape of a caption decoder. `values`: what stands in a config.json.

    Raises `UserError` for a family that is not known, and for a value that is missing or wrong."""
    family = str(values.get("model_type"))
    if family not in DECODERS:
        raise UserError(f"model: model_type {family!r} is no caption decoder; known are {', '.join(DECODERS)}")
    return DECODERS[family](values)


def _gpt2(values: Mapping[str, Any]) -> ModuleWorkload:
    read = Reader("gpt2", {GPT2_NAMES.get(key, key): value for key, value in values.items()})
    width = read("hidden_size")
    # Words are tied to the head, positions are not.
    embed = LayerShape(
        "embed", width, vocabulary=read("vocab_size"), other_parameters=read("max_position_embeddings") * width
    )
    to_vocabulary = Linear(width, read("vocab_size"), cut="column", rows="outputs")
    head = LayerShape("head", width, (to_vocabulary,), other_parameters=2 * width, saved_vectors=1)
    return _decoder(read, embed, head, inner=read.optional("intermediate_size", 4 * width))


def _bert_decoders(values: Mapping[str, Any]) -> ModuleWorkload:
    read = Reader("bert", {"tie_word_embeddings": True, **values})
    width, vocabulary = read("hidden_size"), read("vocab_size")
    others = (read("max_position_embeddings") + read("type_vocab_size") + 2) * width
    embed = LayerShape("embed", width, vocabulary=vocabulary, other_parameters=others, saved_vectors=1)
    linears = (Linear(width, width, True, rows="outputs"), Linear(width, vocabulary, True, rows="outputs"))
    head = LayerShape("head", width, linears, other_parameters=2 * width, saved_vectors=1)
    return _decoder(read, embed, head, inner=read("intermediate_size"))


DECODERS: Mapping[str, Callable[[Mapping[str, Any]], ModuleWorkload]] = {"gpt2": _gpt2, "bert": _bert_decoders}
"""Readers by the `model_type` of the configuration."""


def _decoder(read: Reader, embed: LayerShape, head: LayerShape, *, inner: int) -> ModuleWorkload:
    width, heads = read("hidden_size"), read("num_attention_heads")
    across, back = Linear(width, width, True, cut="column"), Linear(width, width, True, cut="row")
    keys = Linear(width, width, True, cut="column", rows="incoming")
    mlp = (Linear(width, inner, True, cut="column"), Linear(inner, width, True, cut="row"))
    block = LayerShape(
        "block",
        width,
        (across, across, across, back, across, keys, keys, back, *mlp),
        attention=Attention(heads, heads, width // heads),
        crossing=Attention(heads, heads, width // heads, reads_encoder=True),
        other_parameters=6 * width,
        saved_vectors=3,
    )
    layers = (embed, *[block] * read("num_hidden_layers"), head)
    return ModuleWorkload(
        kind="language_model",
        family=read.family,
        config=read.values,
        hidden_size=width,
        output_size=width,
        layers=layers,
        arrangement="padded",
        tied=((0, len(layers) - 1),) if read.flag("tie_word_embeddings") else (),
    )


def as_tower(encoder: ModuleWorkload) -> ModuleWorkload:
    """The encoder (with the projector, if there is one) as a tower, whose head makes one vector of each item."""
    layers = tuple(pooling_head(encoder, layer) if layer.part == "head" else layer for layer in encoder.layers)
    return replace(encoder, kind="tower", layers=layers)


def module_workload(config: Any, *, packing: bool = False) -> ModuleWorkload:
    """The shape of a language model or an encoder (without projector).

    `config`: a transformers configuration, its `to_dict()`, or what stands in a config.json. `packing`: a language
    model's samples stand in one row instead of being padded to the longest.
    Raises `ValueError` for a family that is not known, and for a value that is missing or wrong.
    """
    values = config if isinstance(config, Mapping) else config.to_dict()
    family = str(values.get("model_type"))
    if family not in FAMILIES:
        raise UserError(f"model: model_type {family!r} is not known; known are {', '.join(FAMILIES)}")
    workload = FAMILIES[family](Reader(family, values))
    if workload.kind == "language_model":
        return replace(workload, arrangement="packed" if packing else "padded")
    return workload
