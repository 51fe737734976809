"""Memory that a worker fills and hands to the process that started it.

A segment is an anonymous file in memory. Its descriptor travels in one message with its name, over a pair of sockets
that both processes have from the start. Nothing of it has a place in the file system: whichever process is killed, the
kernel frees everything, and no stranger can connect.

Limits: Linux, where the memory needs no room in /dev/shm; elsewhere segments are unnamed files in the temporary folder.
"""

import mmap
import os
import socket
import struct
import tempfile
import threading
import weakref
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

PATIENCE_S = 60.0
"""Time for a descriptor to arrive, which was sent before the message that names it."""
_NAME = struct.Struct("=qq")
_numbers = count()


@dataclass(frozen=True)
class SegmentName:
    """What another process needs to know of a segment."""

    process: int
    number: int
    num_bytes: int

    @property
    def message(self) -> bytes:
        return _NAME.pack(self.process, self.number)


@dataclass(frozen=True)
class Segment:
    data: Tensor
    """uint8 [bytes]."""
    descriptor: int


def new_segment(num_bytes: int) -> Segment:
    """`num_bytes`: at least 1."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("motet")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return Segment(_mapped(descriptor, num_bytes), descriptor)


def send_segment(over: socket.socket, segment: Segment) -> SegmentName:
    """Sends the descriptor, and closes it here."""
    name = SegmentName(os.getpid(), next(_numbers), segment.data.nbytes)
    socket.send_fds(over, [name.message], [segment.descriptor])
    os.close(segment.descriptor)
    return name


class SegmentReceiver:
    """The end of the process that starts the workers, which inherit it."""

    def __init__(self) -> None:
        # Each message is whole, whoever else sends, and whoever is killed meanwhile.
        kind = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_STREAM)
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, kind)
        self._arrived = _Arrived()
        weakref.finalize(self, self._arrived.close)

    def sender(self) -> socket.socket:
        """Returns the workers' end; to be called in a worker."""
        self._ours.close()
        return self._theirs

    def begin(self) -> None:
        """Receives until all workers have ended; to be called when they have been started."""
        self._theirs.close()
        arguments = self._ours, self._arrived
        threading.Thread(target=_receive, args=arguments, name="shared segments", daemon=True).start()

    def take(self, name: SegmentName) -> Tensor:
        """Returns the memory of a segment as uint8 [bytes]; once for each."""
        descriptor = self._arrived.take(name.message)
        try:
            return _mapped(descriptor, name.num_bytes)
        finally:
            os.close(descriptor)


class _Arrived:
    """Descriptors by the messages that name them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._descriptors: dict[bytes, int] = {}
        self._is_closed = False

    def put(self, message: bytes, descriptor: int) -> None:
        with self._changed:
            if self._is_closed:
                os.close(descriptor)
                return
            self._descriptors[message] = descriptor
            self._changed.notify_all()

    def take(self, message: bytes) -> int:
        with self._changed:
            if not self._changed.wait_for(lambda: message in self._descriptors, PATIENCE_S):
                raise RuntimeError("a worker's answer is there, and its memory is not")
            return self._descriptors.pop(message)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])


def _receive(ours: socket.socket, arrived: _Arrived) -> None:
    with ours:
        while True:
            message, descriptors, _, _ = socket.recv_fds(ours, _NAME.size, 1)
            if not message:
                return
            for descriptor in descriptors:
                arrived.put(message, descriptor)


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    if (path := Path(f"/proc/self/fd/{descriptor}")).exists():
        # Python's mappings keep descriptors of their own, of which there would be too few for a large batch.
        return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
