"""Mixtures of experts are read from and written as the files that transformers itself writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sampling import in_campaigns
from tiny_language_models import MIXTURES, SIZES

from motet.config import LanguageModelConfig
from motet.families.stored_weights import CORRECTION, stored_buffers, weights_of
from motet.models.hub.weights import save_part
from motet.models.materialize import materialize

FAMILIES = ("glm4_moe", *in_campaigns(["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4"]))


def drawn(family: str) -> Any:
    """With corrections of scores that are not zero."""
    model_class, config_class, values = MIXTURES[family]
    torch.manual_seed(1)
    values = {key: value for key, value in {**SIZES, **values}.items() if value is not None}
    model = model_class(config_class(**values))
    for buffer in stored_buffers(model).values():
        buffer.uniform_()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_read_what_save_pretrained_wrote(family: str, tmp_path: Path) -> None:
    model = drawn(family)
    model.save_pretrained(tmp_path)
    part = LanguageModelConfig(path=str(tmp_path))
    ours = materialize(part, "language_model", name="language_model", where="model", layers=(2, 4))
    expected, held = weights_of(model), {n: t for n, t in weights_of(ours).items() if not t.is_meta}
    assert any("experts" in name for name in held)
    assert len(held) < len(expected)
    for name, tensor in held.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_exports_are_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = drawn(family)
    tensors = {name: tensor.detach() for name, tensor in weights_of(model).items()}
    save_part(tmp_path / "ours", type(model), model.config, tensors, where=family)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    loaded = type(model).from_pretrained(tmp_path / "ours")
    for name, tensor in weights_of(loaded).items():
        assert torch.equal(tensor, tensors[name]), name
    if family in ("glm4_moe", "deepseek_v3"):
        assert any(CORRECTION in name for name in tensors)


def test_corrections_of_scores_stay_in_float32() -> None:
    """As `from_pretrained` keeps them, in a model in bfloat16."""
    _, config_class, values = MIXTURES["glm4_moe"]
    part = LanguageModelConfig(config=config_class.__name__, values={**SIZES, **values})
    model = materialize(part, "language_model", name="m", where="model", dtype=torch.bfloat16)
    corrections = stored_buffers(model)
    assert corrections
    assert all(buffer.dtype == torch.float32 for buffer in corrections.values())
    assert next(model.parameters()).dtype == torch.bfloat16
