"""What holds of every supported causal language model: its family, its layers as a partition moves them, its labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motet.assignment.sample import IGNORED_LABEL

LANGUAGE_MODELS: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mllama_text_model": "MllamaForCausalLM",
}
"""By `model_type` of the configuration: the class in transformers. Any model of the form `model.{embed_tokens, layers,
norm}` and `lm_head` whose base model takes `inputs_embeds` needs no more than its line here and its shards."""


@dataclass(frozen=True, kw_only=True)
class CausalPaths:
    """Where the parts of a causal model are: paths in it."""

    base: str
    """The model under the head."""
    words: str
    """The table of tokens."""
    blocks: str
    embed_parts: tuple[str, ...]
    head_parts: tuple[str, ...]
    output: str
    """The linear onto the vocabulary."""


LANGUAGE_MODEL_PATHS = CausalPaths(
    base="model",
    words="model.embed_tokens",
    blocks="model.layers",
    embed_parts=("model.embed_tokens",),
    head_parts=("model.norm", "lm_head"),
    output="lm_head",
)


def num_causal_layers(model: nn.Module, paths: CausalPaths) -> int:
    """embed, the blocks, and the head."""
    return _num_blocks(model, paths) + 2


def causal_layer_parts(model: nn.Module, paths: CausalPaths, layer: int) -> tuple[str, ...]:
    """The paths of the sub-modules that make up one layer."""
    if 1 <= layer <= _num_blocks(model, paths):
        return (f"{paths.blocks}.{layer - 1}",)
    return paths.embed_parts if layer == 0 else paths.head_parts


def _num_blocks(model: nn.Module, paths: CausalPaths) -> int:
    return len(list(model.get_submodule(paths.blocks).children()))


def num_language_model_layers(model: nn.Module) -> int:
    return num_causal_layers(model, LANGUAGE_MODEL_PATHS)


def language_model_layer_parts(model: nn.Module, layer: int) -> tuple[str, ...]:
    return causal_layer_parts(model, LANGUAGE_MODEL_PATHS, layer)


def base_model(model: nn.Module) -> Any:
    """The part of a causal language model under its head."""
    return model.model


def cross_attention_layers(model: nn.Module) -> tuple[int, ...]:
    """The layers, in motet's numbering, at which encoder output enters by cross-attention."""
    return tuple(1 + block for block in getattr(model.config, "cross_attention_layers", ()))


def is_language_model(model: nn.Module) -> bool:
    """Whether it is a causal language model of a supported family."""
    return getattr(model.config, "model_type", None) in LANGUAGE_MODELS and hasattr(model, "lm_head")


def is_tied(model: Any) -> bool:
    """Whether embedding and head share their weight."""
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if head.is_meta != embedding.is_meta:  # One of them is another stage's.
        return bool(model.config.tie_word_embeddings)
    return head is embedding


def next_labels(labels: Tensor) -> Tensor:
    """What each token is to predict: [T] -> [T]."""
    return torch.cat([labels[1:], labels.new_full((1,), IGNORED_LABEL)])
