"""What another thread can end."""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from distributed import run_distributed

from motet.resilience.interruptible_wait import Connections
from motet.resilience.recover import leave_world

NEVER = timedelta(minutes=5)
"""Longer than the test may take."""


class HaltingStore(dist.Store):
    """Halts whoever has told its address and is about to ask for those of others, until all is over."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta = NEVER) -> None:
        self._inner.wait(["over"], NEVER)
        raise RuntimeError("halted")


@pytest.mark.parametrize("waiting_rank", [0, 1])
def test_waiting_for_a_rank_that_does_not_connect(tmp_path: Path, waiting_rank: int) -> None:
    """Either one may be the one that listens. Both can meet again."""

    def work(rank: int) -> int:
        dist.barrier()  # Nobody leaves before all have come.
        leave_world()
        store = dist.FileStore(str(tmp_path / "store"), 2)
        if rank != waiting_rank:
            with pytest.raises(RuntimeError, match="halted"):
                dist.init_process_group("gloo", store=HaltingStore(store), rank=rank, world_size=2)
            return meet_again(store, rank)
        connections = Connections()

        def end() -> None:
            while not store.check(["over"]):
                connections.shut_down(num_ranks=2)

        ender = threading.Thread(target=end)
        ender.start()
        with pytest.raises(RuntimeError):
            meet(store, rank)
        store.set("over", "")
        ender.join()
        return meet_again(store, rank)

    def meet(store: dist.Store, rank: int) -> None:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=NEVER)
        dist.barrier()

    def meet_again(store: dist.Store, rank: int) -> int:
        leave_world()
        meet(dist.PrefixStore("again", store), rank)
        return dist.get_world_size()

    assert run_distributed(work, 2) == [2, 2]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_are_bounded(tmp_path: Path) -> None:
    """However often waits are ended, and however many worlds are left."""

    def work(rank: int) -> tuple[int, int]:
        dist.barrier()
        leave_world()
        store = dist.FileStore(str(tmp_path / "store"), 2)
        connections, most = Connections(), 0
        before = num_descriptors()
        for generation in range(6):
            world = dist.PrefixStore(str(generation), store)
            dist.init_process_group("gloo", store=world, rank=rank, world_size=2, timeout=NEVER)
            dist.new_group([0, 1])
            with suppress(RuntimeError):  # The other one may be ahead.
                dist.barrier()
            for _ in range(100):
                connections.shut_down(num_ranks=2)
            most = max(most, num_descriptors() - before)
            leave_world()
        while num_descriptors() > before:
            time.sleep(0.01)
        left = num_descriptors() - before
        dist.init_process_group("gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=2)
        return most, left

    for most, left in run_distributed(work, 2):
        assert (
            most < 200
        )  # 100 times 2 connections to each of two listeners, were they kept; groups go in their own time.
        assert left <= 0
