"""docs/adding-a-model-family.md is true: with the lines that it gives, and nothing else, SmolLM3 runs in every cut."""

import re

import pytest
import torch
from checkout import ROOT
from distributed import run_distributed
from test_language_model_stage import SAMPLES, assert_alike, features_of, incoming_of, run_in_stages, run_plainly
from tiny_language_models import SIZES, TINY, tiny_language_model
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from motet.config import LanguageModelConfig
from motet.families import capabilities
from motet.families.shape_reading.module_shapes import module_workload
from motet.models.materialize import float64_throughout, materialize
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import StageInput
from motet.parallel.tensor.tensor_parallel import TensorParallel, apply_tensor_parallel

GUIDE = ROOT / "docs" / "adding-a-model-family.md"
SETTINGS = {"use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2}


@pytest.fixture(autouse=True)
def _with_the_guides_lines(monkeypatch):
    """Each line of the form `"smollm3": value,` goes into the table that the guide names before it."""
    tables = {
        "SHOWN_EQUAL": (capabilities, capabilities.SHOWN_EQUAL),
    }
    found = re.findall(r"`([A-Z_]+)`(?:(?!`[A-Z_]+`).)*?\n\n +\"smollm3\": (.*?),\n\n", GUIDE.read_text(), re.DOTALL)
    assert {table for table, _ in found} == set(tables)
    for table, value in found:
        module, entries = tables[table]
        monkeypatch.setitem(entries, "smollm3", eval(value, vars(module)))
    monkeypatch.setitem(TINY, "smollm3", (SmolLM3ForCausalLM, SmolLM3Config, SETTINGS))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_in_stages(packing: bool) -> None:
    with float64_throughout():
        incoming = incoming_of(SAMPLES)
        reference = run_plainly(tiny_language_model("smollm3"), SAMPLES, incoming)
        ours = run_in_stages(tiny_language_model("smollm3"), [3, 6], SAMPLES, incoming, packing=packing, recompute=True)
        assert_alike(ours, reference)


def _loss(model, tp: TensorParallel) -> torch.Tensor:
    stage = LanguageModelStage("llm", model, (0, 6))
    apply_tensor_parallel(stage, tp)
    features = [features_of(s, i) for i, s in enumerate(SAMPLES)]
    return stage(StageInput(SAMPLES, features, incoming=incoming_of(SAMPLES))).loss.detach()


def test_under_tensor_parallelism() -> None:
    whole = _loss(tiny_language_model("smollm3"), TensorParallel(None, 0, 1, False))
    for loss in run_distributed(
        lambda rank: _loss(tiny_language_model("smollm3"), TensorParallel(None, rank, 2, False)), 2
    ):
        torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)


def test_from_a_description_and_without_torch() -> None:
    values = {**SIZES, **SETTINGS}
    part = LanguageModelConfig(config="SmolLM3Config", values=values)
    model = materialize(part, "language_model", name="llm", where="model.language_model")
    assert isinstance(model, SmolLM3ForCausalLM)
    num_parameters = sum(p.numel() for p in model.parameters())
    assert module_workload(model.config).num_parameters == num_parameters
    assert module_workload({"model_type": "smollm3", **values}).num_parameters == num_parameters
