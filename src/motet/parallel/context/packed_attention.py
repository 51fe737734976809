"""Causal attention within each of the samples that share a row, without a mask between them.

On CUDA, in half precision, one launch of torch's variable-length flash attention computes all samples. Elsewhere each
sample is a call of its own of torch's fused attention. No mask of tokens x tokens is made: only a sample that is longer
than its layer's sliding window has one, where flash attention does not run.
"""

import inspect
from collections.abc import Callable
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from motet.devices import to_device
from motet.parallel.context.context_sequence import CHANGES_OF_ATTENTION
from motet.parallel.main_gradients import HALF_DTYPES

PACKED_ATTENTION = "motet_packed"
"""The name under which transformers finds `packed_attention`."""
MOST_FLASH_DIM = 256
"""Largest head of the flash kernels."""
KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether torch's function (2.12) takes fewer heads of keys than of queries."""


class PackedRow:
    """The samples of one microbatch in one row."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        self.lengths, self.device = lengths, device
        self.num_calls = 0
        """Counts calls of this attention: a block that used another one saw other samples."""

    @cached_property
    def starts(self) -> Tensor:
        """[number of samples + 1] on the device, in int32."""
        return to_device(torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32), self.device)


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    *,
    context: PackedRow,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query [1, heads, T, dim] -> output [1, T, heads, dim].

    `context` travels from the stage's call through the model's keyword arguments."""
    assert attention_mask is None
    assert dropout == 0.0
    assert all(others.get(name) is None for name in ("s_aux", *CHANGES_OF_ATTENTION)), others.keys()
    context.num_calls += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = _flash if _takes_flash(query, value) else _one_by_one
    return attend(query, key, value, context, sliding_window, scale), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _takes_flash(query: Tensor, value: Tensor) -> bool:
    dim = query.shape[-1]
    fits = dim == value.shape[-1] and dim % 8 == 0 and dim <= MOST_FLASH_DIM
    return query.is_cuda and query.dtype in HALF_DTYPES and fits


def _flash(query: Tensor, key: Tensor, value: Tensor, row: PackedRow, window: int | None, scale: float) -> Tensor:
    heads, key_heads = query.shape[1], key.shape[1]
    rows = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]
    attend: Callable[..., Any] = partial(varlen_attn, enable_gqa=heads != key_heads) if KNOWS_GROUPS else varlen_attn
    if not KNOWS_GROUPS and heads != key_heads:
        rows[1:] = [tensor.repeat_interleave(heads // key_heads, dim=1) for tensor in rows[1:]]
    longest = max(row.lengths)
    before = -1 if window is None or window >= longest else window - 1
    out = attend(*rows, row.starts, row.starts, longest, longest, scale=scale, window_size=(before, 0))
    return out[None]


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, row: PackedRow, window: int | None, scale: float) -> Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    parts = zip(*(tensor.split(row.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    found = []
    for own_query, own_key, own_value in parts:
        mask = _band(own_query.shape[2], window, query.device)
        found.append(
            scaled_dot_product_attention(
                own_query,
                own_key,
                own_value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=is_grouped,
            )
        )
    return torch.cat(found, dim=2).transpose(1, 2).contiguous()


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[length, length]: a causal sliding window; None where it hides nothing."""
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)
