"""The probe of model families: what it finds, what it refuses, and where results are kept."""

import json

import pytest
from transformers import LlamaConfig, OPTConfig

from motet.errors import UserError
from motet.families import capabilities
from motet.families.capabilities import FEATURES, OF_EXPERTS, Capabilities, known_capabilities, read_capabilities
from motet.families.tiny import tiny_config
from motet.runtime.verification import family_probe
from motet.runtime.verification.family_probe import TRIALS, capabilities_of, config_of, probe


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path))
    monkeypatch.setattr(capabilities, "_known", dict)


TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def test_a_regular_family_has_every_feature_and_is_probed_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(family_probe, "tiny_config", lambda config: TINY)
    found = capabilities_of(LlamaConfig())
    no_experts = dict.fromkeys(OF_EXPERTS, "ep: the model has no experts that can be distributed; use ep 1")
    assert found.reasons == dict.fromkeys(FEATURES) | no_experts
    assert "probing llama" in capsys.readouterr().err
    (path,) = (tmp_path / "families").iterdir()
    monkeypatch.setattr(family_probe, "probe", lambda tiny: pytest.fail("probed again"))
    assert capabilities_of(LlamaConfig()) == found == read_capabilities(path.stem)
    assert known_capabilities() == [found]


def test_a_model_that_computes_something_else_under_a_feature_is_refused_that_feature(monkeypatch):
    """A stand-in for families whose blocks mix tokens without regard to positions: packed samples leak."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x) + 0.1 * x.cumsum(1))
    found = probe(TINY, {name: TRIALS[name] for name in ("pipeline", "packing")})
    assert found.reasons["pipeline"] is None
    assert "gradients differ from one process" in found.reasons["packing"]
    with pytest.raises(
        UserError, match=r"model: samples of a microbatch in one row is not supported for llama: .*unset"
    ):
        found.require({"pipeline": "x", "packing": "unset it"}, "model")


def test_blocks_that_view_samples_as_one_row_of_tokens_are_refused_sequence_parallelism():
    """OPT's do: rows of several samples are no share of one sequence."""
    trials = {name: TRIALS[name] for name in ("tensor_parallel", "sequence_parallel")}
    reasons = probe(tiny_config(OPTConfig()), trials).reasons
    assert reasons["tensor_parallel"] is None
    assert "is no shard of a sequence" in reasons["sequence_parallel"]


def test_a_feature_that_ends_a_process_ends_no_other(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def forward(self, x):
        if self.down_proj.in_features < TINY.intermediate_size:  # Cut by tensor parallelism.
            raise RuntimeError("needs its whole width")
        return plain(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    reasons = probe(TINY, {name: TRIALS[name] for name in ("pipeline", "tensor_parallel", "sequence_parallel")}).reasons
    refused = {feature for feature, reason in reasons.items() if reason is not None}
    assert refused == {"tensor_parallel", "sequence_parallel"}
    assert "needs its whole width" in reasons["tensor_parallel"]


def test_what_is_no_model_is_told(tmp_path):
    with pytest.raises(UserError, match="nothing-here: is not a model_type"):
        config_of("nothing-here")


def test_a_damaged_result_is_probed_again(tmp_path):
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "ab.json").write_text("{")
    (folder / "cd.json").write_text(json.dumps({"format": 99}))
    assert read_capabilities("ab") is None
    assert read_capabilities("cd") is None
    assert known_capabilities() == []


def test_what_was_not_probed_is_refused():
    empty = Capabilities(model_type="llama", model_class="LlamaForCausalLM", reasons={})
    with pytest.raises(UserError, match="it has not been probed"):
        empty.require({"pipeline": "use one stage"}, "model")
