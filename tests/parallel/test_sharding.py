import torch
from distributed import run_distributed
from hypothesis import given
from hypothesis import strategies as st

from motet.parallel.tensor.tensor_collectives import TensorParallel, gather_full, shard_parameter, unshard
from motet.parallel.tensor.tensor_plans import Shard


@given(
    sections=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    unit=st.integers(1, 3),
    tp_size=st.integers(1, 4),
    dim=st.integers(0, 1),
)
def test_unshard_is_the_inverse(sections: list[int], unit: int, tp_size: int, dim: int) -> None:
    size = sum(sections) * unit * tp_size
    full = torch.arange(size * 3.0).view(size, 3) if dim == 0 else torch.arange(size * 3.0).view(3, size)
    shard = Shard(dim, tuple(sections))
    parts = [shard_parameter(full, shard, rank, tp_size) for rank in range(tp_size)]
    assert all(part.shape[dim] == size // tp_size for part in parts)
    assert torch.equal(unshard(parts, shard), full)


def test_sections_are_cut_each_by_itself() -> None:
    fused = torch.tensor([0, 1, 2, 3, 10, 11, 20, 21])  # queries | keys | values
    assert shard_parameter(fused, Shard(0, (2, 1, 1)), 1, 2).tolist() == [2, 3, 11, 21]


def test_whole_parameters_are_copied() -> None:
    full = torch.ones(3)
    part = shard_parameter(full, None, 1, 2)
    part += 1
    assert full.tolist() == [1, 1, 1]
    assert unshard([part, part], None).tolist() == [2, 2, 2]


def test_parts_do_not_keep_the_whole_alive() -> None:
    full = torch.ones(8, 2)
    for shard in (Shard(0), Shard(1)):
        assert shard_parameter(full, shard, 0, 2).untyped_storage().nbytes() == full.nbytes // 2


def test_gather_full() -> None:
    full = torch.arange(24.0).view(4, 6)

    def gather(rank: int) -> list[torch.Tensor]:
        tp = TensorParallel(None, rank, 2)
        shards = (Shard(0), Shard(1), Shard(1, (2, 1)), None)
        return [gather_full(shard_parameter(full, shard, rank, 2), shard, tp) for shard in shards]

    for results in run_distributed(gather, 2):
        assert all(torch.equal(result, full) for result in results)
