"""Converts transformers' CLIPModel and SiglipModel to a `ContrastiveModule` and back, without a change of any bit.

A run file's towers also take projection matrices, scale and bias from a stored CLIPModel or SiglipModel; what is not
stored is drawn, or starts as in the papers.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from motet.config import ModelConfig, TowerConfig
from motet.errors import UserError
from motet.families.hf_config import COMPOSITE_TOWERS, STORED_PROJECTIONS, stored_values
from motet.models.contrastive import ContrastiveModule
from motet.models.graph import ModalityModule
from motet.models.materialize import stored_tensor
from motet.models.stages.contrastive import ContrastiveLoss
from motet.models.stages.projector import Projection

ARCHITECTURES = {
    ("clip_vision_model", "clip_text_model", "softmax"): (CLIPModel, CLIPConfig),
    ("siglip_vision_model", "siglip_text_model", "sigmoid"): (SiglipModel, SiglipConfig),
}
"""transformers' classes, by the families of image and text tower and the loss."""


def from_transformers(model: Any) -> ContrastiveModule:
    """Makes a `ContrastiveModule` of a CLIPModel's or SiglipModel's modules. Raises `UserError` for another class."""
    if isinstance(model, CLIPModel):
        towers = {
            "image": ModalityModule(model.vision_model, model.visual_projection),
            "text": ModalityModule(model.text_model, model.text_projection),
        }
        loss = ContrastiveLoss("softmax")
    elif isinstance(model, SiglipModel):
        towers = {"image": ModalityModule(model.vision_model), "text": ModalityModule(model.text_model)}
        loss = ContrastiveLoss("sigmoid")
        assert loss.logit_bias is not None
        loss.logit_bias = _scalar(model.logit_bias)
    else:
        raise UserError(f"{type(model).__name__} is neither CLIPModel nor SiglipModel; give its towers one by one")
    loss.logit_scale = _scalar(model.logit_scale)
    return ContrastiveModule(towers, loss)


def to_transformers(model: ContrastiveModule) -> Any:
    """Returns a CLIPModel or SiglipModel with the model's weights, in its dtype.

    Raises `UserError` for towers that no such class has."""
    image, text, (model_class, config_class) = _architecture(model)
    sizes = {"projection_dim": model.width} if model_class is CLIPModel else {}
    config = config_class(
        vision_config=image.module.config.to_dict(), text_config=text.module.config.to_dict(), **sizes
    )
    made = model_class(config).to(model.loss.logit_scale.dtype)
    tensors: dict[str, Tensor] = {"logit_scale": model.loss.logit_scale}
    if model.loss.logit_bias is not None:
        tensors["logit_bias"] = model.loss.logit_bias
    parts: dict[str, nn.Module] = {"vision_model": image.module, "text_model": text.module}
    if model_class is CLIPModel:
        assert image.projector is not None
        assert text.projector is not None
        parts |= {"visual_projection": image.projector, "text_projection": text.projector}
    for name, part in parts.items():
        tensors |= {f"{name}.{key}": tensor for key, tensor in part.state_dict().items()}
    own = made.state_dict()
    made.load_state_dict({name: tensor.detach().reshape(own[name].shape) for name, tensor in tensors.items()})
    return made.train(model.training)


def is_transformers_model(model: ContrastiveModule) -> bool:
    """Whether `to_transformers` has a class for the model."""
    try:
        _architecture(model)
    except UserError:
        return False
    return True


def _architecture(model: ContrastiveModule) -> tuple[ModalityModule, ModalityModule, tuple[Any, Any]]:
    towers = list(model.modality_modules().values())
    by_family = {tower.module.config.model_type: tower for tower in towers}
    for (image, text, kind), classes in ARCHITECTURES.items():
        if by_family.keys() != {image, text} or len(towers) != 2 or model.loss.kind != kind or model.reads:
            continue
        wants_projections = classes[0] is CLIPModel
        has_matrices = all(isinstance(t.projector, nn.Linear) and t.projector.bias is None for t in towers)
        if has_matrices if wants_projections else all(tower.projector is None for tower in towers):
            return by_family[image], by_family[text], classes
    raise UserError(
        f"export: transformers has no model of {', '.join(by_family)} with {model.loss.kind} loss and these "
        "projectors; its parts can be saved one by one"
    )


def _scalar(parameter: Tensor) -> nn.Parameter:
    """Returns a copy without dimensions: SigLIP's scale and bias have one dimension of one element."""
    return nn.Parameter(torch.clone(parameter.detach()).reshape(()), parameter.requires_grad)


@torch.no_grad()
def read_projection(part: TowerConfig, family: str, projector: nn.Module | None, *, where: str) -> None:
    """Fills a `projection` with the matrix that is stored beside the tower, if there is one."""
    key = STORED_PROJECTIONS.get(family)
    if not isinstance(projector, Projection) or key is None:
        return
    stored = stored_tensor(part, key, where=where)
    if stored is None:
        return
    if stored.shape != projector.weight.shape:
        raise UserError(
            f"{where}.projector: the stored {key} is {len(stored)} wide, but the features are "
            f"{projector.out_features} wide; set model.contrastive.width to {len(stored)}, or give linear or mlp, "
            "which start with random weights"
        )
    projector.weight.copy_(stored)


def initial_loss(model: ModelConfig) -> ContrastiveLoss:
    """Makes the loss of the run file's towers, as it is before the first step."""
    given = model.contrastive
    scale, bias = given.logit_scale, given.logit_bias
    whole = _common_whole(model)
    if whole is not None:
        if scale is None:
            scale = _stored_number(whole, "logit_scale")
            if scale is not None and given.max_logit_scale is not None:
                scale = min(scale, given.max_logit_scale)  # It was trained under a limit that is rounded otherwise.
        if given.loss == "sigmoid" and bias is None:
            bias = _stored_number(whole, "logit_bias")
    return ContrastiveLoss(given.loss, scale, bias, max_logit_scale=given.max_logit_scale)


def _common_whole(model: ModelConfig) -> TowerConfig | None:
    """Returns a tower of the one stored model that both an image and a text tower come from; None if there is none, or
    several."""
    by_source: dict[str | Path | None, dict[str, TowerConfig]] = {}
    for tower in model.towers.values():
        if tower.part is not None:
            source = tower.hub if tower.path is None else Path(tower.path).resolve()
            by_source.setdefault(source, {})[tower.part] = tower
    whole = [parts["image"] for parts in by_source.values() if len(parts) == 2]
    if len(whole) != 1:
        return None
    stored = stored_values(whole[0], "model.towers")
    return whole[0] if COMPOSITE_TOWERS[stored["model_type"]].loss == model.contrastive.loss else None


def _stored_number(whole: TowerConfig, key: str) -> float | None:
    """Reads a stored scale or bias, which has no dimension or, in SigLIP, one of one element."""
    stored = stored_tensor(whole, key, where="model.towers")
    return None if stored is None else stored.item()
