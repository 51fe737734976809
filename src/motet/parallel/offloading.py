"""Saved activations of blocks in the host's memory, from their forward until their backward.

What autograd saves of a block is copied to pinned memory on a stream of its own while the block behind it computes, and
comes back while the block behind it has its backward. So a device holds the activations of two blocks at most beside
those that are not offloaded. Tensors that are saved several times travel once. Parameters stay where they are, as do
inputs that all blocks share (masks, rotary positions) and tensors that are small beside the block's input.

Composes with `motet.parallel.saved_tensors`, whose hooks would otherwise be hidden by ours. On a CPU copies are made
too, on the spot: they save nothing there.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from motet.devices import device_module, has_own_memory
from motet.parallel.saved_tensors import Narrow, SavesLess

SMALL = 1 / 16
"""Tensors of fewer elements than this share of the block's input stay on the device."""


class OffloadLane:
    """The copies of one stage's blocks, in the order of their forwards."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._flying: _Copies | None = None
        """The last block's, whose device tensors are held until they have been copied."""

    @contextmanager
    def offloading(
        self, block: nn.Module, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[None]:
        """The context of the forward of one block. Its first argument is the hidden states."""
        hidden = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        if hidden is None:
            yield
            return
        if self._stream is None and has_own_memory(hidden.device):
            self._stream = device_module(hidden.device).Stream()
        shared = [*args, *kwargs.values(), *block.parameters(), *block.buffers()]
        copies = _Copies(self._stream, number, hidden, _storages(shared) - _storages([hidden]), self._flying)
        with torch.autograd.graph.saved_tensors_hooks(copies.pack, _unpack):
            yield
        copies.finish()
        if self._flying is not None:
            self._flying.release()
        self._flying = copies


class _OnHost:
    """A saved tensor that is on the host, on its way there or back."""

    def __init__(self, tensor: Tensor, copies: "_Copies") -> None:
        self.copies = copies
        self.device, self.size, self.stride = tensor.device, tensor.size(), _dense_strides(tensor)
        self.on_device: Tensor | None = tensor.detach()
        """Also the source of the copy to the host, which has to stay until it is made."""
        self.on_host = torch.empty(
            tensor.numel(), dtype=tensor.dtype, pin_memory=has_own_memory(tensor.device)
        ).as_strided(self.size, self.stride)

    def bring_back(self) -> None:
        """Makes room on the device; the copy is its caller's."""
        room = torch.empty(self.on_host.numel(), dtype=self.on_host.dtype, device=self.device)
        self.on_device = room.as_strided(self.size, self.stride)


class _Copies:
    """What the forward of one block has saved."""

    def __init__(self, stream: Any, number: int, hidden: Tensor, staying: set[int], before: "_Copies | None") -> None:
        self._stream, self.number, self._staying = stream, number, staying
        self._device, self._least = hidden.device, SMALL * hidden.numel()
        self._before = weakref.ref(before) if before is not None and before.number < number else lambda: None
        self._less = SavesLess.current
        self._stored: dict[object, tuple[_OnHost, torch.UntypedStorage]] = {}
        """With the memory of each tensor, so that no other one is taken for it."""
        self._members: list[weakref.ref[_OnHost]] = []
        self._event: Any = None
        """The last copies' end."""

    def pack(self, tensor: Tensor) -> Any:
        saved = tensor if self._less is None else self._less.pack(tensor)
        if isinstance(saved, Narrow):
            return saved._replace(values=self._store(saved.values))
        return self._store(saved) if isinstance(saved, Tensor) else saved

    def _store(self, tensor: Tensor) -> "Tensor | _OnHost":
        storage = tensor.untyped_storage()
        if storage._cdata in self._staying or tensor.numel() < self._least or 0 in tensor.stride():
            return tensor
        key = storage._cdata, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype
        if key not in self._stored:
            stored = _OnHost(tensor, self)
            self._stored[key] = stored, storage
            self._members.append(weakref.ref(stored))
            if self._stream is None:
                stored.on_host.copy_(tensor.detach())
            else:
                self._follow()
                with device_module(self._device).stream(self._stream):
                    stored.on_host.copy_(tensor.detach(), non_blocking=True)
        return self._stored[key][0]

    def _follow(self) -> None:
        """Lets the copies' stream wait for what the device has been given so far."""
        event = torch.Event(device=self._device)
        event.record()
        event.wait(self._stream)

    def finish(self) -> None:
        """The forward has ended. What is saved is held by the graph alone from now on."""
        self._stored.clear()
        self._record()

    def _record(self) -> None:
        if self._stream is not None:
            self._event = torch.Event(device=self._device)
            self._event.record(self._stream)

    def release(self) -> None:
        """Frees the device's tensors when they have been copied, for which the device waits, not the host."""
        if self._event is not None:
            self._event.wait()
        for stored in self._alive():
            stored.on_device = None

    def _alive(self) -> list[_OnHost]:
        return [stored for member in self._members if (stored := member()) is not None]

    def bring_back(self) -> None:
        """Starts the copies to the device of all tensors that are not there."""
        absent = [stored for stored in self._alive() if stored.on_device is None]
        if not absent:
            return
        if self._stream is None:
            for stored in absent:
                stored.on_device = stored.on_host
            return
        for stored in absent:
            stored.bring_back()
        self._follow()
        with device_module(self._device).stream(self._stream):
            for stored in absent:
                assert stored.on_device is not None
                stored.on_device.copy_(stored.on_host, non_blocking=True)
        self._record()

    def load(self, stored: _OnHost) -> Tensor:
        self.bring_back()
        if self._event is not None:
            self._event.wait()
        before = self._before()
        if before is not None:
            before.bring_back()
        assert stored.on_device is not None
        return stored.on_device


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Narrow):
        saved = saved._replace(values=_loaded(saved.values))
    return SavesLess.unpack(_loaded(saved))


def _loaded(saved: Any) -> Any:
    return saved.copies.load(saved) if isinstance(saved, _OnHost) else saved


def _storages(values: Sequence[Any]) -> set[int]:
    """Of tensors, and of those in tuples (rotary positions)."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, Tensor):
            found.add(value.untyped_storage()._cdata)
        elif isinstance(value, tuple | list):
            found |= _storages(value)
    return found


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides without gaps: dimensions stay in their order in memory."""
    strides = [0] * tensor.dim()
    step = 1
    for dim in sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.size(dim), -dim)):
        strides[dim] = step
        step *= max(1, tensor.size(dim))
    return tuple(strides)
