"""A process group of torch.distributed that hands every operation on to gloo, for backends of tests.

A backend of tests derives from `WrappedGroup`, may override `issue`, and is registered with `register`. Tensors of a
device travel over pinned memory of the host, so several ranks can share one GPU, which NCCL refuses: `WrappedGroup`
itself is that backend.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo

Run = Callable[..., dist.Work]

COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "all_gather_single",
    "_allgather_base",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "all_to_all_single",
    "alltoall_base",
    "alltoall",
    "gather",
    "scatter",
)


class WrappedGroup(ProcessGroup):
    """One group's operations, executed by gloo."""

    backend_name = "staged_gloo"
    """The backend's name, as `torch.distributed.init_process_group` takes it."""

    def __init__(self, options: Any, _: object) -> None:
        """`options`: what torch.distributed tells a backend of its group."""
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self.place = rank
        """This rank's number in the group."""
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        """The members, as the group of all ranks numbers them."""
        self.name, self.store = options.group_id, options.store
        prefixed = dist.PrefixStore("gloo", options.store)
        self.inner = ProcessGroup(prefixed, rank, size)
        self.inner._set_default_backend(ProcessGroup.BackendType.GLOO)
        # The backend's own limits on time are what tests are about.
        gloo = ProcessGroupGloo(prefixed, rank, size, timedelta(hours=1))
        self.inner._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)

    def issue(self, name: str, run: Run, args: tuple[Any, ...]) -> dist.Work:
        """Called for every operation. `run(*args)`: starts it on gloo, with tensors of the host."""
        return self.start(name, run, args)

    def start(self, name: str, run: Run, args: tuple[Any, ...]) -> dist.Work:
        """Starts the operation on gloo. Results are on the device once the work has been waited for."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        work = run(*_on_host(args, pairs))
        # Operations write into their first argument, except that a send only reads it.
        written = set() if name == "send" or not args else {id(tensor) for tensor in tensors_of(args[0])}
        return _StagedWork(work, [pair for pair in pairs if id(pair[0]) in written], pairs) if pairs else work

    def getBackendName(self) -> str:
        return self.backend_name

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        return self.issue("send", self.inner.send, (tensors, to, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        return self.issue("recv", self.inner.recv, (tensors, source, tag))

    def barrier(self, *args: Any, **named: Any) -> dist.Work:
        """Of gloo, whatever device the caller's options name."""
        return self.issue("barrier", self.inner.barrier, ())


class _StagedWork(dist._Work):
    """`results`: tensors of a device, with those of the host for their values. `kept`: all that gloo uses."""

    def __init__(
        self,
        work: dist.Work,
        results: list[tuple[torch.Tensor, torch.Tensor]],
        kept: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        super().__init__()
        self._work, self._results, self._kept, self._has_ended = work, results, kept, False

    def wait(self, *timeout: timedelta) -> bool:
        if not self._has_ended:
            self._work.wait(*timeout)
            for tensor, host in self._results:
                tensor.detach().copy_(host)
            self._has_ended = True
        return True

    def is_completed(self) -> bool:
        return self._has_ended


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in tensors_of(each)] if isinstance(value, (list, tuple)) else []


def _on_host(value: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """The value with copies in the place of a device's tensors. `pairs`: takes these and their copies."""
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(each, pairs) for each in value)
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return value
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    host.copy_(value.detach())
    pairs.append((value, host))
    return host


def _handed_on(name: str) -> Callable[..., dist.Work]:
    def operation(self: WrappedGroup, *args: Any, **named: Any) -> dist.Work:
        return self.issue(name, getattr(self.inner, name), (*args, *named.values()))

    return operation


for _name in COLLECTIVES:
    setattr(WrappedGroup, _name, _handed_on(_name))


def register(kind: type[WrappedGroup]) -> None:
    """Makes the backend known to torch.distributed, once in a process and its forks."""
    if kind.backend_name not in dist.Backend.backend_list:
        dist.Backend.register_backend(kind.backend_name, kind, extended_api=True, devices=["cpu", "cuda"])
