from typing import Any

import pytest
import torch
from distributed import run_distributed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from motet.parallel.tensor import vocab_parallel
from motet.parallel.tensor.tensor_collectives import TensorParallel
from motet.parallel.tensor.vocab_parallel import cross_entropy_sum, shard_embedding, shard_head, vocabulary_group


def logits_and_labels(scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, 12, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(0, 12, (2, 7), generator=generator)
    labels[0, :3] = -100
    labels[1, 0], labels[1, 1] = 0, 11
    return logits.to(dtype), labels


@pytest.mark.parametrize("scale", [1.0, 400.0])  # the second overflows unless the largest logit is taken off
@pytest.mark.parametrize("tp_size", [2, 3])
def test_cross_entropy_equals(scale: float, tp_size: int) -> None:
    def compare(rank: int) -> None:
        logits, labels = logits_and_labels(scale, torch.float64)
        whole = logits.clone().requires_grad_()
        expected = cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum")
        (3 * expected).backward()
        assert whole.grad is not None
        part = logits.chunk(tp_size, -1)[rank].clone().requires_grad_()
        loss = cross_entropy_sum(part, labels, TensorParallel(None, rank, tp_size))
        (3 * loss).backward()
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(part.grad, whole.grad.chunk(tp_size, -1)[rank], rtol=1e-12, atol=1e-13)

    run_distributed(compare, tp_size)


def test_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """14 rows of 12 logits, three at a time."""
    logits, labels = logits_and_labels(1.0, torch.float64)
    found = []
    for num_elements in (vocab_parallel.CHUNK_ELEMENTS, 40):
        monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", num_elements)
        own = logits.clone().requires_grad_()
        loss = cross_entropy_sum(own, labels, None)
        loss.backward()
        found.append((loss, own.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-15, atol=1e-15)


class Sizes(TorchDispatchMode):
    """The largest tensor of float32 that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.largest = max(self.largest, tensor.numel())
        return result


def test_bfloat16_logits_are_never_whole_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", 40)
    logits, labels = logits_and_labels(1.0, torch.bfloat16)
    own = logits.requires_grad_()
    with Sizes() as sizes:
        cross_entropy_sum(own, labels, None).backward()
    assert 0 < sizes.largest <= 40


def test_cross_entropy_without_loss_tokens_is_zero() -> None:
    def run(rank: int) -> tuple[float, float]:
        logits, labels = logits_and_labels(1.0, torch.float32)
        part = logits.chunk(2, -1)[rank].clone().requires_grad_()
        loss = cross_entropy_sum(part, torch.full_like(labels, -100), TensorParallel(None, rank, 2))
        loss.backward()
        assert part.grad is not None
        return loss.item(), part.grad.abs().sum().item()

    assert run_distributed(run, 2) == [(0.0, 0.0)] * 2


def test_bfloat16_logits_are_summed_in_float32() -> None:
    def run(rank: int) -> None:
        logits, labels = logits_and_labels(1.0, torch.bfloat16)
        expected = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        part = logits.chunk(2, -1)[rank].clone().requires_grad_()
        loss = cross_entropy_sum(part, labels, TensorParallel(None, rank, 2))
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(cross_entropy_sum(logits, labels, None), expected)
        loss.backward()
        assert part.grad is not None
        assert part.grad.dtype == torch.bfloat16

    run_distributed(run, 2)


def test_embedding_of_padding_token_has_no_gradient_on_its_holder_only() -> None:
    def run(rank: int) -> Any:
        tp = TensorParallel(None, rank, 2)
        whole = nn.Embedding(6, 4, padding_idx=4).double()
        nn.init.normal_(whole.weight, generator=torch.Generator().manual_seed(0))
        part = nn.Embedding(6, 4, padding_idx=4).double()
        part.weight = nn.Parameter(whole.weight.detach().chunk(2)[rank].clone())
        shard_embedding(part, tp)
        ids = torch.tensor([[0, 4, 1], [4, 5, 5]])
        weights = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        (whole(ids) * weights).sum().backward()
        (part(ids) * weights).sum().backward()
        assert whole.weight.grad is not None
        assert part.weight.grad is not None
        torch.testing.assert_close(part(ids), whole(ids))
        torch.testing.assert_close(part.weight.grad, whole.weight.grad.chunk(2)[rank])
        return part.padding_idx

    assert run_distributed(run, 2) == [None, 1]


def test_head_knows_its_group() -> None:
    head = nn.Linear(4, 3, bias=False)
    assert vocabulary_group(head) is None
    tp = TensorParallel(None, 0, 2)
    shard_head(head, tp)
    assert vocabulary_group(head) is tp
