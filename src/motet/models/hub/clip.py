"""transformers' CLIPModel and SiglipModel in and out: `from_transformers`, `to_transformers`.

A model that came in and goes out again has the same weights to the bit, and the same logits on the same input.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from motet.errors import UserError
from motet.models.contrastive import ContrastiveLoss, ContrastiveModule
from motet.models.multimodal import ModalityModule

ARCHITECTURES = {
    ("clip_vision_model", "clip_text_model", "softmax"): (CLIPModel, CLIPConfig),
    ("siglip_vision_model", "siglip_text_model", "sigmoid"): (SiglipModel, SiglipConfig),
}
"""By the families of the image and the text tower, and the loss."""


def from_transformers(model: Any, *, image: str = "image", text: str = "text") -> ContrastiveModule:
    """A CLIPModel or SiglipModel as a `ContrastiveModule`, which takes its modules over. `image`, `text`: the towers'
    names. Raises `UserError` for another class."""
    if isinstance(model, CLIPModel):
        towers = {
            image: ModalityModule(model.vision_model, model.visual_projection),
            text: ModalityModule(model.text_model, model.text_projection),
        }
        loss = ContrastiveLoss("softmax")
    elif isinstance(model, SiglipModel):
        towers = {image: ModalityModule(model.vision_model), text: ModalityModule(model.text_model)}
        loss = ContrastiveLoss("sigmoid")
        assert loss.logit_bias is not None
        loss.logit_bias = _scalar(model.logit_bias)
    else:
        raise UserError(f"{type(model).__name__} is neither CLIPModel nor SiglipModel; give its towers one by one")
    loss.logit_scale = _scalar(model.logit_scale)
    return ContrastiveModule(towers, loss)


def to_transformers(model: ContrastiveModule) -> Any:
    """A CLIPModel or SiglipModel with the weights of the model, in its dtype.

    Raises `UserError` for towers that transformers has no model of."""
    image, text, (model_class, config_class) = _architecture(model)
    config = config_class(
        vision_config=image.module.config.to_dict(), text_config=text.module.config.to_dict(), **_sizes(model)
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
    """Whether `to_transformers` has a class for it."""
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
        if all(_is_matrix(tower.projector) if wants_projections else tower.projector is None for tower in towers):
            return by_family[image], by_family[text], classes
    raise UserError(
        f"export: transformers has no model of {', '.join(by_family)} with {model.loss.kind} loss and these "
        "projectors; its parts can be saved one by one"
    )


def _is_matrix(projector: nn.Module | None) -> bool:
    return isinstance(projector, nn.Linear) and projector.bias is None


def _sizes(model: ContrastiveModule) -> dict[str, Any]:
    return {"projection_dim": model.width} if model.loss.kind == "softmax" else {}


def _scalar(parameter: Tensor) -> nn.Parameter:
    """SigLIP's have one element in one dimension."""
    return nn.Parameter(torch.clone(parameter.detach()).reshape(()), parameter.requires_grad)
