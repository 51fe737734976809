"""The Triton kernels against float64, forward and backward, on every kind of mask."""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from masks import BLOCK, MASKS, attention_in_float64, order_of_blocks
from torch import Tensor

from motet.attention.kernels.backends import TritonBackend
from motet.attention.kernels.device_mask import DeviceMask, device_mask
from motet.attention.masks.interval_mask import IntervalMask


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: DeviceMask) -> Tensor:
        out, saved = TritonBackend().forward((query, key, value), mask, query.shape[-1] ** -0.5)
        ctx.save_for_backward(query, key, value, out, *saved)
        ctx.mask = mask
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, log_sums = ctx.saved_tensors
        scale = out.shape[-1] ** -0.5
        return *TritonBackend().backward(d_out, tuple(inputs), out, (log_sums,), ctx.mask, scale), None


flash_attention = FlashAttention.apply


class Case(NamedTuple):
    kind: str
    order: str
    group: int
    max_tiles: int | None


ALL = list(itertools.starmap(Case, itertools.product(MASKS, ["identity", "reversed", "lpt"], [1, 4], [None, 2])))
IN_TURN = itertools.cycle([("identity", 1, None), ("reversed", 4, None), ("lpt", 1, 2)])
USUAL = [Case(kind, *rest) for kind, rest in zip(list(MASKS)[::2], IN_TURN, strict=False)]
"""One case of every second kind of mask for `make test`."""


def tensors(shape: tuple[int, int, int, int], kv_heads: int, seed: int = 0) -> list[Tensor]:
    """Query, key, value and the gradient of the output, in float64."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, length, dim = shape
    sizes = [heads, kv_heads, kv_heads, heads]
    return [torch.randn(batch, h, length, dim, generator=generator, dtype=torch.float64) for h in sizes]


def check(
    masks: list[IntervalMask], mask: DeviceMask, tokens: np.ndarray, inputs: list[Tensor], tolerance: float
) -> None:
    """Compares output and gradients of permuted tokens; `inputs` are in the order of the sequence."""
    dtype = torch.float32
    *qkv, d_out = inputs
    reference = [tensor.clone().requires_grad_() for tensor in qkv]
    expected = attention_in_float64(*reference, np.stack([m.dense() for m in masks]))
    expected.backward(d_out)
    ours = [tensor[:, :, tokens].to(dtype).requires_grad_() for tensor in qkv]
    out = flash_attention(*ours, mask)
    out.backward(d_out[:, :, tokens].to(dtype))
    pairs = [(out, expected), *((mine.grad, other.grad) for mine, other in zip(ours, reference, strict=True))]
    for mine, other in pairs:
        wanted = other.detach()[:, :, tokens]
        assert wanted.norm() > 0
        error = (mine.double() - wanted).norm() / wanted.norm()
        assert error <= tolerance
    sees_nothing = ~np.stack([m.dense() for m in masks]).any(-1)[:, tokens]
    assert not out.detach().transpose(1, 2)[torch.from_numpy(sees_nothing)].any()
    assert not ours[0].grad.transpose(1, 2)[torch.from_numpy(sees_nothing)].any()


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in USUAL else [pytest.mark.campaign]) for case in ALL],
    ids=lambda case: "-".join(map(str, case)),
)
def test_equals_float64(case: Case) -> None:
    mask = MASKS[case.kind].padded(192)
    blocks = order_of_blocks(case.order, mask)
    tokens = np.concatenate([np.arange(block * BLOCK, (block + 1) * BLOCK) for block in blocks])
    kernel_mask = device_mask([mask], query_blocks=blocks, key_blocks=blocks, block=BLOCK, max_tiles=case.max_tiles)
    check([mask], kernel_mask, tokens, tensors((1, case.group, 192, 16), 1), 2e-6)


def test_orders_differ() -> None:
    orders = {tuple(order_of_blocks(order, MASKS["causal"].padded(192))) for order in ("identity", "reversed", "lpt")}
    assert orders == {(0, 1, 2), (2, 1, 0), (1, 0, 2)}


def test_each_row_of_a_batch_has_its_own_mask() -> None:
    masks = [MASKS["own_item"], MASKS["packed"]]
    mask = device_mask(masks, block=BLOCK, max_tiles=3)
    check(masks, mask, np.arange(150), tensors((2, 2, 150, 8), 2), 2e-6)


@pytest.mark.parametrize("dim", [24, 72, 128])
def test_head_dimensions(dim: int) -> None:
    mask = device_mask([MASKS["gemma_window"]], block=64)
    check([MASKS["gemma_window"]], mask, np.arange(150), tensors((1, 1, 150, dim), 1), 2e-6)


def test_blocks_of_their_real_size() -> None:
    mask = MASKS["own_modality"].padded(256)
    blocks = [1, 0]
    tokens = np.concatenate([np.arange(128, 256), np.arange(128)])
    kernel_mask = device_mask([mask], query_blocks=blocks, key_blocks=blocks)
    check([mask], kernel_mask, tokens, tensors((1, 1, 256, 16), 1), 2e-6)


def test_a_rank_holds_some_queries_and_all_keys() -> None:
    mask = MASKS["block_causal_video"].padded(160)
    blocks = [3, 1]
    query, key, value, d_out = tensors((1, 2, 160, 16), 1)
    tokens = np.concatenate([np.arange(96, 128), np.arange(32, 64)])
    reference = [tensor.clone().requires_grad_() for tensor in (query[:, :, tokens], key, value)]
    expected = attention_in_float64(*reference, mask.dense()[None, tokens])
    expected.backward(d_out[:, :, tokens])
    ours = [tensor.detach().float().requires_grad_() for tensor in reference]
    flash_attention(*ours, device_mask([mask], query_blocks=blocks, block=32)).backward(d_out[:, :, tokens].float())
    for mine, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    mask = MASKS["lambda"]
    inputs = [tensor.to(dtype) for tensor in tensors((1, 2, 150, 16), 2)]
    *qkv, d_out = inputs
    reference = [tensor.double().requires_grad_() for tensor in qkv]
    expected = attention_in_float64(*reference, mask.dense()[None])
    expected.backward(d_out.double())
    ours = [tensor.clone().requires_grad_() for tensor in qkv]
    out = flash_attention(*ours, device_mask([mask], block=BLOCK))
    out.backward(d_out)
    assert out.dtype == ours[0].grad.dtype == dtype
    for mine, other in [(out, expected), *((a.grad, b.grad) for a, b in zip(ours, reference, strict=True))]:
        assert (mine.double() - other).norm() / other.norm() <= tolerance


def test_results_are_the_same_bit_by_bit() -> None:
    mask = device_mask([MASKS["causal"]], block=BLOCK, max_tiles=1)
    query, key, value, d_out = (tensor.float() for tensor in tensors((1, 2, 150, 16), 1))

    def run() -> list[Tensor]:
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        out = flash_attention(*inputs, mask)
        out.backward(d_out)
        return [out.detach(), *(tensor.grad for tensor in inputs)]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 3, 150, 8), (1, 2, 150, 8)), "3 query heads are no multiple of 2 key heads"),
        (((1, 2, 140, 8), (1, 2, 150, 8)), "the mask is not of 1 x 140 queries"),
        (((1, 2, 150, 8), (1, 2, 151, 8)), "the mask is not of 1 x 151 keys"),
        (((1, 2, 150, 512), (1, 2, 150, 512)), "head dimension 512 is above 256"),
    ],
)
def test_shapes_that_do_not_fit(shapes: tuple[tuple[int, ...], tuple[int, ...]], message: str) -> None:
    query, key = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        flash_attention(query, key, key, device_mask([MASKS["causal"]], block=BLOCK))
