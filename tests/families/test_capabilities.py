"""Results of probes belong to a configuration, wherever it was stored."""

from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from motet.families.capabilities import digest_of
from motet.families.tiny import tiny_config


@pytest.fixture
def plain() -> PretrainedConfig:
    return LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3)


def digest(config: PretrainedConfig) -> str:
    return digest_of(tiny_config(config).to_dict())


def test_a_stored_configuration_has_the_results_of_a_new_one(plain: PretrainedConfig, tmp_path: Path) -> None:
    plain.architectures, plain.dtype = ["LlamaForCausalLM"], "bfloat16"
    plain.save_pretrained(tmp_path)
    stored = AutoConfig.from_pretrained(tmp_path)
    assert (stored.name_or_path, stored.architectures) == (str(tmp_path), ["LlamaForCausalLM"])
    assert digest(stored) == digest(LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3))


@pytest.mark.parametrize("values", [{"attention_bias": True}, {"hidden_act": "gelu"}, {"tie_word_embeddings": True}])
def test_what_changes_the_model_is_probed_anew(plain: PretrainedConfig, values: dict[str, object]) -> None:
    other = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3, **values)
    assert digest(plain) != digest(other)
