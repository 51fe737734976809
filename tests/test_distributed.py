import os
import time

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed


def _sum(rank: int, factor: float) -> float:
    value = torch.tensor([rank * factor])
    dist.all_reduce(value)
    return value.item()


def test_results_come_in_rank_order() -> None:
    offset = 10  # a closure: nothing is pickled on the way in
    assert run_distributed(lambda rank: rank + offset, 3) == [10, 11, 12]


def test_ranks_communicate() -> None:
    assert run_distributed(_sum, 3, 2.0) == [6.0, 6.0, 6.0]


def test_failure_carries_traceback() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise KeyError("here")
        dist.barrier()

    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed.*KeyError: 'here'"):
        run_distributed(fail, 2)


def test_timeout_names_silent_ranks() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        run_distributed(lambda rank: time.sleep(60 * rank), 2, timeout=1.0)


def test_tensors_survive_their_process() -> None:
    results = run_distributed(lambda rank: torch.full((100_000,), rank), 2)
    assert [result.sum().item() for result in results] == [0, 100_000]


def test_death_is_noticed() -> None:
    with pytest.raises(AssertionError, match="rank 1 failed:\nit died without a word"):
        run_distributed(lambda rank: os._exit(3) if rank else None, 2)
