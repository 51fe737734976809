import pytest
import torch
from composite_run import encoders_of
from tiny_composites import COMPOSITES, tiny_composite_config
from transformers import AutoModelForMultimodalLM, LlamaConfig, LlamaForCausalLM

from motet.errors import UserError
from motet.families.discovery.composite import find_parts
from motet.models.hub.llava import from_llava

PROJECTORS = {
    "qwen2_5_vl": "model.visual.merger",
    "qwen3_vl": "model.visual.deepstack_merger_list",
    "internvl": "model.multi_modal_projector",
    "llava_onevision": "model.image_newline",
    "gemma3": "model.multi_modal_projector",
    "smolvlm": "model.connector",
    "qwen2_audio": "model.multi_modal_projector",
    "qwen2_5_omni_thinker": "model.visual.merger",
    "voxtral": "model.multi_modal_projector",
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_every_parameter_belongs_to_one_layer_of_one_part(name):
    config = tiny_composite_config(name)
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(config)

    found = find_parts(model)

    encoders = encoders_of(name)
    assert list(found.modules) == [*encoders, "language_model"]
    assert PROJECTORS[name] in found.modules[encoders[0]].projector
    for module in found.modules.values():
        assert all(paths for i, paths in enumerate(module.layers) if i != len(module.layers) - 2), (
            "layers without parts"
        )
    owners = [[m.name for m in found.modules.values() if _owns(m, key)] for key, _ in model.named_parameters()]
    assert all(len(names) == 1 for names in owners)
    assert found.entry_layers == ((0, 2, 3) if name == "qwen3_vl" else (0,))
    assert found.is_tied == (name in ("gemma3", "internvl"))
    token_ids = {getattr(config, f"{medium}_token_id", None) for medium in ("image", "video", "audio")} - {None}
    assert {function.token_id for function in found.functions} <= token_ids


def _owns(module, parameter):
    try:
        return module.layer_of(parameter) >= 0
    except KeyError:
        return False


def test_what_is_no_llava_is_not_taken_apart_as_one():
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(tiny_composite_config("gemma3"))

    with pytest.raises(UserError, match="Gemma3ForConditionalGeneration is a gemma3, not a LLaVA"):
        from_llava(model)


def test_a_model_of_text_alone_is_refused():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32))

    with pytest.raises(UserError, match="LlamaForCausalLM: has no function such as get_image_features"):
        find_parts(model)
