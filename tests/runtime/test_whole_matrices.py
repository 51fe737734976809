"""Optimizers that look at whole matrices are refused on parts of them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from motet.errors import UserError
from motet.runtime.whole_matrices import watch_optimizers


class MyShampoo(torch.optim.SGD):
    """Called as those are that look at whole matrices."""


def test_parts_are_refused() -> None:
    part, whole = (nn.Parameter(torch.eye(4)) for _ in range(2))
    held = [
        SimpleNamespace(parameter=part, name="llm.module.weight", shard=object(), rows=None),
        SimpleNamespace(parameter=whole, name="llm.module.other", shard=None, rows=None),
    ]
    watch_optimizers(held)  # type: ignore[arg-type]
    for parameter in (part, whole):
        parameter.grad = torch.ones(4, 4)
    for made in (torch.optim.Muon([part], lr=0.1), MyShampoo([whole, part], lr=0.1), torch.optim.LBFGS([part])):
        with pytest.raises(UserError, match=r"^optimizer: \w+ needs whole .* a part of llm\.module\.weight"):
            made.step(lambda: torch.zeros(()))
    torch.testing.assert_close(part.detach(), torch.eye(4))
    torch.optim.Muon([whole], lr=0.1).step()
    torch.optim.AdamW([part, whole], lr=0.1).step()
    assert not torch.equal(part.detach(), torch.eye(4))
