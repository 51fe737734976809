"""The plain forward of a contrastive model, as its user would write it with transformers: what `motet verify` compares
with. The towers sample by sample, the losses as their papers write them, over the whole similarity matrix.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from motet.assignment.sample import IGNORED_LABEL
from motet.models.batch import Batch


def plain_contrastive_loss(
    towers: Mapping[str, Any], loss: Any, batch: Batch, *, pairs: Sequence[tuple[str, str]], batch_size: int
) -> Tensor:
    """The mean over all comparisons: of each contrastive batch, each pair of towers, and each sample that has both.
    With its graph.

    Args:
        towers: by name: has `module`, the transformers encoder, and `projector`, or None.
        loss: has `kind`, "softmax" or "sigmoid", `logit_scale` (a logarithm) and `logit_bias`, or None.
        batch_size: of a contrastive batch.
    """
    normalized: dict[str, dict[int, Tensor]] = {name: {} for name in towers}
    for name, tower in towers.items():
        for i, sample in enumerate(batch.samples):
            if sample.has(name):
                embedding = _embedding(tower, batch, name, i)
                normalized[name][i] = embedding / embedding.norm(dim=-1, keepdim=True)
    total, count = loss.logit_scale * 0.0, 0
    for first in range(0, len(batch.samples), batch_size):
        for a, b in pairs:
            both = [i for i in range(first, first + batch_size) if i in normalized[a] and i in normalized[b]]
            if not both:
                continue
            left, right = (torch.cat([normalized[name][i] for i in both]) for name in (a, b))
            logits = loss.logit_scale.exp() * left @ right.T
            mean = _clip(logits) if loss.kind == "softmax" else _siglip(logits + loss.logit_bias)
            total, count = total + mean * len(both), count + len(both)
    return total / max(1, count)


def plain_caption_loss(tower: Any, decoder: Any, batch: Batch, *, reads: str, name: str) -> Tensor:
    """The mean over all captions' tokens, caption by caption.

    Args:
        tower: as above; the decoder attends to its `last_hidden_state`, through its projector.
        decoder: a causal model of transformers with cross-attention.
        reads: the tower's name, `name` the decoder's.
    """
    total: Any = 0.0
    count = 0
    for i, sample in enumerate(batch.samples):
        if not sample.has(name):
            continue
        states = tower.module(**batch.features(reads, i)).last_hidden_state
        if tower.projector is not None:
            states = tower.projector(states)
        text = batch.features(name, i)
        logits = decoder(input_ids=text["input_ids"][None], encoder_hidden_states=states, use_cache=False).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        total = total + functional.cross_entropy(
            wide[:-1], text["labels"][1:], ignore_index=IGNORED_LABEL, reduction="sum"
        )
        count += int((text["labels"][1:] != IGNORED_LABEL).sum())
    return torch.as_tensor(total) / max(1, count)


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
