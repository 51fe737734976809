"""`gather_beside_death.py FOLDER`: what becomes of a gather that fails while a peer still sends, with
`halt_after_free.c` preloaded.

Rank 1 gathers. Rank 2, to which it sends, dies, so its gather fails. Only then rank 0, from which it receives, sends.
Rank 1's memory is released last, and with it the threads of its group. With MAKE_SAFE in the environment gathers are
those of `motet.resilience.safe_gathers`.
"""

import multiprocessing
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from waiting import wait_until

from motet.resilience.safe_gathers import make_gathers_safe

NUM_RANKS = 3
NUMBERS = 8
"""Of each rank, of 8 bytes."""
GATHERED_BYTES = NUM_RANKS * NUMBERS * 8


def act(rank: int, folder: Path) -> None:
    def wait_for(*names: str) -> None:
        wait_until(lambda: any((folder / name).exists() for name in names), f"rank {rank}: none of {names}")

    def gather() -> list[Tensor]:
        everyone = [torch.zeros(NUMBERS, dtype=torch.int64) for _ in range(NUM_RANKS)]
        dist.all_gather(everyone, torch.full((NUMBERS,), rank + 1))
        return everyone

    with make_gathers_safe() if "MAKE_SAFE" in os.environ else nullcontext():
        store = dist.FileStore(str(folder / "store"), NUM_RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
        assert [int(each[0]) for each in gather()] == [1, 2, 3]
        (folder / f"ready{rank}").touch()
        if rank == 0:
            os.environ["HALT_LISTENS"] = "1"
            wait_for("halted", "failed1")
        elif rank == 1:
            wait_for("ready0")
            wait_for("ready2")
            (folder / "armed").touch()
        else:
            wait_for("heard")  # Rank 1 tells rank 0 that it receives.
            os._exit(0)
        try:
            gather()
        except RuntimeError:
            (folder / f"failed{rank}").touch()
        if rank == 0:
            wait_for("failed1", "written")
            (folder / "go").touch()
        else:
            wait_for("go")
            dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=act, args=(rank, Path(sys.argv[1])), daemon=True) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print([process.exitcode for process in processes])
