"""Small language models of every family: grouped-query attention and, where the family has it, a sliding window."""

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MllamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
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


EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
"""Kernels for experts do not compute in float64."""

MIXTURES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, **EXPERTS}),
    "mixtral-kernels": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True, **EXPERTS},
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "num_local_experts": 4,
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **EXPERTS,
        },
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            **EXPERTS,
        },
    ),
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        {
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "head_dim": 8,
            **EXPERTS,
        },
    ),
    "llama4": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "head_dim": 8,
            "attention_chunk_size": 6,
            "no_rope_layers": [1, 1, 0, 1],
            "floor_scale": 3,
            **EXPERTS,
        },
    ),
}
"""Mixtures of experts."""


def tiny_language_model(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    model_class, config_class, values = TINY[family]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **values)).to(dtype)
    with torch.no_grad():  # gates that begin at zero would hide what is behind them
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.numel() == 1:
                parameter.fill_(0.7)
    return model
