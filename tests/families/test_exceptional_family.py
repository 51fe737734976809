"""A language model of another package, which says itself where its parts are: no file of motet is changed."""

import importlib
import sys

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from motet.config import LanguageModelConfig
from motet.errors import UserError
from motet.families.discovery.language_model_parts import causal_paths
from motet.families.entry_points import loaded
from motet.families.shape_reading.module_shapes import module_workload
from motet.models.materialize import read_part_config
from motet.runtime.verification.family_probe import TRIALS, probe

PACKAGE = {
    "motet_drafts/__init__.py": '''
"""A Llama with as many draft heads, for decoding, as layers: motet cannot tell which of the lists has the blocks."""

from motet.families.discovery.language_model_parts import CausalPaths
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


class DraftLlamaConfig(LlamaConfig):
    model_type = "draft_llama"


class DraftLlamaForCausalLM(LlamaForCausalLM):
    config_class = DraftLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.drafts = nn.ModuleList(LlamaMLP(config) for _ in range(config.num_hidden_layers))
        self.post_init()


AutoConfig.register("draft_llama", DraftLlamaConfig)
AutoModelForCausalLM.register(DraftLlamaConfig, DraftLlamaForCausalLM)


def parts(model):
    return CausalPaths(
        base="model",
        words="model.embed_tokens",
        blocks="model.layers",
        embed_parts=("model.embed_tokens",),
        head_parts=("model.norm", "model.drafts", "lm_head"),
        output="lm_head",
    )
''',
    "motet_drafts-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: motet-drafts\nVersion: 1.0\n",
    "motet_drafts-1.0.dist-info/entry_points.txt": "[motet.language_models]\ndraft_llama = motet_drafts:parts\n",
}
VALUES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
PART = LanguageModelConfig(config="DraftLlamaConfig", values=VALUES)


@pytest.fixture
def _installed(tmp_path, monkeypatch):
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    loaded.cache_clear()
    yield
    loaded.cache_clear()
    own = sys.modules.pop("motet_drafts").DraftLlamaConfig
    CONFIG_MAPPING._extra_content.pop("draft_llama")
    AutoModelForCausalLM._model_mapping._extra_content.pop(own)


@pytest.mark.usefixtures("_installed")
def test_it_is_cut_as_it_says():
    config = read_part_config(PART, "language_model", where="model.language_model")
    model = AutoModelForCausalLM.from_config(config)
    assert causal_paths(model).head_parts == ("model.norm", "model.drafts", "lm_head")
    assert module_workload(config).num_parameters == sum(p.numel() for p in model.parameters())
    trials = {name: TRIALS[name] for name in ("pipeline", "tensor_parallel")}

    assert probe(config, trials).reasons == dict.fromkeys(trials)


@pytest.mark.usefixtures("_installed")
def test_without_its_word_it_is_refused(monkeypatch):
    config = read_part_config(PART, "language_model", where="model.language_model")
    model = AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr("motet.families.discovery.language_model_parts.exceptional_families", dict)

    with pytest.raises(UserError, match=r"spread over the lists model\.layers, model\.drafts"):
        causal_paths(model)


def test_where_it_is_not_installed_it_is_not_known():
    with pytest.raises(UserError, match="DraftLlamaConfig is not known"):
        read_part_config(PART, "language_model", where="model.language_model")
