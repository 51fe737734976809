"""What holds of every supported causal language model: its family, its layers as a partition moves them, its labels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

IGNORED_LABEL = -100

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


def num_language_model_layers(model: nn.Module) -> int:
    """embed, the blocks, and the head."""
    return len(base_model(model).layers) + 2


def language_model_layer_parts(model: nn.Module, layer: int) -> tuple[str, ...]:
    """The paths of the sub-modules that make up one layer."""
    num_blocks = len(base_model(model).layers)
    if 1 <= layer <= num_blocks:
        return (f"model.layers.{layer - 1}",)
    return ("model.embed_tokens",) if layer == 0 else ("model.norm", "lm_head")


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
