"""A trained contrastive model as a folder, and back."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import CLIPModel

from motet.config import ModelConfig
from motet.errors import UserError
from motet.families.classes import model_class_of
from motet.models.contrastive import ContrastiveModule
from motet.models.graph import ModalityModule
from motet.models.hub.export import describe_config, export_parts, load_towers
from motet.models.materialize import read_part_config
from motet.models.stages.contrastive import ContrastiveLoss

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
MODEL = ModelConfig.model_validate(
    {
        "towers": {
            "photo": {"config": "CLIPVisionConfig", "values": {**SMALL, "image_size": 16, "patch_size": 8}},
            "words": {
                "config": "CLIPTextConfig",
                "values": {
                    **SMALL,
                    "vocab_size": 30,
                    "max_position_embeddings": 8,
                    "bos_token_id": 0,
                    "eos_token_id": 29,
                },
            },
        },
        "contrastive": {"width": 8},
    }
)


def test_parts_and_the_whole_have_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    towers = {}
    for name, part in MODEL.towers.items():
        config = read_part_config(part, "encoder", where=name)
        towers[name] = ModalityModule(model_class_of(config.model_type, "encoder")(config), "projection")
    model = ContrastiveModule(towers, ContrastiveLoss("softmax", 1.5), width=8).eval()
    tensors = {f"{part}.{key}": t for part, module in model.parts().items() for key, t in module.named_parameters()}
    processor = SimpleNamespace(save_pretrained=lambda folder: None)
    folder = tmp_path / "export"
    export_parts(tensors, describe_config(MODEL, {}), folder, processors={"photo": processor, "words": processor})
    again = load_towers(folder)
    for name, part in model.parts().items():
        for key, value in part.named_parameters():
            assert torch.equal(again.parts()[name].get_parameter(key), value)
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "input_ids": torch.tensor([[0, 4, 29], [0, 7, 29]])}
    whole = CLIPModel.from_pretrained(folder / "whole").eval()
    torch.testing.assert_close(whole(**inputs, return_loss=True).loss, model(**inputs).loss)
    (folder / "contrastive" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="is not an exported contrastive model"):
        load_towers(folder)
