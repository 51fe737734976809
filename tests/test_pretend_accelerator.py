"""The pretend accelerator: what it refuses, what it counts, and that it computes like a CPU."""

import pytest
import torch
from pretend_accelerator import PretendTensor, counted, on_accelerator
from torch import nn

from motet.devices import HostCopy, current_device, to_device


def test_devices_are_not_mixed_and_numbers_are_real():
    def work(rank: int, device: torch.device) -> list[float]:
        there = torch.arange(4.0, device=device)
        assert there.device == device == current_device()
        with pytest.raises(RuntimeError, match="same device"):
            _ = there + torch.ones(4)
        with pytest.raises(RuntimeError, match="same device"):
            _ = there[torch.tensor([1, 2])]
        with pytest.raises(TypeError, match="no memory on the host"):
            there.numpy()
        return (there * 2.0 + torch.tensor(1.0)).tolist()

    assert on_accelerator(work) == [[1.0, 3.0, 5.0, 7.0]]


def test_what_the_host_waits_for_is_counted_with_its_place():
    def work(rank: int, device: torch.device) -> None:
        there = torch.arange(6.0, device=device)
        wanted = {
            "local_scalar_dense": lambda: bool(there.sum() > 3),
            "copy to the host": there.cpu,
            "boolean index": lambda: there[there > 2],
            "nonzero": there.nonzero,
            "copy from pageable memory": lambda: torch.ones(3).to(device, non_blocking=True),
            "copy from pinned memory, waited for": lambda: torch.ones(3).pin_memory().to(device),
            "repeat_interleave": lambda: torch.repeat_interleave(torch.ones(6, dtype=torch.long, device=device)),
        }
        for kind, action in wanted.items():
            with counted() as found:
                action()
            assert {kind: 1} == {name: number for (name, _), number in found.items()}, (kind, found)
            assert all("test_pretend_accelerator.py:" in place for _, place in found), found
        with counted() as found:
            to_device(torch.arange(6), device)
            there.masked_fill(there > 2, 0.0).repeat_interleave(2).index_select(0, torch.zeros_like(there).long())
        assert not found

    on_accelerator(work)


def test_values_on_their_way_to_the_host_are_wrong_until_somebody_waits():
    def work(rank: int, device: torch.device) -> None:
        there = torch.tensor([1.0, 2.0]).to(device)
        host = torch.empty(2, pin_memory=True)
        with counted() as found:
            host.copy_(there, non_blocking=True)
            copied = HostCopy(there)
            there += 5.0
        assert not found
        assert host.isnan().all()
        assert copied.read().tolist() == [1.0, 2.0]
        assert host.tolist() == [1.0, 2.0]

    on_accelerator(work)


def test_modules_keep_their_ties_and_learn_as_on_a_cpu():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 5, dtype=torch.float64), nn.Linear(5, 7, dtype=torch.float64)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.gelu(self.embed(ids))).logsumexp(-1).sum()

    def work(rank: int, device: torch.device) -> None:
        torch.manual_seed(0)
        here, there = Tied(), Tied()
        there.load_state_dict(here.state_dict())
        there.to(device)
        assert there.head.weight is there.embed.weight
        assert isinstance(there.head.weight, PretendTensor)
        ids = torch.tensor([1, 4, 4])
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in (here, there)]
        for _ in range(2):
            for model, optimizer, own in zip((here, there), optimizers, (ids, to_device(ids, device)), strict=True):
                optimizer.zero_grad()
                model(own).backward()
                optimizer.step()
        for expected, found in zip(here.parameters(), there.parameters(), strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)

    on_accelerator(work)


def test_ranks_exchange_tensors_of_the_accelerator():
    def work(rank: int, device: torch.device) -> None:
        own = torch.full((2,), 1.0 + rank, device=device)
        waited = torch.distributed.all_reduce(own, async_op=True)
        waited.wait()
        parts = [torch.zeros(2, device=device) for _ in range(2)]
        torch.distributed.all_gather(parts, own + rank)
        assert [part.tolist() for part in parts] == [[3.0, 3.0], [4.0, 4.0]]

    on_accelerator(work, 2)


def test_what_a_hook_raises_comes_out_of_the_backward_pass():
    def work(rank: int, device: torch.device) -> None:
        def refuse(_: torch.Tensor) -> None:
            raise ValueError("no")

        there = torch.ones(3, device=device, requires_grad=True)
        there.register_post_accumulate_grad_hook(refuse)
        with pytest.raises(ValueError, match="no"):
            there.sum().backward()
        doubled = there * 2
        doubled.register_hook(refuse)
        with pytest.raises(ValueError, match="no"):
            torch.autograd.grad(doubled.sum(), there)

    on_accelerator(work)
