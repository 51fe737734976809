"""Models whose exports would lack weights are refused, before they are trained and where they would be written."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_language_models import MIXTURES, SIZES
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    HrmTextConfig,
    PretrainedConfig,
    ShieldGemma2Config,
)

from motet.config import ModelConfig, PartConfig
from motet.errors import UserError
from motet.families.discovery.composite import composite_class_of
from motet.families.stored_weights import sources_of, stored_buffers, weights_of
from motet.families.tiny import tiny_config
from motet.models.hub.composite import check_composite_export
from motet.models.hub.export import check_export, describe_config
from motet.models.hub.weights import check_part, save_part

NOT_LOADED_AGAIN = (
    r"export: transformers would not load 54 of the tensors of a Gemma3ForConditionalGeneration again from the names "
    r"under which it stores them \(model\.language_model\.embed_tokens\.weight as "
    r"model\.language_model\.model\.embed_tokens\.weight\); set train\.export to false, or call save_checkpoint: "
    r"checkpoints hold all weights$"
)
JOINED = (
    r"export: transformers stores 192 of the tensors of a HrmTextForCausalLM together with others "
    r"\(model\.\w+\.layers\.0\.\S+ in \S+\.gqkv_proj\.weight\), which motet does not write; set train\.export to false"
)


def tiny(config: PretrainedConfig, *, media: bool = False) -> tuple[type[Any], PretrainedConfig]:
    made = tiny_config(config, media=media)
    return (composite_class_of(made) if media else AutoModelForCausalLM._model_mapping[type(made)]), made


def drawn(model_class: type[Any], config: PretrainedConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: tensor.detach() for name, tensor in weights_of(model_class(config)).items()}


def test_names_that_are_not_loaded_again(tmp_path: Path) -> None:
    model_class, config = tiny(ShieldGemma2Config(), media=True)
    with pytest.raises(UserError, match=NOT_LOADED_AGAIN):
        check_part(model_class, config, where="model", is_causal=True)
    with pytest.raises(UserError, match=NOT_LOADED_AGAIN):
        save_part(tmp_path / "out", model_class, config, drawn(model_class, config), where="model")
    assert not (tmp_path / "out").exists()


def test_tensors_that_are_stored_as_one(tmp_path: Path) -> None:
    model_class, config = tiny(HrmTextConfig())
    with pytest.raises(UserError, match=JOINED):
        check_part(model_class, config, where="model", is_causal=True)
    with pytest.raises(UserError, match=JOINED):
        save_part(tmp_path / "out", model_class, config, drawn(model_class, config), where="model")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model_type", ["qianfan_ocr", "step3p7"])
def test_encoders_whose_tensors_are_stored_as_one(model_type: str) -> None:
    model_class, config = tiny(CONFIG_MAPPING[model_type](), media=True)
    with pytest.raises(
        UserError, match=r"export: transformers stores 24 of the tensors of a \w+ together with others \("
    ):
        check_part(model_class, config, where="model", is_causal=True)


def test_whole_models_of_run_files_are_refused() -> None:
    _, config = tiny(ShieldGemma2Config(), media=True)
    values = {
        key: value
        for key, value in config.to_dict().items()
        if key in ("text_config", "vision_config", "boi_token_index")
    }
    with pytest.raises(UserError, match="again from the names under which it stores them"):
        check_composite_export(PartConfig(config="ShieldGemma2Config", values=values))


def test_stored_buffers_that_no_checkpoint_holds(tmp_path: Path) -> None:
    model_class, config_class, values = MIXTURES["glm4_moe"]
    config = config_class(**{**SIZES, **values})
    check_part(model_class, config, where="model", is_causal=True)
    with pytest.raises(
        UserError, match=r"export: checkpoints lack 3 of the stored buffers of a Glm4MoeForCausalLM \(.*bias\)"
    ):
        check_part(model_class, config, where="model", is_causal=False)
    tensors = drawn(model_class, config)
    (left, *_) = stored_buffers(model_class(config))
    with pytest.raises(UserError, match=f"export: model has no tensor {left}; give the tensors"):
        save_part(tmp_path, model_class, config, {n: t for n, t in tensors.items() if n != left}, where="model")


def test_tied_weights_adapters_encoders_and_frozen_parts_are_exported() -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    language_model = {**SIZES, "tie_word_embeddings": True}
    model = {
        "encoders": {"vision": {"config": "Dinov2Config", "values": vision, "train": {"module": False}}},
        "language_model": {
            "config": "LlamaConfig",
            "values": language_model,
            "train": {"module": False, "lora": {"rank": 2}},
        },
    }
    check_export(describe_config(ModelConfig.model_validate(model), defaultdict(int)))


def test_folders_of_one_name_are_refused_before_the_training() -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    encoder = {"config": "Dinov2Config", "values": vision}
    model = {
        "encoders": {"vision": encoder, "vision_projector": encoder},
        "language_model": {"config": "LlamaConfig", "values": SIZES},
    }
    with pytest.raises(UserError, match="export: vision_projector is a folder of vision's; rename that encoder"):
        check_export(describe_config(ModelConfig.model_validate(model), defaultdict(int)))


def test_a_stored_name_that_is_the_models_own_is_not_renamed() -> None:
    """As transformers loads it: DeepSeek V4's last norm has a name that a pattern of older files matches."""
    model_class, config = tiny(CONFIG_MAPPING["deepseek_v4"]())
    with torch.device("meta"):
        model = model_class(config)
    assert sources_of(model, [("model.norm.weight", None)]).keys() == {"model.norm.weight"}
