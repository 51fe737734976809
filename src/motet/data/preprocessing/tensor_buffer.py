"""The tensors of several samples in one buffer, with a description: how they travel between processes.

Nothing is unpickled, and nothing is copied where it is unpacked: tensors are views of the buffer.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; of each tensor's first one."""

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
"""For each sample, by tensor name: dtype, shape, first byte. As JSON has it."""


@dataclass(frozen=True)
class TensorBuffer:
    header: Header
    data: Tensor
    """uint8 [bytes]."""


def pack(samples: Sequence[Mapping[str, Tensor]]) -> TensorBuffer:
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
    data = torch.empty(end, dtype=torch.uint8)
    for first, tensor in placed:
        data[first : first + tensor.nbytes] = tensor.contiguous().reshape(-1).view(torch.uint8)
    return TensorBuffer(header, data)


def unpack(header: Header, data: Tensor) -> Iterator[dict[str, Tensor]]:
    """`data`: uint8 [bytes]. Raises `ValueError` if the header speaks of what is not there."""
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


def as_tensor(buffer: Any) -> Tensor:
    """A view of anything with the buffer protocol, uint8 [bytes]; not to be written to."""
    if not memoryview(buffer).nbytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=torch.uint8)
