"""Tiny configurations keep the family's kinds of layers, and lose its sizes."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from motet.errors import UserError
from motet.families.tiny import NUM_LAYERS, THRESHOLD, perturb, tiny_config


@pytest.mark.parametrize("model_type", ["llama", "gemma4_text", "qwen3_next", "gpt2", "falcon_h1", "deepseek_v3"])
def test_it_can_be_built_and_run(model_type: str) -> None:
    config = tiny_config(CONFIG_MAPPING[model_type]())
    assert type(config) is CONFIG_MAPPING[model_type]
    model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e6
    assert model(input_ids=torch.arange(3, 20)[None], use_cache=False).logits.isfinite().all()


def test_sizes_do_not_matter_and_flags_do() -> None:
    large = LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8)
    small = LlamaConfig(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2)
    assert tiny_config(large).to_dict() == tiny_config(small).to_dict()
    biased = LlamaConfig(attention_bias=True)
    assert tiny_config(biased).to_dict() != tiny_config(LlamaConfig()).to_dict()


def test_each_kind_of_layer_stays() -> None:
    tiny = tiny_config(Gemma3TextConfig(num_hidden_layers=26))
    assert tiny.layer_types == ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
    assert tiny.sliding_window < THRESHOLD


def test_multipliers_leave_one_and_lengths_scale_early() -> None:
    assert tiny_config(CONFIG_MAPPING["granite"]()).residual_multiplier != 1
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
        "original_max_position_embeddings": 4096,
        "factor": 32.0,
    }
    tiny = tiny_config(CONFIG_MAPPING["phi3"](rope_parameters=rope))
    assert tiny.rope_parameters["original_max_position_embeddings"] == THRESHOLD
    head_dim = tiny.hidden_size // tiny.num_attention_heads
    assert len(tiny.rope_parameters["long_factor"]) == head_dim // 2


def test_a_class_that_refuses_tiny_sizes_is_named_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^dots3_note\w*: no tiny model .* adapter_in_dim must match hidden_size\)$"):
        tiny_config(CONFIG_MAPPING["dots3_note"]())


def test_perturbed_weights_are_not_neutral() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig()))
    perturb(model)
    assert not (model.model.norm.weight == 1).any()
