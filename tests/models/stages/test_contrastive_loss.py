"""Blocks of similarities against the losses as their papers write them, over whole matrices."""

import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling import in_campaigns
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from motet.models.stages import contrastive as contrastive_loss
from motet.models.stages.contrastive import LossKind, Similarity, gradients, values


def whole_loss(kind: LossKind, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Summed over the samples."""
    logits = scale * x @ y.T + bias
    own = torch.arange(len(x))
    if kind == "softmax":
        both = (
            functional.cross_entropy(logits, own, reduction="sum"),
            functional.cross_entropy(logits.T, own, reduction="sum"),
        )
        return (both[0] + both[1]) / 2
    signs = 2 * torch.eye(len(x), dtype=x.dtype) - 1
    return -functional.logsigmoid(signs * logits).sum()


@given(
    st.sampled_from(["softmax", "sigmoid"]),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 20),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_shares_of_the_rows_make_the_whole(
    kind: LossKind, num_samples: int, width: int, block: int, both: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, y = (torch.randn(num_samples, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scale, bias = (torch.randn((), dtype=torch.float64).exp().requires_grad_() for _ in range(2))
    expected = whole_loss(kind, x, y, scale, bias)
    expected.backward()
    first = torch.rand(num_samples) < 0.5 if not both else torch.ones(num_samples, dtype=torch.bool)
    shares = [places for mask in (first, ~first) if len(places := mask.nonzero()[:, 0])]

    def similarity(rows: Tensor, columns: Tensor, places: Tensor) -> Similarity:
        return Similarity(rows.detach()[places], columns.detach(), places.numpy(), scale.detach(), bias.detach())

    with mock.patch.object(contrastive_loss, "BLOCK_BYTES", block * 8):
        there = [values(kind, similarity(x, y, places), both=both) for places in shares]
        back = [values(kind, similarity(y, x, places)) for places in shares]
        loss = sum(v.loss for v in there)
        if kind == "softmax" and not both:
            loss = loss + sum(v.loss for v in back)
        torch.testing.assert_close(loss, expected.detach())
        order = torch.cat(shares).argsort()
        lse, other = torch.zeros(2, 0, dtype=x.dtype)
        if kind == "softmax":
            lse, other = (torch.cat([v.lse for v in direction])[order] for direction in (there, back))
            if both:
                torch.testing.assert_close(there[0].column_lse, other)
        found = [
            gradients(kind, similarity(x, y, places), lse[places] if len(lse) else lse, other, both=both)
            for places in shares
        ]
    torch.testing.assert_close(torch.cat([g.rows for g in found])[order], x.grad)
    torch.testing.assert_close(sum(g.scale for g in found), scale.grad)
    torch.testing.assert_close(sum(g.bias for g in found), torch.zeros_like(bias) if bias.grad is None else bias.grad)
    if both:
        torch.testing.assert_close(found[0].columns, y.grad)


class _Live(TorchDispatchMode):
    """The most elements that tensors made under it held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._tensors: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._tensors.append(weakref.ref(out))
        alive = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // 4 for tensor in alive}
        self.most = max(self.most, sum(held.values()))
        return out


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("softmax", 1), ("softmax", 8), ("sigmoid", 2), *in_campaigns([("softmax", 2), ("sigmoid", 1), ("sigmoid", 8)])],
)
def test_nobody_holds_more_than_a_block(kind: LossKind, num_ranks: int) -> None:
    """Beside features, their gradients and some numbers a sample: one block and what is computed from it, while a
    rank's share of the similarities has 100 times as many elements and more."""
    num_samples, width, block = {1: 160, 2: 256, 8: 512}[num_ranks], 2, 16 * 16
    num_rows, both = num_samples // num_ranks, num_ranks == 1
    x, y = torch.randn(num_rows, width), torch.randn(num_samples, width)
    similarity = Similarity(x, y, np.arange(num_rows), torch.tensor(10.0), torch.tensor(-1.0))
    with mock.patch.object(contrastive_loss, "BLOCK_BYTES", block * 4):
        with _Live() as forward:
            found = values(kind, similarity, both=both)
        other = torch.zeros(num_samples) if found.column_lse is None else found.column_lse
        with _Live() as backward:
            gradients(kind, similarity, found.lse, other, both=both)
    assert num_rows * num_samples >= 100 * block
    for live in (forward, backward):
        assert 2 * block <= live.most <= 2 * block + (2 * width + 3) * (num_rows + num_samples)


def test_features_far_apart_stay_finite() -> None:
    """Similarities of 1e4 would overflow an exponential that does not take the largest out."""
    x = torch.tensor([[100.0, 0.0], [0.0, 100.0], [-100.0, 0.0]])
    found = values("softmax", Similarity(x, x, np.arange(3), torch.tensor(1.0), None), both=True)
    assert found.loss.item() == 0.0
    assert found.column_lse is not None
    assert torch.equal(found.lse, found.column_lse)
