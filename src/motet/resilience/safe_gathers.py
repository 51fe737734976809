"""Gathers over gloo that write into no freed memory when they fail.

torch's gathers over gloo (`AsyncAllgatherWork` and `AsyncGatherWork` of ProcessGroupGloo.cpp, seen in 2.13) receive
into a tensor of their own. When a peer dies, the thread that runs the gather frees this tensor before it withdraws
gloo's buffer, and meanwhile gloo's own thread may still receive into it from peers that live. What it writes there
corrupts the lists of free memory, and the process ends by SIGSEGV or SIGABRT when they are next used: at the latest
when the group is destroyed, because its threads end then. A process that outlives its peers therefore gathers by a
sum, to which every rank brings zeros outside its own part. The tensor of a sum belongs to its work, which the thread
that runs it holds until gloo is done.

Limits: a sum moves twice the bytes of a gather, all ranks of a group must gather alike, and a gather has no future.
Coalesced gathers and `all_to_all` of lists have the same defect and stay as they are: neither motet nor torch's
checkpoint uses them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

_Gather = Callable[..., dist.Work]
_Tensors = Tensor | list[Tensor] | list[list[Tensor]]


@contextmanager
def make_gathers_safe() -> Iterator[None]:
    """In the block, gathers of CPU tensors by the functions of `torch.distributed` are sums; torch's checkpoint calls
    these too."""
    with ExitStack() as stack:
        for name in ("allgather", "all_gather_single", "gather"):
            safe = _make_safe(getattr(dist.ProcessGroup, name))
            stack.enter_context(patch.object(dist.ProcessGroup, name, safe))
        yield


def _make_safe(gather: _Gather) -> _Gather:
    def safe_gather(group: dist.ProcessGroup, outputs: _Tensors, inputs: _Tensors, *options: Any) -> dist.Work:
        (mine,) = _flat(inputs)
        if mine.device.type != "cpu":
            return gather(group, outputs, inputs, *options)
        return _GatherBySum(group, mine, _flat(outputs))

    return safe_gather


def _flat(tensors: _Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [one for each in tensors for one in _flat(each)]


class _GatherBySum(dist.Work):
    """`outputs`: one for each rank, or one for all ranks together; none where nothing is wanted."""

    def __init__(self, group: dist.ProcessGroup, mine: Tensor, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        if any(output.dtype != mine.dtype for output in outputs):
            raise ValueError(f"outputs of a gather are {outputs[0].dtype}, but what is gathered is {mine.dtype}")
        if outputs and sum(output.numel() for output in outputs) != group.size() * mine.numel():
            raise ValueError(f"outputs of a gather do not hold {group.size()} times {mine.numel()} numbers")
        self._outputs = outputs
        self._whole = mine.new_zeros(group.size(), mine.numel())
        self._whole[group.rank()] = mine.detach().reshape(-1)
        # As bytes, because -0.0 + 0.0 would be 0.0.
        self._work = group.allreduce([self._whole.reshape(-1).view(torch.uint8)])

    def is_completed(self) -> bool:
        is_done = self._work.is_completed()
        if is_done and self._work.is_success():
            self._write()
        return is_done

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        is_done = self._work.wait(*args, **kwargs)
        self._write()
        return is_done

    def _write(self) -> None:
        """Once: the caller may have changed the outputs since."""
        outputs, self._outputs = self._outputs, ()
        parts = self._whole.chunk(max(1, len(outputs)))
        with torch.inference_mode(any(output.is_inference() for output in outputs)), torch.no_grad():
            for output, part in zip(outputs, parts, strict=False):
                output.copy_(part.reshape(output.shape))
