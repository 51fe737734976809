"""Dense, CPU and FlexAttention against float64."""

import numpy as np
import pytest
import torch
from masks import MASKS, attention_in_float64

from motet.attention.kernels.backends import CpuBackend, backend_for, dense_attention, flex, flex_mask
from motet.attention.kernels.device_mask import device_mask
from motet.parallel.context.attention_sinks import merge_parts


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


@pytest.mark.parametrize("value_width", [16, 8])
@pytest.mark.parametrize("kind", MASKS)
def test_attention_on_cpus_equals_float64(kind: str, value_width: int) -> None:
    """Whole, and merged from two parts of the keys, with log-sum-exps of -inf where a query sees no key."""
    query, key, value, d_out = random_tensors(4, 2)
    value, d_out = value[..., :value_width].contiguous(), d_out[..., :value_width].contiguous()
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    visible = torch.from_numpy(MASKS[kind].dense())
    expected = attention_in_float64(*leaves, visible.numpy()[None])
    expected.backward(d_out)
    backend, inputs, scale = backend_for(torch.device("cpu")), (query, key, value), 16**-0.5
    assert isinstance(backend, CpuBackend)
    mask = device_mask([MASKS[kind]])
    out, saved = backend.forward(inputs, mask, scale)
    gradients = backend.backward(d_out, inputs, out, saved, mask, scale)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(gradients, tuple(leaf.grad for leaf in leaves))
    assert torch.equal(saved[0][0, 0] == -torch.inf, ~visible.any(-1))

    # Such tensors the operator itself would read wrongly.
    strided = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in inputs]
    torch.testing.assert_close(backend.forward(strided, mask, scale)[0], out)
    torch.testing.assert_close(backend.backward(d_out, strided, out, saved, mask, scale), gradients)

    padded = MASKS[kind].padded(160)
    halves = [
        device_mask([padded], query_blocks=range(5), key_blocks=blocks, block=32) for blocks in ((0, 1, 4), (2, 3))
    ]
    rows = [torch.tensor([*range(64), *range(128, 150)]), torch.arange(64, 128)]
    parts = []
    for half, of_half in zip(halves, rows, strict=True):
        own = [torch.zeros(1, 2, half.position.shape[1], t.shape[3], dtype=t.dtype) for t in (key, value)]
        for tensor, whole in zip(own, (key, value), strict=True):
            tensor[:, :, : len(of_half)] = whole[:, :, of_half]
        wide_query = torch.nn.functional.pad(query, (0, 0, 0, 10))
        parts.append(backend.forward_part((wide_query, own[0], own[1]), half, scale))
    merged, log_sums = merge_parts(*parts[0], *parts[1])
    torch.testing.assert_close(merged[:, :, :150], out)
    torch.testing.assert_close(log_sums[:, :, :150], saved[0])


def test_attention_on_cpus_without_keys_or_queries() -> None:
    query, key, value, d_out = (tensor[:, :, :0] for tensor in random_tensors(4, 2))
    backend, mask = CpuBackend(), device_mask([MASKS["causal"]])
    out, saved = backend.forward((query, key, value), mask, 1.0)
    assert out.shape == query.shape
    gradients = backend.backward(d_out, (query, key, value), out, saved, mask, 1.0)
    assert [tensor.shape for tensor in gradients] == [query.shape, key.shape, value.shape]


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
