"""Attention within each packed sample, against dense attention under a mask of tokens x tokens."""

import os

import pytest
import torch
from one_process import check
from sampling import in_campaigns
from scenario import Scenario
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from motet.parallel.context.packed_attention import PackedRow, packed_attention

LENGTHS = (5, 1, 12, 8)
DEVICE = torch.device(os.environ.get("MOTET_TEST_DEVICE", "cpu"))
DTYPES = [torch.float64] if DEVICE.type == "cpu" else [torch.float64, torch.bfloat16]


def dense(inputs: list[Tensor], window: int | None, scale: float) -> Tensor:
    query, key, value = inputs
    sample = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(len(sample))
    distance = place[:, None] - place[None]
    seen = (sample[:, None] == sample[None]) & (distance >= 0) & (distance < (window or len(place)))
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=seen.to(query.device), scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_equals_dense_attention(key_heads: int, window: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), 16) for heads in (4, key_heads, key_heads)]
    inputs = [torch.randn(shape).to(DEVICE, dtype).requires_grad_() for shape in shapes]
    row = PackedRow(LENGTHS, DEVICE)
    query, key, value = inputs
    out, _ = packed_attention(
        nn.Identity(), query, key, value, attention_mask=None, scaling=0.3, sliding_window=window, context=row
    )
    exact = [tensor.detach().to(torch.float64).requires_grad_() for tensor in inputs]
    expected = dense(exact, window, 0.3)
    weights = torch.randn(out.shape).to(DEVICE)
    found = torch.autograd.grad((out * weights.to(dtype)).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    for ours, theirs in zip((out, *found), (expected, *wanted), strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
    assert row.num_calls == 1


CASES = {
    "varlen": Scenario(llm_pp=2, placement="colocated", packing=True, packed_attention="varlen", recompute="attention"),
    "motet": Scenario(llm="qwen3", placement="replicated", packing=True, packed_attention="motet"),
    "sdpa": Scenario(llm="gemma3", placement="replicated", packing=True, packed_attention="sdpa"),
    "two windows, zero bubble": Scenario(
        llm="gemma3", llm_pp=2, placement="colocated", packing=True, schedule="zero_bubble_h1"
    ),
    "tensor parallel": Scenario(llm="phi3", tp=2, sequence_parallel=True, placement="replicated", packing=True),
    "bfloat16": Scenario(llm="mistral", placement="replicated", packing=True, dtype="bfloat16"),
}


@pytest.mark.parametrize("name", ["varlen", *in_campaigns(name for name in CASES if name != "varlen")])
def test_equals_one_process(name: str) -> None:
    check(CASES[name])
