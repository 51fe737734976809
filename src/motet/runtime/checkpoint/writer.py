"""Writes checkpoints beside the training: a step waits for a copy of the tensors, not for the disk.

Each rank writes in a thread of its own, over a process group of its own, one checkpoint at a time. The copies stay for
the next checkpoint, so a process holds what it writes twice, in main memory. What fails is told on all ranks alike,
when the next checkpoint begins or the training ends. (DCP's own `async_save` covers the shards alone:
checksums and the rename, which make a checkpoint complete, would be left to the training.)
"""

import threading
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from motet.runtime.checkpoint.checkpoint import tensors_to_save, write_checkpoint
from motet.runtime.checkpoint.folder import TrainingState
from motet.runtime.local_model import LocalModel
from motet.runtime.training.optimizer import Optimizer

TIMEOUT = timedelta(minutes=30)
"""Of the group: how long the slowest disk may keep the others waiting."""


class CheckpointWriter:
    """Collective: every rank makes one, with the same arguments, and calls its methods in the same order.

    All but the last `keep` checkpoints in `folder` and the best are deleted when another is complete.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep
        # On CUDA too: files are written from main memory.
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._before: threading.Thread | None = None
        self.is_unfinished = False
        """Whether a checkpoint was begun and is not complete, be it that it failed."""
        self.last: Path | None = None
        """The last one that was completed."""

    def save(self, model: LocalModel, optimizer: Optimizer, state: TrainingState, *, is_best: bool = False) -> None:
        """Returns as soon as everything is copied and the checkpoint before it is complete.

        Raises as `finish` does, on behalf of the one before."""
        self.finish()
        if self._before is not None:
            self._before.join()
            self._before = None
        self._copy(tensors_to_save(model, optimizer))
        self.is_unfinished = True
        # A daemon: a process whose peers have died must not wait for them when it ends.
        self._thread = threading.Thread(target=self._write, args=(state, is_best), name="checkpoint", daemon=True)
        self._thread.start()

    def follow(self, other: "CheckpointWriter") -> None:
        """Does not write before what this process began to write in another world has ended; that is lost."""
        self._before = other._thread if other._thread is not None else other._before

    def _copy(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """One after the other: what is gathered for the copy is whole on the device."""
        copies, on_cuda = self._copies, False
        self._copies = {}
        for name, tensor in tensors:
            on_cuda = on_cuda or tensor.is_cuda
            copy = copies.get(name)
            if copy is None or copy.shape != tensor.shape:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[name] = copy.copy_(tensor.detach(), non_blocking=True)
        if on_cuda:
            torch.cuda.synchronize()

    def _write(self, state: TrainingState, is_best: bool) -> None:
        try:
            # Nobody touches the folder before all have ended what they were writing in a world before this one.
            dist.barrier(self._group)
            self.last = write_checkpoint(
                self._folder, self._copies, state, keep=self._keep, is_best=is_best, group=self._group
            )
            self.is_unfinished = False
        except BaseException as failure:
            self._failure = failure

    def finish(self) -> Path | None:
        """Waits until what is being written is complete, and returns the last checkpoint.

        Raises `UserError` on all ranks if it could not be written; then the one before is untouched."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self.last
