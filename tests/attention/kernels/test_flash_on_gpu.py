"""The kernels as compiled for a GPU: every mask in the dtypes that are trained in, and races.

Collected only where there is a GPU (`conftest.py`): `python -m pytest tests/attention/kernels`.
"""

import itertools

import numpy as np
import pytest
import torch
from masks import BLOCK, MASKS, attention_in_float64, order_of_blocks
from torch import Tensor

from motet.assignment.sample import Segment
from motet.attention.kernels.backends import FlexBackend, TritonBackend
from motet.attention.kernels.device_mask import device_mask
from motet.attention.masks.interval_mask import IntervalMask
from motet.attention.masks.rules import AttentionRule, mask_of
from motet.attention.masks.token_layout import Document, layout_of_documents

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS = 1000
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def tensors(heads: int, key_heads: int, length: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, length, dim) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def check(
    backend: TritonBackend | FlexBackend,
    mask: IntervalMask,
    blocks: list[int],
    inputs: list[Tensor],
    size: int = BLOCK,
) -> None:
    """Output and gradients of permuted tokens, with long rows shared out, against float64. `size`: of a block."""
    tokens = np.concatenate([np.arange(block * size, (block + 1) * size) for block in blocks])
    query, key, value, d_out = inputs
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    expected = attention_in_float64(*leaves, mask.dense()[None])
    expected.backward(d_out.double())
    on_device = device_mask([mask], query_blocks=blocks, key_blocks=blocks, block=size, device=DEVICE, max_tiles=2)
    ours = [tensor[:, :, tokens].contiguous().to(DEVICE) for tensor in (query, key, value)]
    scale = query.shape[-1] ** -0.5
    out, saved = backend.forward((*ours,), on_device, scale)
    gradients = backend.backward(d_out[:, :, tokens].to(DEVICE), (*ours,), out, saved, on_device, scale)
    for mine, other in zip((out, *gradients), (expected, *(leaf.grad for leaf in leaves)), strict=True):
        wanted = other.detach()[:, :, tokens]
        assert wanted.norm() > 0
        assert (mine.double().cpu() - wanted).norm() / wanted.norm() <= TOLERANCES[query.dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("kind", "order", "group"), itertools.product(MASKS, ["identity", "reversed", "lpt"], [1, 4]))
def test_equals_float64(kind: str, order: str, group: int, dtype: torch.dtype) -> None:
    mask = MASKS[kind].padded(192)
    check(TritonBackend(), mask, order_of_blocks(order, mask), tensors(group, 1, 192, 64, dtype))


@pytest.mark.parametrize("dim", [24, 72, 80, 96, 128, 256])
def test_head_dimensions(dim: int) -> None:
    mask = MASKS["own_item"].padded(192)
    check(TritonBackend(), mask, [0, 1, 2], tensors(2, 1, 192, dim, torch.bfloat16))


@pytest.mark.parametrize("kind", MASKS)
def test_flex_equals_float64(kind: str) -> None:
    """FlexAttention's kernels take blocks of 128, which is what motet gives them."""
    mask = MASKS[kind].padded(256)
    check(FlexBackend(), mask, [1, 0], tensors(4, 1, 256, 64, torch.bfloat16), size=128)


def test_no_races() -> None:
    """A thousand runs give the same bits, with more programs than the device has units, and rows shared out."""
    segments = [Segment(700), Segment(256, "vision", 0), Segment(600), Segment(256, "vision", 1), Segment(236)]
    mask = mask_of(layout_of_documents([Document(tuple(segments))] * 2), AttentionRule(media="own_item"))
    on_device = device_mask([mask], device=DEVICE, max_tiles=4)
    query, key, value, d_out = (t.to(DEVICE) for t in tensors(8, 2, mask.num_tokens, 128, torch.bfloat16))
    backend = TritonBackend()

    def run() -> list[Tensor]:
        out, saved = backend.forward((query, key, value), on_device, 0.1)
        return [out, *saved, *backend.backward(d_out, (query, key, value), out, saved, on_device, 0.1)]

    first = run()
    for number in range(RUNS):
        for mine, other in zip(run(), first, strict=True):
            assert torch.equal(mine, other), number
