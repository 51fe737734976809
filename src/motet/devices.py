"""Devices in torch's general terms: copies that the host does not wait for, seeds, memory.

Nothing here names a kind of accelerator: `torch.accelerator` and the device's module (`torch.cuda` is one) know it.
"""

import resource
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def has_own_memory(device: torch.device) -> bool:
    """Whether the device is no CPU: the host then runs ahead of it, and tensors have to be copied to and from it."""
    return device.type != "cpu"


def current_device() -> torch.device:
    """This process's accelerator; the CPU where torch finds none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def communication_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device of tensors that the group's ranks exchange."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else current_device()


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Waits for all ranks of the group, on this rank's own device."""
    device = communication_device(group)
    dist.barrier(group, device_ids=[device.index] if has_own_memory(device) else None)


def device_module(device: torch.device) -> Any:
    """torch's module of this kind of device, such as `torch.cuda`."""
    return torch.get_device_module(device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, for use in the current stream. The host does not wait, and may change its tensor."""
    if not has_own_memory(device) or has_own_memory(tensor.device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor to the host, which waits for it only when it reads the values."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        self._values = tensor.detach()
        if has_own_memory(tensor.device):
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.Event(device=tensor.device)
            self._event.record()

    def read(self) -> Tensor:
        """The values on the host. Waits until the device has computed them."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the CPU's generator and that of the device."""
    # torch.manual_seed would visit every kind of device, at ten times the cost.
    torch.default_generator.manual_seed(seed)
    if has_own_memory(device):
        device_module(device).manual_seed(seed)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if has_own_memory(device):
        torch.accelerator.synchronize(device)


def on_this_stream(device: torch.device, call: Callable[[], T]) -> Callable[[], T]:
    """Wraps a call so that another thread makes it on this thread's stream of the device."""
    if not has_own_memory(device):
        return call
    stream = torch.accelerator.current_stream(device)

    def on_stream() -> T:
        torch.accelerator.set_stream(stream)
        return call()

    return on_stream


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has held: of the device's allocator; on a CPU the resident memory."""
    if has_own_memory(device):
        return int(torch.accelerator.max_memory_allocated(device))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def memory_bytes(device: torch.device) -> int:
    """Total memory of the accelerator in bytes."""
    return cast(int, device_module(device).mem_get_info(device)[1])


def free_memory_bytes(device: torch.device) -> int:
    """Bytes of the accelerator that no program holds."""
    return cast(int, device_module(device).mem_get_info(device)[0])


def device_name(device: torch.device) -> str:
    """The maker's name of the accelerator."""
    return str(device_module(device).get_device_name(device))
