"""What a run file's towers take from a stored CLIPModel or SiglipModel beside their encoders' weights: the projection
matrices, the scale and the bias. What is not stored is drawn, or as the papers begin."""

from pathlib import Path

import torch
from torch import nn

from motet.config import ModelConfig, TowerConfig
from motet.errors import UserError
from motet.families.composite_towers import COMPOSITE_TOWERS, STORED_PROJECTIONS
from motet.models.contrastive import ContrastiveLoss
from motet.models.materialize import stored_model_type, stored_tensor
from motet.models.stages.projector import Projection


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
            f"{where}.projector: the stored {key} makes features of {len(stored)}, but they are "
            f"{projector.out_features} wide; set model.contrastive.width to {len(stored)}, or give linear or mlp, "
            "which are drawn"
        )
    projector.weight.copy_(stored)


def initial_loss(model: ModelConfig) -> ContrastiveLoss:
    """The loss of the run file's towers, before the first step."""
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
    """A tower of the stored model of this loss of which there are an image and a text tower, if there is one alone."""
    by_source: dict[str | Path | None, dict[str, TowerConfig]] = {}
    for tower in model.towers.values():
        if tower.part is not None:
            source = tower.hub if tower.path is None else Path(tower.path).resolve()
            by_source.setdefault(source, {})[tower.part] = tower
    whole = [parts["image"] for parts in by_source.values() if len(parts) == 2]
    if len(whole) != 1 or COMPOSITE_TOWERS[stored_model_type(whole[0])].loss != model.contrastive.loss:
        return None
    return whole[0]


def _stored_number(whole: TowerConfig, key: str) -> float | None:
    """SigLIP's have one element in one dimension."""
    stored = stored_tensor(whole, key, where="model.towers")
    return None if stored is None else stored.item()
