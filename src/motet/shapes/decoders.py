"""For each family of caption decoders: the shape of its layers, read from its configuration (CoCa-like models).

Every block has two attentions, of its own tokens and of them to an image's features, and an MLP.
"""

from collections.abc import Callable, Mapping
from typing import Any

from motet.errors import UserError
from motet.shapes.families import Reader
from motet.shapes.module_shape import Attention, LayerShape, Linear, ModuleWorkload

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


def _bert(values: Mapping[str, Any]) -> ModuleWorkload:
    read = Reader("bert", {"tie_word_embeddings": True, **values})
    width, vocabulary = read("hidden_size"), read("vocab_size")
    others = (read("max_position_embeddings") + read("type_vocab_size") + 2) * width
    embed = LayerShape("embed", width, vocabulary=vocabulary, other_parameters=others, saved_vectors=1)
    linears = (Linear(width, width, True, rows="outputs"), Linear(width, vocabulary, True, rows="outputs"))
    head = LayerShape("head", width, linears, other_parameters=2 * width, saved_vectors=1)
    return _decoder(read, embed, head, inner=read("intermediate_size"))


DECODERS: Mapping[str, Callable[[Mapping[str, Any]], ModuleWorkload]] = {"gpt2": _gpt2, "bert": _bert}
"""By the `model_type` of the configuration."""


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
