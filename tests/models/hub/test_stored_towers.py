"""A run file's towers out of a stored CLIPModel or SiglipModel, against transformers' own model of the same folder."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_clip import batch, clip, siglip

from motet.config import RunConfig
from motet.errors import UserError
from motet.models.contrastive import ContrastiveModule
from motet.models.from_run_file import build_node
from motet.models.hub.clip import initial_loss, to_transformers

DTYPE = torch.float64


def stored(folder: Path, kind: str) -> Any:
    model = clip(39) if kind == "clip" else siglip()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def run_config(folder: Path, kind: str, **contrastive: Any) -> RunConfig:
    towers = {name: {"path": str(folder), "part": name} for name in ("image", "text")}
    if kind == "siglip":
        towers = {name: {**tower, "projector": None} for name, tower in towers.items()}
    given = {"width": 24} if kind == "clip" else {"loss": "sigmoid"}
    model = {"towers": towers, "contrastive": {**given, **contrastive}}
    return RunConfig.model_validate({"model": model, "data": {"kind": "same-digits"}})


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_stored_model_is_what_is_trained(tmp_path: Path, kind: str) -> None:
    expected = stored(tmp_path, kind)
    config = run_config(tmp_path, kind)
    towers = {name: build_node(config, name, None, DTYPE).module for name in config.model.towers}
    model = ContrastiveModule(towers, initial_loss(config.model).to(DTYPE))
    inputs = batch(39 if kind == "clip" else 2)
    torch.testing.assert_close(model(**inputs).loss, expected(**inputs, return_loss=True).loss)
    again = to_transformers(model).state_dict()
    for name, tensor in expected.state_dict().items():
        # The scale and the bias pass through a number of Python's and a float32.
        rounding = {"rtol": 1e-7, "atol": 0} if name.startswith("logit") else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(again[name], tensor, **rounding)


@pytest.mark.parametrize(
    ("contrastive", "scale"),
    [
        ({}, 3.5),
        ({"logit_scale": 1.5}, 1.5),
        ({"max_logit_scale": 3.0}, 3.0),
        ({"loss": "sigmoid"}, math.log(10)),
    ],
)
def test_the_scale_is_the_stored_one_of_the_same_loss(
    tmp_path: Path, contrastive: dict[str, Any], scale: float
) -> None:
    model = clip(39)
    model.logit_scale.data.fill_(3.5)
    model.save_pretrained(tmp_path)
    config = run_config(tmp_path, "clip", **contrastive).model
    config.towers["text"] = config.towers["text"].model_copy(update={"path": f"{tmp_path}/../{tmp_path.name}"})
    found = initial_loss(config)
    assert found.logit_scale.item() == pytest.approx(scale)


def test_towers_of_two_models_have_no_scale_in_common(tmp_path: Path) -> None:
    for name in ("one", "two"):
        stored(tmp_path / name, "clip")
    config = run_config(tmp_path / "one", "clip").model
    text = config.towers["text"].model_copy(update={"path": str(tmp_path / "two")})
    mixed = config.model_copy(update={"towers": {**config.towers, "text": text}})
    assert initial_loss(mixed).logit_scale.item() == pytest.approx(2.6592, rel=1e-4)


def test_a_tower_stored_by_itself_with_its_projection(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, projection_dim=6)
    expected = transformers.CLIPVisionModelWithProjection(vision)
    expected.save_pretrained(tmp_path)
    towers = {"image": {"path": str(tmp_path)}, "other": {"config": "CLIPVisionConfig"}}
    data = {"kind": "same-digits"}
    config = RunConfig.model_validate({"model": {"towers": towers, "contrastive": {"width": 6}}, "data": data})
    projector = build_node(config, "image", None, torch.float32).parts["projector"]
    assert torch.equal(projector.weight, expected.visual_projection.weight)
    config = RunConfig.model_validate({"model": {"towers": towers, "contrastive": {"width": 7}}, "data": data})
    with pytest.raises(UserError, match=r"the stored projection is 6 wide, but the features are 7 wide"):
        build_node(config, "image", None, torch.float32)
    # What does not say that it has a projection is found out when it is read.
    values = json.loads((tmp_path / "config.json").read_text())
    del values["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"stored visual_projection.weight is 6 wide, but the features are 7 wide"):
        build_node(config, "image", None, torch.float32)
