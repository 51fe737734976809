"""Checkpoints of a mixture of experts load under another distribution of its experts."""

from pathlib import Path

import pytest
import torch
from training import Layout, run_config, stored_tensors, train

from motet.models.materialize import float64_throughout

MIXTURE = {
    "model__language_model__config": "MixtralConfig",
    "model__language_model__values": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    },
    "model__language_model__router_aux_loss": 0.05,
}


def experts(dp: int = 1, **of_language_model: int) -> Layout:
    """Two replicas have two of each module."""
    return {"vision": {"dp": dp}, "audio": {"dp": dp}, "language_model": {"dp": dp, **of_language_model}}


@pytest.mark.campaign
def test_resumes_under_another_ep(tmp_path: Path) -> None:
    common = {**MIXTURE, "train__dtype": "float64", "train__steps": 4, "train__checkpoint_every": 2}
    whole = run_config(tmp_path / "whole", experts(pp=2), **common)
    shared = run_config(tmp_path / "shared", experts(dp=2, ep=2), **common, parallel__zero1=True)
    with float64_throughout():
        alone, distributed = train(whole), train(shared)
    assert distributed[0]["losses"] == pytest.approx(alone[0]["losses"], rel=1e-9)
    expected = stored_tensors(Path(alone[0]["checkpoint"]))
    found = stored_tensors(Path(distributed[0]["checkpoint"]))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10, msg=name)
    for origin in ("whole", "shared"):
        checkpoint = tmp_path / origin / "checkpoints" / "step_00000002"
        for place, layout in (("group", experts(tp=2, ep=2)), ("replicas", experts(dp=2, ep=2)), ("alone", experts())):
            resumed = run_config(tmp_path / origin / place, layout, **common, train__resume=str(checkpoint))
            with float64_throughout():
                found_losses = train(resumed)[0]["losses"]
            assert found_losses == pytest.approx(alone[0]["losses"][2:], rel=1e-9)
