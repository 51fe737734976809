"""Attention over a context-parallel group against the whole sequence on one rank, in float64."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from masks import MASKS, attention_in_float64
from sampling import in_campaigns

from motet.attention.kernels.backends import backend_for
from motet.attention.masks.distribution import check_ulysses, distribute
from motet.attention.masks.tile_counts import tile_counts
from motet.errors import UserError
from motet.parallel.context import context_attention as context_parallel
from motet.parallel.context.context_attention import ContextParallel, SharedAttention
from motet.plan import ContextOptions

HEADS, KEY_HEADS, DIM = 12, 6, 4
METHODS = ("all_gather", "ulysses", "ring")
KINDS = ("own_item", "gemma_window", "padding")


def tensors(length: int) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(1, heads, length, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    ]


def attend_on_rank(rank: int, kind: str, size: int, block_size: int, method: Any, num_tokens: int) -> dict[str, Any]:
    mask = MASKS[kind]
    cp = ContextParallel(
        dist.group.WORLD, rank, size, ContextOptions(block_size=block_size, method=method), head_groups=3
    )
    workloads = tile_counts(mask, block_size).pairs
    distribution = distribute(workloads, size, num_tokens=num_tokens, block_size=block_size, allow_empty=True)
    shared = SharedAttention(mask, distribution, cp, backend_for(torch.device("cpu")), torch.device("cpu"))
    tokens = distribution.tokens_of(rank)
    query, key, value, d_out = (tensor[:, :, tokens] for tensor in tensors(num_tokens))
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    out = shared(*leaves, DIM**-0.5)
    out.backward(d_out)
    received = sum(len(blocks) for blocks in shared.received_blocks)
    return {
        "tokens": tokens,
        "results": [out.detach(), *(leaf.grad for leaf in leaves)],
        "received_blocks": received,
        "num_local": shared.num_local_tokens,
    }


def check(kind: str, size: int, block_size: int, method: Any) -> list[dict[str, Any]]:
    allowed = MASKS[kind].dense()
    *qkv, d_out = tensors(len(allowed))
    leaves = [tensor.requires_grad_() for tensor in qkv]
    expected = attention_in_float64(*leaves, allowed[None])
    expected.backward(d_out)
    wanted = [expected.detach(), *(leaf.grad for leaf in leaves)]
    ranks = run_distributed(partial(attend_on_rank), size, kind, size, block_size, method, len(allowed))
    assert sorted(np.concatenate([rank["tokens"] for rank in ranks]).tolist()) == list(range(len(allowed)))
    for rank in ranks:
        for ours, whole in zip(rank["results"], wanted, strict=True):
            torch.testing.assert_close(ours, whole[:, :, rank["tokens"]], atol=1e-10, rtol=1e-10)
    return ranks


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("causal", method) for method in METHODS),
        *zip(KINDS, METHODS, strict=True),
        *in_campaigns((KINDS[i], METHODS[i - j]) for i in range(3) for j in (1, 2)),
    ],
)
def test_equals_one_rank(kind: str, method: Any) -> None:
    check(kind, 3, 16, method)


@pytest.mark.parametrize("kind", ["causal", *in_campaigns(["own_item", "gemma_window", "padding"])])
def test_pairs_that_trade_heads_in_a_ring_equal_one_rank(kind: str) -> None:
    check(kind, 4, 16, "hybrid")


def attend_with_sinks(rank: int, method: Any) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """This rank's tokens, its output, and its share of the gradient of the sinks."""
    mask = MASKS["causal"]
    cp = ContextParallel(dist.group.WORLD, rank, 2, ContextOptions(block_size=16, method=method))
    distribution = distribute(tile_counts(mask, 16).pairs, 2, num_tokens=150, block_size=16)
    shared = SharedAttention(mask, distribution, cp, backend_for(torch.device("cpu")), torch.device("cpu"))
    tokens = distribution.tokens_of(rank)
    query, key, value, d_out = (tensor[:, :, tokens] for tensor in tensors(150))
    sinks = torch.linspace(-2, 3, HEADS, dtype=torch.float64).requires_grad_()
    out = shared(query, key, value, DIM**-0.5, sinks)
    out.backward(d_out)
    assert sinks.grad is not None
    return tokens, out.detach(), sinks.grad


@pytest.mark.parametrize("method", ["ring", *in_campaigns(["all_gather", "ulysses", "hybrid"])])
def test_sinks_are_a_column_of_the_softmax(method: Any) -> None:
    query, key, value, d_out = tensors(150)
    sinks = torch.linspace(-2, 3, HEADS, dtype=torch.float64).requires_grad_()
    wide_key, wide_value = (tensor.repeat_interleave(HEADS // KEY_HEADS, 1) for tensor in (key, value))
    scores = query @ wide_key.mT * DIM**-0.5
    scores = scores.masked_fill(~torch.from_numpy(MASKS["causal"].dense()), float("-inf"))
    weights = torch.cat([scores, sinks[None, :, None, None].expand(1, -1, 150, 1)], -1).softmax(-1)
    expected = weights[..., :-1] @ wide_value
    expected.backward(d_out)
    ranks = run_distributed(attend_with_sinks, 2, method)
    for tokens, out, _ in ranks:
        torch.testing.assert_close(out, expected.detach()[:, :, tokens], atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(sum(d_sinks for _, _, d_sinks in ranks), sinks.grad, atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("method", ["all_gather", "ulysses", "ring"])
def test_a_rank_without_tokens(method: Any) -> None:
    ranks = check("causal", 3, 80, method)
    assert sorted(rank["num_local"] for rank in ranks) == [0, 70, 80]


def test_only_blocks_that_are_seen_travel() -> None:
    # A window of 30 tokens and 4 at the start: the rest of what stands before is not sent.
    received = [rank["received_blocks"] for rank in check("lambda", 4, 8, "all_gather")]
    allowed = np.zeros((152, 152), bool)
    allowed[:150, :150] = MASKS["lambda"].dense()
    tiles = allowed.reshape(19, 8, 19, 8).any((1, 3))
    workloads = tile_counts(MASKS["lambda"], 8).pairs
    distribution = distribute(workloads, 4, num_tokens=150, block_size=8)
    assert received == [int(tiles[distribution.blocks_of(rank)].any(0).sum()) for rank in range(4)]
    assert sum(received) < 4 * 19


def test_ulysses_needs_whole_heads() -> None:
    with pytest.raises(UserError, match="ulysses cannot divide 6 key heads by 4 ranks"):
        check_ulysses(12, 6, 4)
    check_ulysses(12, 6, 3)


def attend_with_kernels(rank: int, backend: Any, method: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    mask, device = MASKS["own_item"], torch.device("cpu")
    cp = ContextParallel(dist.group.WORLD, rank, 2, ContextOptions(block_size=32, method=method))
    distribution = distribute(tile_counts(mask, 32).pairs, 2, num_tokens=150, block_size=32)
    shared = SharedAttention(mask, distribution, cp, backend_for(device, backend), device)
    tokens = distribution.tokens_of(rank)
    heads = [slice(0, 4), slice(0, 2), slice(0, 2), slice(0, 4)]  # Two portions of heads.
    query, key, value, d_out = (t[:, h][:, :, tokens].to(dtype) for t, h in zip(tensors(150), heads, strict=True))
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    out = shared(*leaves, DIM**-0.5)
    out.backward(d_out)
    return [out.detach().double(), *(leaf.grad.double() for leaf in leaves)]


@pytest.mark.parametrize("method", ["all_gather", *in_campaigns(["ring"])])
def test_the_kernels_compute_what_dense_attention_does(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tiles of long rows shared out, over the keys of both ranks."""
    monkeypatch.setattr(context_parallel, "MOST_TILES_OF_A_TASK", 2)
    dense = run_distributed(attend_with_kernels, 2, "dense", method, torch.float64)
    kernels = run_distributed(attend_with_kernels, 2, "triton", method, torch.float32)
    for mine, other in zip(kernels, dense, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert b.norm() > 0
            assert (a - b).norm() / b.norm() < 2e-6
