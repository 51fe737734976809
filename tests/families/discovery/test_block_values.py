"""What blocks read is found once for all models of one structure."""

import pytest
from tiny_language_models import tiny_language_model
from transformers import LlamaConfig, LlamaForCausalLM

from motet.families.discovery import block_values as module
from motet.families.discovery.block_values import block_values
from motet.families.discovery.structure import structure_of

VALUES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32, "head_dim": 24}


def small_llama(**values: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**VALUES, **values))


def test_models_of_one_structure_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run_model = module.run_model
    monkeypatch.setattr(module, "run_model", lambda *args: runs.append(args) or run_model(*args))
    found = block_values(small_llama(num_hidden_layers=3))
    assert len(runs) == 2
    assert block_values(small_llama(num_hidden_layers=3)) is found
    assert len(runs) == 2
    assert set(block_values(small_llama(num_hidden_layers=2)).num_returned) == {0, 1}
    assert len(runs) == 4


def test_a_structure_is_configuration_modules_and_tensors() -> None:
    def structure(**values: object) -> object:
        return structure_of(small_llama(num_hidden_layers=2, **values))

    first = structure()
    assert structure() == first
    assert structure(rms_norm_eps=1e-3) != first
    assert structure(attn_implementation="eager") != first
    assert structure_of(small_llama(num_hidden_layers=2).half()) != first
    sharing = small_llama(num_hidden_layers=2)
    sharing.model.layers[1].mlp = sharing.model.layers[0].mlp
    assert structure_of(sharing) != first
    reordered = small_llama(num_hidden_layers=2)
    reordered.model.layers[0].self_attn.layer_idx = 1
    assert structure_of(reordered) != first
    cut = small_llama(num_hidden_layers=2)
    cut.model.norm = None
    assert structure_of(cut) != first
    assert structure_of(tiny_language_model("gemma3")) == structure_of(tiny_language_model("gemma3"))


def test_nothing_is_remembered_of_models_with_hooks_or_forwards_of_their_own() -> None:
    hooked, patched = (small_llama(num_hidden_layers=2) for _ in range(2))
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    patched.model.layers[0].forward = patched.model.layers[1].forward
    assert structure_of(hooked) is None
    assert structure_of(patched) is None
    assert block_values(hooked) == block_values(small_llama(num_hidden_layers=2))
