"""Packs the tensors of several samples into one buffer with a description, to send them between processes.

Unpacked tensors are views of the buffer: nothing is unpickled or copied.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64
"""Alignment of each tensor, in bytes."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


Header = list[dict[str, tuple[str, list[int], int]]]
"""For each sample, by tensor name: dtype, shape and first byte, as in JSON."""


@dataclass(frozen=True)
class TensorBuffer:
    header: Header
    data: Tensor
    """uint8 [bytes]."""


Allocate = Callable[[int], Tensor]
"""From a number of bytes to uint8 [bytes]."""


def pack(samples: Sequence[Mapping[str, Tensor]], allocate: Allocate) -> TensorBuffer:
    """Copies all tensors into one buffer, each at a multiple of `ALIGNMENT` bytes."""
    header: Header = []
    placed: list[tuple[int, Tensor]] = []
    end = 0
    for features in samples:
        entries = {}
        for name, tensor in features.items():
            first = -(-end // ALIGNMENT) * ALIGNMENT
            entries[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), first)
            placed.append((first, tensor))
            end = first + tensor.nbytes
        header.append(entries)
    data = allocate(end)
    for first, tensor in placed:
        data[first : first + tensor.nbytes] = tensor.contiguous().reshape(-1).view(torch.uint8)
    return TensorBuffer(header, data)


def in_own_memory(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def unpack(header: Header, data: Tensor) -> Iterator[dict[str, Tensor]]:
    """`data`: uint8 [bytes]. Raises `ValueError` if the header does not fit the data."""
    for entries in header:
        yield {name: _view(data, *entry) for name, entry in entries.items()}


def _view(data: Tensor, dtype: str, shape: list[int], first: int) -> Tensor:
    if dtype not in DTYPES:
        raise ValueError(f"no tensor is of dtype {dtype!r}")
    num_bytes = DTYPES[dtype].itemsize
    for size in shape:
        num_bytes *= size
    if not 0 <= first <= first + num_bytes <= len(data):
        raise ValueError(f"a tensor of {num_bytes} bytes from byte {first} does not lie in {len(data)} bytes")
    return data[first : first + num_bytes].view(DTYPES[dtype]).reshape(shape)


def view_of_memory(address: int, num_bytes: int, owner: object) -> Tensor:
    """uint8 [bytes] at an address in memory of `owner`, which must not be written to. (From a read-only buffer, torch
    would warn each time.)"""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    memory._owner = owner  # type: ignore[attr-defined]  # Keeps the owner alive as long as the tensor.
    return torch.frombuffer(memory, dtype=torch.uint8)
