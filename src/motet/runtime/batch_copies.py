"""Copies of global batches to the device: the tensors that this rank's stages read are copied once, ahead of their use.

A thread of the loader packs the tensors into pinned buffers, one for each dtype. When the batch's iteration begins the
buffers are copied on a stream of their own, so a host that runs ahead has them copied while the device computes the
iteration before. Tensors that stages read on the host (`features_on_host`, `integers_on_host`) stay where they are.
"""

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.assignment.sample import Sample
from motet.models.stages.stage import Batch

ALIGNMENT_BYTES = 256
"""At multiples of so many bytes tensors begin, as those that torch allocates do."""


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in the buffer of its dtype."""

    dtype: torch.dtype
    begin: int
    shape: torch.Size


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The tensors of a batch in pinned memory."""

    buffers: Mapping[torch.dtype, Tensor]
    places: Mapping[tuple[str, int], Mapping[str, _Place]]
    """By (module, position in the batch) and the tensor's name."""


class DeviceBatch:
    """A batch whose tensors are on the device, where stages read them there."""

    def __init__(self, batch: Batch, packed: PackedBatch, buffers: Mapping[torch.dtype, Tensor]) -> None:
        self.samples = batch.samples
        self._batch, self._packed, self._buffers = batch, packed, dict(buffers)

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        places = self._packed.places.get((module, sample))
        if places is None:
            return self._batch.features(module, sample)
        on_device = {
            name: self._buffers[place.dtype][place.begin : place.begin + place.shape.numel()].view(place.shape)
            for name, place in places.items()
        }
        return {name: on_device.get(name, own) for name, own in self._batch.features(module, sample).items()}

    def release(self) -> None:
        """Frees the memory on the device, when the iteration has read everything."""
        self._buffers.clear()


class BatchCopies:
    """Packs and copies batches. `num_kept`: packed batches that wait for their iteration."""

    def __init__(self, device: torch.device, num_kept: int) -> None:
        self._device, self._stream = device, torch.Stream(device)
        self._packed: deque[tuple[Sequence[Sample], PackedBatch]] = deque(maxlen=num_kept)

    def keep(self, num_batches: int) -> None:
        self._packed = deque(self._packed, num_batches)

    def pack(self, batch: Batch, wanted: Mapping[str, Sequence[int]], integers_on_host: Set[str]) -> None:
        """For the thread that loads the batch. `wanted`: by module, the samples whose tensors stages read on the
        device; `integers_on_host`: modules of which only floating-point tensors go there."""
        if not any(samples is batch.samples for samples, _ in tuple(self._packed)):
            self._packed.append((batch.samples, _packed(batch, wanted, integers_on_host)))

    def to_device(self, batch: Batch, wanted: Mapping[str, Sequence[int]], integers_on_host: Set[str]) -> DeviceBatch:
        """Issues the copies. The present stream waits for them, and the host does not."""
        self.pack(batch, wanted, integers_on_host)
        packed = next(packed for samples, packed in tuple(self._packed) if samples is batch.samples)
        self._packed = deque((each for each in self._packed if each[0] is not batch.samples), self._packed.maxlen)
        computing = torch.accelerator.current_stream(self._device)
        buffers = {}
        with self._stream:
            for dtype, buffer in packed.buffers.items():
                buffers[dtype] = buffer.to(self._device, non_blocking=True)
                buffers[dtype].record_stream(computing)
            copied = torch.Event(device=self._device)
            copied.record(self._stream)
        copied.wait(computing)
        return DeviceBatch(batch, packed, buffers)


def _packed(batch: Batch, wanted: Mapping[str, Sequence[int]], integers_on_host: Set[str]) -> PackedBatch:
    sizes: dict[torch.dtype, int] = {}
    tensors: list[tuple[_Place, Tensor]] = []
    places: dict[tuple[str, int], dict[str, _Place]] = {}
    for module, indices in wanted.items():
        for i in indices:
            own = places[module, i] = {}
            for name, tensor in batch.features(module, i).items():
                if module in integers_on_host and not tensor.is_floating_point():
                    continue
                begin = sizes.get(tensor.dtype, 0)
                own[name] = _Place(tensor.dtype, begin, tensor.shape)
                step = ALIGNMENT_BYTES // tensor.element_size()
                sizes[tensor.dtype] = begin + -(-tensor.numel() // step) * step
                tensors.append((own[name], tensor))
    buffers = {dtype: torch.empty(size, dtype=dtype, pin_memory=True) for dtype, size in sizes.items()}
    for place, tensor in tensors:
        buffers[place.dtype][place.begin : place.begin + tensor.numel()].view(place.shape).copy_(tensor)
    return PackedBatch(buffers, places)
