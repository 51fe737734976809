"""What a stored CLIPModel or SiglipModel is made of: which of its parts is which tower, and what else is trained of it.

Pure: names alone, so that a run file's towers are planned without weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from motet.errors import UserError

TowerPart = Literal["image", "text"]


@dataclass(frozen=True)
class CompositeTowers:
    loss: Literal["softmax", "sigmoid"]
    """Of which the stored `logit_scale` and `logit_bias` are."""
    families: Mapping[TowerPart, str]
    """The `model_type` of each tower."""


COMPOSITE_TOWERS: Mapping[str, CompositeTowers] = {
    "clip": CompositeTowers("softmax", {"image": "clip_vision_model", "text": "clip_text_model"}),
    "siglip": CompositeTowers("sigmoid", {"image": "siglip_vision_model", "text": "siglip_text_model"}),
}
"""By `model_type`."""

STORED_PROJECTIONS: Mapping[str, str] = {
    "clip_vision_model": "visual_projection.weight",
    "clip_text_model": "text_projection.weight",
}
"""By a tower's family: the projection matrix beside its weights, in a CLIPModel or a model "WithProjection"."""

_CONFIGS: Mapping[TowerPart, str] = {"image": "vision_config", "text": "text_config"}
DEFAULT_PROJECTION_DIM = 512


def tower_family(model_type: str, part: TowerPart | None) -> str:
    """The family of a tower stored in a model of this type: of a model that is one encoder, its own.

    Raises `UserError` if `part` is missing, or says something of a model that has no parts."""
    composite = COMPOSITE_TOWERS.get(model_type)
    if composite is None:
        if part is not None:
            raise UserError(f"part: is {part}, but what is stored is one {model_type} without parts; leave it out")
        return model_type
    if part is None:
        raise UserError(f"part: is missing, but what is stored is a {model_type} of two towers; give image or text")
    return composite.families[part]


def tower_values(stored: Mapping[str, Any], part: TowerPart | None) -> dict[str, Any]:
    """The configuration of a tower from that of the model in which it is stored. Raises as `tower_family`."""
    model_type = str(stored.get("model_type"))
    family = tower_family(model_type, part)
    if part is None:
        return dict(stored)
    own = stored.get(_CONFIGS[part]) or {}
    width = stored.get("projection_dim", DEFAULT_PROJECTION_DIM)
    return {**own, "model_type": family, **({} if model_type == "siglip" else {"projection_dim": width})}
