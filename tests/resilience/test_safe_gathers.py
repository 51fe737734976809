"""Gathers that fail without harm."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import gather_beside_death
import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from gather_beside_death import GATHERED_BYTES
from interrupted_training import at, config_of, die, train_and, undisturbed

from motet.resilience.safe_gathers import make_gathers_safe

SUPPORT = Path(gather_beside_death.__file__).parent


@pytest.mark.skipif(shutil.which("cc") is None, reason="halts a thread by a library that it has to compile")
@pytest.mark.parametrize("is_safe", [True, False])
def test_memory_that_a_failed_gather_frees(tmp_path: Path, is_safe: bool) -> None:
    """torch's own is written into. When this is no longer so, `motet.resilience.safe_gathers` may go."""
    library = tmp_path / "halt_after_free.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", SUPPORT / "halt_after_free.c", "-o", library], check=True)
    variables = {
        "LD_PRELOAD": str(library),
        "HALT_FOLDER": str(tmp_path),
        "HALT_BYTES": str(GATHERED_BYTES),
        **({"MAKE_SAFE": "1"} if is_safe else {}),
    }
    command = [sys.executable, SUPPORT / "gather_beside_death.py", tmp_path]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert (tmp_path / "written").exists() is not is_safe, ended.stderr
    if is_safe:
        assert ended.stdout == "[0, 0, 0]\n", ended.stderr


@contextmanager
def without_torchs_own() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise AssertionError("torch's gather over gloo")

    with ExitStack() as stack:
        for name in ("allgather", "all_gather_single", "gather"):
            stack.enter_context(patch.object(dist.ProcessGroup, name, fail))
        yield


def test_trainings_that_survive_losses_use_no_other(tmp_path: Path) -> None:
    """In recoveries, steps and checkpoints."""
    config = config_of(tmp_path, train__checkpoint_every=2)
    with without_torchs_own():
        result = train_and(config, at(2, 3, die))
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)


VALUES = [
    torch.tensor([-0.0, float("nan"), 1e-310, float("inf")], dtype=torch.float64),
    torch.tensor([[1.5], [-2.5]], dtype=torch.bfloat16),
    torch.tensor([True, False, True]),
    torch.tensor(2**62 + 1),
    torch.arange(12, dtype=torch.int32).reshape(3, 4).T,
    torch.tensor([1 + 2j]),
    torch.zeros(0, 5),
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("values", VALUES, ids=lambda values: str(values.dtype).removeprefix("torch."))
def test_what_is_gathered(values: torch.Tensor) -> None:
    """The bits of all ranks, without any of torch's gathers over gloo."""

    def work(rank: int) -> list[list[bytes]]:
        mine = values.roll(rank) if values.dim() else values
        apart = [torch.ones_like(mine.contiguous()) for _ in range(3)]
        together = mine.new_ones(3, *mine.shape)
        later = mine.new_ones(3, *mine.shape)
        at_one = [torch.ones_like(mine.contiguous()) for _ in range(3)] if rank == 1 else None
        objects: list[object] = [None] * 3
        with without_torchs_own(), make_gathers_safe():
            dist.all_gather(apart, mine)
            dist.all_gather_into_tensor(together, mine.contiguous())
            work = dist.all_gather_into_tensor(later, mine.contiguous(), async_op=True)
            dist.gather(mine, at_one, group_dst=1)
            dist.all_gather_object(objects, rank)
            assert work is not None
            work.wait()
        assert objects == [0, 1, 2]
        return [[bits(one) for one in gathered] for gathered in (apart, together, later, at_one or apart)]

    expected = [bits(values.roll(rank) if values.dim() else values) for rank in range(3)]
    for rank in run_distributed(work, 3):
        assert rank == [expected] * 4


def test_outputs_are_written_once_and_must_fit() -> None:
    def work(rank: int) -> list[float]:
        mine, outputs = torch.full((2,), float(rank)), [torch.zeros(2), torch.zeros(2)]
        with make_gathers_safe():
            gathering = dist.all_gather(outputs, mine, async_op=True)
            assert gathering is not None
            gathering.wait()
            outputs[0] += 5
            gathering.wait()
            with pytest.raises(ValueError, match="int64"):
                dist.all_gather_into_tensor(torch.zeros(4, dtype=torch.int64), mine)
            with pytest.raises(ValueError, match="2 times 2 numbers"):
                dist.all_gather([torch.zeros(2)] * 3, mine)
        return [float(output[0]) for output in outputs]

    assert run_distributed(work, 2) == [[5.0, 1.0]] * 2
