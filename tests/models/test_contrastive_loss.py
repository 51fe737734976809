"""Blocks of similarities against the losses as their papers write them, over whole matrices."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from motet.models import contrastive_loss
from motet.models.contrastive_loss import LossKind, Similarity, gradients, values


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
    st.integers(0, 9),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_shares_of_the_rows_make_the_whole(
    kind: LossKind, num_samples: int, width: int, cut: int, rows_per_block: int, both: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, y = (torch.randn(num_samples, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scale, bias = (torch.randn((), dtype=torch.float64).exp().requires_grad_() for _ in range(2))
    expected = whole_loss(kind, x, y, scale, bias)
    expected.backward()
    bounds = [0, num_samples, num_samples] if both else [0, min(cut, num_samples), num_samples]

    def similarity(rows: Tensor, columns: Tensor, first: int, last: int) -> Similarity:
        return Similarity(
            rows.detach()[first:last], columns.detach(), torch.arange(first, last), scale.item(), bias.item()
        )

    with mock.patch.object(contrastive_loss, "BLOCK_BYTES", rows_per_block * num_samples * 8):
        shares = [(bounds[i], bounds[i + 1]) for i in range(2) if bounds[i] < bounds[i + 1]]
        there = [values(kind, similarity(x, y, *share), both=both) for share in shares]
        back = [values(kind, similarity(y, x, *share)) for share in shares]
        loss = sum(v.loss for v in there)
        if kind == "softmax" and not both:
            loss = loss + sum(v.loss for v in back)
        torch.testing.assert_close(loss, expected.detach())
        lse, other = (torch.cat([v.lse for v in direction]) for direction in (there, back))
        if both and kind == "softmax":
            torch.testing.assert_close(there[0].column_lse, other)
        found = [
            gradients(kind, similarity(x, y, a, b), lse[a:b] if kind == "softmax" else lse, other, both=both)
            for a, b in shares
        ]
    torch.testing.assert_close(torch.cat([g.rows for g in found]), x.grad)
    torch.testing.assert_close(sum(g.scale for g in found), scale.grad)
    torch.testing.assert_close(sum(g.bias for g in found), torch.zeros_like(bias) if bias.grad is None else bias.grad)
    if both:
        torch.testing.assert_close(found[0].columns, y.grad)


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("both", [False, True])
def test_nobody_holds_more_than_a_block(kind: LossKind, both: bool) -> None:
    num_samples, rows_per_block = 64, 4
    x, y = (torch.randn(num_samples, 8) for _ in range(2))
    similarity = Similarity(x, y, torch.arange(num_samples), 10.0, -1.0)
    with mock.patch.object(contrastive_loss, "BLOCK_BYTES", rows_per_block * num_samples * 4), _Largest() as largest:
        found = values(kind, similarity, both=both)
        other = found.lse if found.column_lse is None else found.column_lse
        gradients(kind, similarity, found.lse, other, both=both)
    assert largest.elements == max(rows_per_block * num_samples, num_samples * 8)


def test_features_far_apart_stay_finite() -> None:
    """Similarities of 1e4 would overflow an exponential that does not take the largest out."""
    x = torch.tensor([[100.0, 0.0], [0.0, 100.0], [-100.0, 0.0]])
    found = values("softmax", Similarity(x, x, torch.arange(3), 1.0, 0.0), both=True)
    assert found.loss.item() == 0.0
    assert found.column_lse is not None
    assert torch.equal(found.lse, found.column_lse)
