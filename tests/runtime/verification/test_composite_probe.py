"""The probe of models of several modalities, and what it found."""

import json

import pytest
import torch
from checkout import ROOT
from sampling import in_campaigns
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM

from benchmarks.families import composite_values
from motet.errors import UserError
from motet.families.discovery.composite import find_parts
from motet.families.tiny import WIDTH, tiny_config
from motet.families.tiny_media import tiny_medium
from motet.runtime.verification.composite_probe import LARGEST, TRIALS, probe_composite

PUBLISHED = json.loads((ROOT / "docs" / "generate" / "probed_families.json").read_text())["families"]
EQUAL = [
    name.removeprefix("composites/")
    for name, family in PUBLISHED.items()
    if name.startswith("composites/") and family.get("reasons", {}).get("pipeline", "refused") is None
]


def tiny(model_type):
    return tiny_config(CONFIG_MAPPING[model_type](**composite_values(model_type)), media=True)


def check(model_type):
    found, published = probe_composite(tiny(model_type)).reasons, PUBLISHED[f"composites/{model_type}"]["reasons"]
    assert found == {feature: published[feature] for feature in found}


def test_a_model_that_no_other_test_has_is_equal():
    found = probe_composite(tiny("mistral3"), {"pipeline": TRIALS["pipeline"]})
    assert found.reasons == {"pipeline": None}
    assert found.model_class == "Mistral3ForConditionalGeneration"


@pytest.mark.campaign
@pytest.mark.parametrize("model_type", EQUAL)
def test_all_are_what_was_published(model_type):
    check(model_type)


def test_a_model_that_gives_another_result_is_refused(monkeypatch):
    """A stand-in for a model whose samples are not apart in a microbatch."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP

    plain = Gemma3MLP.forward
    monkeypatch.setattr(Gemma3MLP, "forward", lambda self, x: plain(self, x) + 0.1 * x.mean(0, keepdim=True))
    reasons = probe_composite(tiny("gemma3"), {"pipeline": TRIALS["pipeline"]}).reasons
    assert "gradients differ from one process" in reasons["pipeline"]


@pytest.mark.parametrize(
    "model_type", ["llava_next", "qwen2_audio", *in_campaigns(["lfm2_vl", "idefics3", "video_llama_3"])]
)
def test_its_inputs_are_those_of_its_functions(model_type):
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(tiny(model_type)).double()
    assert sum(p.numel() for p in model.parameters()) < LARGEST
    function = find_parts(model).functions[0]
    tensors, number = tiny_medium(model, function, torch.Generator().manual_seed(0))
    assert set(tensors) <= set(function.inputs)
    ids = torch.tensor([[5, *[function.token_id] * number, 6]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **tensors}
    assert model(**inputs, use_cache=False).logits.shape[:2] == ids.shape
    assert model.get_input_embeddings().embedding_dim == WIDTH


def test_what_cannot_be_probed_is_said_in_one_line():
    with pytest.raises(UserError, match="BlipForConditionalGeneration: has no function such as get_image_features"):
        probe_composite(tiny("blip"))
