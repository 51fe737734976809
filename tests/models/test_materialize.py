"""Modules from descriptions: the same weights under every partition, sound buffers, and weights from folders."""

import json
from contextlib import nullcontext

import pytest
import torch
import transformers
from sampling import in_campaigns
from scenario import PLACEHOLDERS, Scenario
from tiny_encoders import ENCODERS
from tiny_language_models import SIZES, TINY
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from motet.config import EncoderConfig, LanguageModelConfig, PartConfig
from motet.errors import UserError
from motet.models.from_run_file import plain_nodes
from motet.models.graph import ModalityModule
from motet.models.materialize import float64_throughout, layer_parts, materialize, num_module_layers, read_part_config
from motet.models.stages.encoder import EncoderStage, num_encoder_layers
from motet.models.stages.language_model import LanguageModelStage


def language_model_part(family: str) -> LanguageModelConfig:
    _, config_class, values = TINY[family]
    return LanguageModelConfig(config=config_class.__name__, values={**SIZES, **values})


def encoder_part(family: str) -> EncoderConfig:
    _, config_class, values = ENCODERS[family]
    return EncoderConfig(config=config_class.__name__, values=values)


PARTS: dict[str, PartConfig] = {f: language_model_part(f) for f in TINY} | {f: encoder_part(f) for f in ENCODERS}

IN_TURN = [*list(PARTS)[::2], *in_campaigns(list(PARTS)[1::2])]
"""Every second family in `make test`."""


def kind_of(part):
    return "encoder" if isinstance(part, EncoderConfig) else "language_model"


def build(part, layers=None, **options):
    return materialize(part, kind_of(part), name="m", where="model.m", layers=layers, **options)


def plain_model(part):
    """As its user would build it with transformers."""
    family = next(family for family, other in PARTS.items() if other is part)
    model_class, config_class, values = (TINY | ENCODERS)[family]
    torch.manual_seed(3)
    return model_class(config_class(**(SIZES if family in TINY else {}), **values))


def stage_of(part, layers):
    module = build(part, layers)
    if kind_of(part) == "language_model":
        return LanguageModelStage("m", module, layers)
    return EncoderStage("m", ModalityModule(module), layers)


@pytest.mark.parametrize("family", IN_TURN)
def test_every_partition_begins_with_the_same_weights(family: str) -> None:
    part = PARTS[family]
    whole = build(part)
    expected = {f"module.{name}": p for name, p in whole.named_parameters()}
    num_layers = num_module_layers(whole, kind_of(part))
    found = {}
    for layers in [(0, 1), (1, 3), (3, num_layers - 1), (num_layers - 1, num_layers)]:
        stage = stage_of(part, layers)
        for name, parameter in stage.named_parameters():
            name = stage.canonical_name(name)
            assert torch.equal(parameter, found.setdefault(name, parameter)), name
    assert set(found) == set(expected)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    drawn = [p for p in expected.values() if p.dim() > 1 and p.requires_grad and p.any()]
    assert len({p.double().sum().item() for p in drawn}) == len(drawn), "two weights were drawn alike"


@pytest.mark.parametrize("family", PARTS)
def test_weights_are_drawn_as_transformers_draws_them(family: str) -> None:
    """Constants are the same; random ones have the same spread."""
    plain, ours = plain_model(PARTS[family]), build(PARTS[family])
    assert type(plain) is type(ours)
    for name, parameter in plain.named_parameters():
        own = ours.get_parameter(name)
        assert own.requires_grad == parameter.requires_grad, name
        assert own.dtype == parameter.dtype, name
        if parameter.numel() > 100 and parameter.std() > 0 and parameter.requires_grad:
            assert 0.8 < (own.std() / parameter.std()).item() < 1.25, name
        elif parameter.numel() <= 100 or not parameter.requires_grad:
            assert torch.equal(own, parameter) or parameter.std() > 0, name


@pytest.mark.parametrize("family", PARTS)
def test_buffers_are_those_of_a_plainly_built_model(family: str) -> None:
    plain = dict(plain_model(PARTS[family]).named_buffers())
    module = stage_of(PARTS[family], (1, 3)).module
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, plain[name]), name


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_constants_are_those_of_the_reference_in_every_dtype(dtype: str) -> None:
    """GPT-J's table of positions is computed in torch's default dtype, which is the model's in its constructor."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8, "n_positions": 64, "vocab_size": 99}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    config = Scenario(dtype=dtype).config()
    gptj = LanguageModelConfig(config="GPTJConfig", values={**sizes, **tokens})
    config = config.model_copy(update={"model": config.model.model_copy(update={"language_model": gptj})})
    with float64_throughout() if dtype == "float64" else nullcontext():
        reference = plain_nodes(config, PLACEHOLDERS)["language_model"].parts["module"]
        own = materialize(gptj, "language_model", name="m", where="model.m", layers=(1, 2), dtype=getattr(torch, dtype))
    buffers = dict(reference.named_buffers())
    for name, buffer in own.named_buffers():
        assert buffer.dtype == buffers[name].dtype, name
        assert buffer.is_meta or torch.equal(buffer, buffers[name]), name
    assert any(name.endswith("embed_positions") and not buffer.is_meta for name, buffer in own.named_buffers())


@pytest.mark.parametrize("family", ["llama-tied", "gemma3", "llama"])
def test_a_shared_weight_belongs_to_both_its_layers_in_every_cut(family: str) -> None:
    shared = (0, 5) if family != "llama" else (0,)
    for layers in [(0, 6), (0, 1), (0, 5)]:
        assert stage_of(PARTS[family], layers).layers_of("module.model.embed_tokens.weight") == shared
    for layers in [(5, 6), (2, 6)]:
        assert stage_of(PARTS[family], layers).layers_of("module.lm_head.weight") == (
            shared if family != "llama" else (5,)
        )


def test_another_seed_or_name_draws_other_weights() -> None:
    part = PARTS["llama"]
    first = build(part).lm_head.weight
    assert not torch.equal(first, build(part.model_copy(update={"seed": 1})).lm_head.weight)
    other = materialize(part, "language_model", name="other", where="model.other")
    assert not torch.equal(first, other.lm_head.weight)


def test_global_random_state_and_default_dtype_stay() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    model = build(PARTS["llama"], dtype=torch.float64)
    assert torch.equal(torch.rand(2), expected)
    assert model.lm_head.weight.dtype == torch.float64


@pytest.mark.parametrize("family", PARTS)
def test_only_the_layers_asked_for_take_memory(family: str) -> None:
    part = PARTS[family]
    module = build(part, (1, 3))
    for layer in range(num_module_layers(module, kind_of(part))):
        for path in layer_parts(module, kind_of(part), layer):
            for parameter in module.get_submodule(path).parameters():
                assert parameter.is_meta == (layer not in (1, 2)), path


@pytest.mark.parametrize("family", IN_TURN)
def test_weights_come_from_a_folder(family: str, tmp_path) -> None:
    part = PARTS[family]
    plain = plain_model(part)
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    stored = type(part)(path=str(tmp_path))
    whole = build(stored)
    for name, parameter in plain.named_parameters():
        assert torch.equal(whole.get_parameter(name), parameter), name
    for layers in [(1, 3), (3, num_module_layers(whole, kind_of(part)))]:
        stage = stage_of(stored, layers)
        for name, parameter in stage.named_parameters():
            canonical = stage.canonical_name(name).removeprefix("module.")
            assert torch.equal(parameter, plain.get_parameter(canonical)), name


@pytest.mark.parametrize("family", ["siglip", "clip", "whisper", "qwen2_5_vl"])
def test_parts_come_out_of_a_folder_of_a_whole_model(family: str, tmp_path) -> None:
    if family == "whisper":
        _, config_class, values = ENCODERS["whisper"]
        sizes = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 48, "vocab_size": 40}
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        whole = transformers.WhisperForConditionalGeneration(config_class(**values, **sizes, **special))
        expected = whole.model.encoder
    elif family == "qwen2_5_vl":
        sections = {"rope_type": "default", "mrope_section": [2, 1, 1]}
        text = {**SIZES, "num_hidden_layers": 1, "rope_parameters": sections}
        vision = ENCODERS[family][2] | {"out_hidden_size": SIZES["hidden_size"]}
        whole = transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        )
        expected = whole.model.visual
    else:
        name = {"siglip": "Siglip", "clip": "CLIP"}[family]
        text = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 1}
        config = getattr(transformers, f"{name}Config")(vision_config=ENCODERS[family][2], text_config=text)
        whole = getattr(transformers, f"{name}Model")(config)
        expected = whole.vision_model
    whole.save_pretrained(tmp_path)
    found = build(EncoderConfig(path=str(tmp_path)))
    names = dict(expected.named_parameters())
    assert names
    assert {n for n, _ in found.named_parameters()} == set(names)
    for name, parameter in names.items():
        assert torch.equal(found.get_parameter(name), parameter), name


@pytest.mark.parametrize("family", ["llama", "siglip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folders_are_read_where_float32_means_float64(family: str, dtype: torch.dtype, tmp_path) -> None:
    """As `motet verify` with train.dtype float64 reads them."""
    plain = plain_model(PARTS[family]).to(dtype)
    plain.save_pretrained(tmp_path)
    with float64_throughout():
        read = build(type(PARTS[family])(path=str(tmp_path)), dtype=torch.float64)
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name).double())


def test_stored_values_can_be_replaced(tmp_path) -> None:
    plain_model(PARTS["mistral"]).save_pretrained(tmp_path)
    config = read_part_config(
        LanguageModelConfig(path=str(tmp_path), values={"sliding_window": 3}), "language_model", where="w"
    )
    assert (config.sliding_window, config.hidden_size) == (3, SIZES["hidden_size"])


def test_what_is_wrong_with_a_part_is_said(tmp_path) -> None:
    plain_model(PARTS["llama"]).save_pretrained(tmp_path / "llama")
    plain_model(PARTS["siglip"]).save_pretrained(tmp_path / "siglip")
    for name in ("no_weights", "damaged", "of_another"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((tmp_path / "llama" / "config.json").read_text())
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"cut short")
    (tmp_path / "of_another" / "model.safetensors").write_bytes(
        (tmp_path / "siglip" / "model.safetensors").read_bytes()
    )
    (tmp_path / "no_json").mkdir()
    (tmp_path / "no_json" / "config.json").write_text("{")
    for values, words in [
        ({"path": str(tmp_path)}, r"model\.m\.path: .*config.json cannot be read \(No such file"),
        ({"path": str(tmp_path / "absent")}, "config.json cannot be read"),
        ({"path": str(tmp_path / "no_json")}, "model.m.path"),
        ({"path": str(tmp_path / "no_weights")}, "no .safetensors file"),
        ({"path": str(tmp_path / "damaged")}, "model.safetensors is damaged"),
        ({"path": str(tmp_path / "of_another")}, "has no weights for model.embed_tokens.weight"),
        ({"path": str(tmp_path / "siglip")}, "'siglip_vision_model' is not a known language model"),
        ({"path": str(tmp_path / "llama"), "values": {"vocab_size": 41}}, r"shape \[40, 32\].*\[41, 32\]"),
        ({"config": "NoSuchConfig"}, "NoSuchConfig is not known"),
        ({"config": "LlamaModel"}, "LlamaModel is not known"),
        ({"config": "BertConfig"}, "bert is an encoder unless its is_decoder is true"),
        ({"config": "LlamaConfig", "values": {"hidden_size": "wide"}}, r"model\.m\.values"),
        ({"config": "LlamaConfig", "values": {"hidden_size": 30, "num_attention_heads": 4}}, r"model\.m"),
    ]:
        with pytest.raises(UserError, match=words) as caught:
            build(LanguageModelConfig(**values))
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith("model.m")


def test_transformers_decides_by_the_flag_that_is_set() -> None:
    """`_is_hf_initialized` is private; materialize relies on it for modules and for parameters."""
    model = plain_model(PARTS["llama"])
    linear = model.model.layers[0].mlp.up_proj
    kept, drawn = model.lm_head.weight.clone(), linear.weight.clone()
    for module in model.modules():
        module._is_hf_initialized = module is not linear
    model.initialize_weights()
    assert torch.equal(model.lm_head.weight, kept)
    assert not torch.equal(linear.weight, drawn)
    drawn = linear.weight.clone()
    linear.weight._is_hf_initialized, linear._is_hf_initialized = True, False
    model.initialize_weights()
    assert torch.equal(linear.weight, drawn)


def test_encoder_layers_are_counted_without_projector() -> None:
    assert num_module_layers(build(PARTS["siglip"]), "encoder") == num_encoder_layers(build(PARTS["siglip"]), None)
    assert isinstance(build(PARTS["whisper"]), WhisperEncoder)
    assert json.loads(build(PARTS["clip"]).config.to_json_string())["model_type"] == "clip_vision_model"
