"""The plain forward of a contrastive model, as its user would write it with transformers: what `motet verify` compares
with. The towers sample by sample, the losses as their papers write them, over the whole similarity matrix.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from motet.data.batch import Batch


def plain_contrastive_loss(
    towers: Mapping[str, Any], loss: Any, batch: Batch, *, pairs: Sequence[tuple[str, str]], batch_size: int
) -> Tensor:
    """The mean over contrastive batches of the mean over pairs of towers, with its graph.

    Args:
        towers: by name: has `module`, the transformers encoder, and `projector`, or None.
        loss: has `kind`, "softmax" or "sigmoid", `logit_scale` (a logarithm) and `logit_bias`, or None.
        batch_size: of a contrastive batch.
    """
    embeddings = {
        name: torch.cat([_embedding(tower, batch, name, i) for i in range(len(batch.samples))])
        for name, tower in towers.items()
    }
    normalized = {name: e / e.norm(dim=-1, keepdim=True) for name, e in embeddings.items()}
    losses = []
    for first in range(0, len(batch.samples), batch_size):
        part = slice(first, first + batch_size)
        for a, b in pairs:
            logits = loss.logit_scale.exp() * normalized[a][part] @ normalized[b][part].T
            losses.append(_clip(logits) if loss.kind == "softmax" else _siglip(logits + loss.logit_bias))
    return torch.stack(losses).mean()


def _clip(logits: Tensor) -> Tensor:
    own = torch.arange(len(logits), device=logits.device)
    return (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2


def _siglip(logits: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device) - 1
    return -functional.logsigmoid(signs * logits).sum(dim=-1).mean()


def _embedding(tower: Any, batch: Batch, name: str, sample: int) -> Tensor:
    """[1, width]"""
    features = batch.features(name, sample)
    output = tower.module(**features)
    pooled = getattr(output, "pooler_output", None)
    if pooled is None:  # Whisper: the mean over what is no padding.
        grid = batch.samples[sample].layouts[name][0].grid
        frames = output.last_hidden_state
        pooled = (frames[:, : (grid[0] + 1) // 2] if grid else frames).mean(dim=1)
    return pooled if tower.projector is None else tower.projector(pooled)
