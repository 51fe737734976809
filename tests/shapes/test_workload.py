"""Shapes read from configurations against the real transformers modules."""

import pytest
from tiny_configs import EVERY_MODEL, LANGUAGE_MODELS, meta_model

from motet.families.encoders.encoder_families import ENCODER_FAMILIES
from motet.families.shape_reading.module_shapes import module_workload
from motet.models.stages.projector import build_projector
from motet.shapes.module_shape import contrastive_loss, projector_layer, with_feature_layer, with_projector


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_parameters_are_those_of_the_real_module(name):
    workload = module_workload(EVERY_MODEL[name][0])
    assert workload.num_parameters == sum(p.numel() for p in meta_model(name).parameters())


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_parameters_of_each_language_model_layer(name):
    model, workload = meta_model(name), module_workload(LANGUAGE_MODELS[name][0])
    body = model.model
    for i, block in enumerate(body.layers):
        assert workload.layers[1 + i].num_parameters == sum(p.numel() for p in block.parameters())
    assert workload.layers[0].num_parameters == body.embed_tokens.weight.numel()
    assert workload.layers[-1].num_parameters == model.lm_head.weight.numel() + body.norm.weight.numel()


@pytest.mark.parametrize("name", [name for name in EVERY_MODEL if name not in LANGUAGE_MODELS])
def test_parameters_of_each_encoder_layer(name):
    config, model = EVERY_MODEL[name][0], meta_model(name)
    family, workload = ENCODER_FAMILIES[config.model_type], module_workload(config)

    def count(parts):
        present = dict(model.named_modules())
        return sum(p.numel() for part in parts if part in present for p in present[part].parameters())

    # What belongs to no part (a table of positions directly on the model) counts with the embedding.
    assert workload.layers[-1].num_parameters == count(family.head_parts)
    for i in range(workload.num_blocks):
        assert workload.layers[1 + i].num_parameters == count([f"{family.blocks}.{i}"])
    assert workload.layers[0].num_parameters == count(family.embed_parts)


def test_a_bare_config_json_means_the_defaults():
    from transformers import MistralConfig

    bare = module_workload({"model_type": "mistral", "num_hidden_layers": 3})
    assert bare.layers == module_workload(MistralConfig(num_hidden_layers=3)).layers


@pytest.mark.parametrize("projector", ["linear", "mlp"])
def test_projector(projector):
    built = build_projector(projector, 24, 40)
    assert projector_layer(projector, 24, 40).num_parameters == sum(p.numel() for p in built.parameters())
    workload = with_projector(module_workload(EVERY_MODEL["clip"][0]), projector, 40)
    assert workload.layers[-1].part == "projector"
    assert workload.output_size == 40
    assert workload.num_layers == 2 + 3


def test_blocks_behind_the_features_have_parameters_but_do_not_run():
    encoder = module_workload(EVERY_MODEL["clip"][0])
    inner = with_feature_layer(encoder, -2)
    assert inner.num_parameters == encoder.num_parameters
    assert [bool(layer.linears) for layer in inner.layers] == [True, True, False, False]
    assert with_feature_layer(encoder, 2).layers[:3] == encoder.layers[:3]
    with pytest.raises(ValueError, match="feature_layer: 3 is not within -3 to 2"):
        with_feature_layer(encoder, 3)


def test_layers_of_equal_shape_form_a_class():
    workload = module_workload(EVERY_MODEL["mllama"][0])
    assert workload.layer_classes() == [0, 1, 2, 3]
    assert module_workload(EVERY_MODEL["llama"][0]).layer_classes() == [0, 1, 1, 3]


def test_what_is_cut_by_tensor_parallelism():
    layer = module_workload(EVERY_MODEL["llama"][0]).layers[1]
    norms = 2 * 64
    assert layer.num_parameters_per_rank(2) == norms + (layer.num_parameters - norms) // 2


def test_wrong_configurations_are_refused():
    with pytest.raises(ValueError, match="t5 is both encoder and decoder"):
        module_workload({"model_type": "t5"})
    with pytest.raises(ValueError, match="model_type 'tea' is not known"):
        module_workload({"model_type": "tea"})
    with pytest.raises(ValueError, match=r"hidden_size.* expected int.*'wide'"):
        module_workload({"model_type": "llama", "hidden_size": "wide"})
    with pytest.raises(ValueError, match="'conv' is not known"):
        projector_layer("conv", 2, 2)


@pytest.mark.parametrize(
    "name", ["siglip", "siglip-no-head", "clip", "dinov2", "whisper", "clip_text", "siglip_text", "bert"]
)
def test_a_tower_has_the_encoders_parameters_and_hands_on_one_vector_of_each_item(name):
    encoder = module_workload(EVERY_MODEL[name][0])
    tower = with_projector(module_workload(EVERY_MODEL[name][0], role="tower"), "linear", 20)
    assert tower.kind == "tower"
    assert tower.num_parameters - tower.layers[-1].num_parameters == encoder.num_parameters
    assert tower.boundary(tower.num_layers) == ("outputs", 20)
    assert tower.boundary(1) == ("tokens", 64)
    assert bool(tower.layers[-2].linears) == (name in ("siglip", "siglip_text", "bert"))


def test_the_loss_of_towers():
    loss = contrastive_loss([("image", "text"), ("image", "audio")], 20, num_parameters=2)
    assert (loss.kind, loss.num_layers, loss.num_parameters) == ("loss", 1, 2)
    assert loss.layers[0].num_comparisons == 4
