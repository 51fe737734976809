"""Dense and FlexAttention against float64."""

import numpy as np
import pytest
import torch
from masks import MASKS, attention_in_float64

from motet.attention.kernels.backends import dense_attention, flex, flex_mask
from motet.attention.kernels.device_mask import device_mask


def random_tensors(heads: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, heads, 150, 16), (1, kv_heads, 150, 16), (1, kv_heads, 150, 16), (1, heads, 150, 16)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("kind", MASKS)
def test_dense_equals_float64(kind: str) -> None:
    *qkv, d_out = random_tensors(4, 2)
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in qkv] for _ in range(2))
    out = dense_attention(*ours, device_mask([MASKS[kind]]))
    expected = attention_in_float64(*theirs, MASKS[kind].dense()[None])
    out.backward(d_out)
    expected.backward(d_out)
    torch.testing.assert_close(out, expected)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("kind", MASKS)
def test_flex_equals_float64(kind: str) -> None:
    query, key, value, _ = random_tensors(4, 2)
    mask = device_mask([MASKS[kind]], block=32)
    out = flex(query.float(), key.float(), value.float(), flex_mask(mask))
    expected = attention_in_float64(query, key, value, MASKS[kind].dense()[None])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", MASKS)
def test_flex_gets_exactly_the_tiles_that_are_not_empty(kind: str) -> None:
    dense = MASKS[kind].padded(160).dense().reshape(5, 32, 5, 32).any((1, 3))
    block_mask = flex_mask(device_mask([MASKS[kind]], block=32))
    assert (block_mask.to_dense()[0, 0].bool().numpy() == dense).all()
    assert np.asarray(block_mask.full_kv_num_blocks).sum() < dense.sum() or kind == "full"
