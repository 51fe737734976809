"""Attention under an interval mask by torch's dense attention: the oracle, and the path on the CPU.

Limits: the mask is a matrix of queries x keys.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from motet.attention.kernels.device_mask import DeviceMask


def dense_attention(query: Tensor, key: Tensor, value: Tensor, mask: DeviceMask, scale: float | None = None) -> Tensor:
    """As `motet.attention.kernels.flash.flash_attention`."""
    return masked_attention(query, key, value, mask.dense(), scale)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float | None = None) -> Tensor:
    """`allowed` [B, Q, K]. Queries that see no key give 0 and zero gradients."""
    has_keys = allowed.any(-1)
    if allowed.shape[-1] == 0:
        return query * 0 + (key.sum() + value.sum()) * 0
    # A softmax over nothing would be NaN, and so would its gradient: such rows see everything, and are then cut out.
    allowed = (allowed | ~has_keys[..., None])[:, None]
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return torch.where(has_keys[:, None, :, None], out, torch.zeros((), dtype=out.dtype, device=out.device))
