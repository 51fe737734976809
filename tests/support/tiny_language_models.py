"""Small language models of every family: grouped-query attention and, where the family has it, a sliding window."""

import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MllamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

TINY = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 5, "head_dim": 8}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"sliding_window": 5}),
    "mllama": (
        MllamaForCausalLM,
        MllamaTextConfig,
        {"cross_attention_layers": [1, 3], "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
}


def tiny_language_model(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    model_class, config_class, values = TINY[family]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **values)).to(dtype)
    with torch.no_grad():  # gates that begin at zero would hide what is behind them
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.numel() == 1:
                parameter.fill_(0.7)
    return model
