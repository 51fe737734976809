"""Workers are killed at the worst moments, answers are of all sizes, and streams are left half read."""

import gc
import multiprocessing
import os
import select
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import wait_until

from motet.assignment.sample import Sample, Segment
from motet.data.preparation import NUM_SAMPLES_KEPT
from motet.data.service.tensor_buffer import TensorBuffer, unpack
from motet.data.service.tickets import Ticket
from motet.data.service.workers import (
    LARGE_BYTES,
    SLOT_BYTES,
    SLOTS_PER_WORKER,
    LocalProducer,
    PreparationError,
    Preparer,
    Workers,
)

SIZES = (0, 1, 5_000, LARGE_BYTES - 1, LARGE_BYTES, 3 * SLOT_BYTES)
"""Bytes of the samples' tensors, in turn."""

asleep = multiprocessing.Value("i", 0)
"""The process that is at a sample which lasts."""


class Bytes:
    """Sample i has a tensor of `SIZES[i]` bytes, and metadata of thousands of segments."""

    fingerprint = ""

    def __len__(self) -> int:
        return len(SIZES)

    def sample(self, index: int) -> Sample:
        return Sample(f"number {index}", {"vision": (Segment(index + 1),) * 10 * SIZES[index % 3]})

    def features(self, index: int, module: str) -> dict[str, torch.Tensor]:
        if module == "fails":
            raise ZeroDivisionError("a mistake of ours" * 10_000)
        if module == "lasts":
            asleep.value = os.getpid()
            time.sleep(600)
        return {"x": torch.arange(SIZES[index % len(SIZES)]).to(torch.uint8)}


@contextmanager
def workers(num: int) -> Iterator[Workers]:
    opened = Workers(Preparer({"train": Bytes()}), num)
    try:
        yield opened
    finally:
        opened.close()


def tickets(number: int, module: str | None = "vision") -> list[Ticket]:
    return [Ticket("train", (i,), module) for i in range(number)]


def tensors(answer: Any) -> list[torch.Tensor]:
    assert isinstance(answer, TensorBuffer)
    return [features["x"] for features in unpack(answer.header, answer.data)]


def test_nothing_is_left_half_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of more than `PIPE_BUF` bytes costs its worker its life, in the middle of it: so there may be none."""
    send = connection.Connection._send  # type: ignore[attr-defined]

    def dying(self: Any, content: Any, *args: Any) -> None:
        if len(content) > select.PIPE_BUF and multiprocessing.parent_process() is not None:
            os.write(self.fileno(), content[:100])
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, content, *args)

    monkeypatch.setattr(connection.Connection, "_send", dying)
    with workers(1) as opened:
        for i, answer in enumerate(opened.answers(tickets(len(SIZES)))):
            (got,) = tensors(answer)
            assert torch.equal(got, torch.arange(SIZES[i]).to(torch.uint8))
        metadata = [sample for (sample,) in opened.answers(tickets(3, None))]  # type: ignore[misc]
        assert metadata == [Bytes().sample(i) for i in range(3)]
        with pytest.raises(PreparationError, match="ZeroDivisionError: a mistake of ours"):
            list(opened.answers(tickets(1, "fails")))
        assert not opened.num_restarts


def test_more_streams_than_slots_some_of_them_left_half_read() -> None:
    with workers(1) as opened:
        for _ in range(SLOTS_PER_WORKER):
            stream = opened.answers(tickets(6))
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        streams = [opened.answers(tickets(6)) for _ in range(SLOTS_PER_WORKER)]
        for i in range(6):
            for stream in streams:
                (got,) = tensors(next(stream))
                assert torch.equal(got, torch.arange(SIZES[i]).to(torch.uint8))
        assert all(next(stream, None) is None for stream in streams)
        assert opened._pool is not None
        list(opened.answers(tickets(1)))  # Those that nobody waited for are done too.
        assert sorted(opened._pool._free) == list(range(SLOTS_PER_WORKER))


def test_of_a_broken_pool_nothing_is_left_where_signals_are_caught() -> None:
    """As a data server catches them before its second pool of workers begins. One worker dies, one is at work."""
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    others = set(multiprocessing.active_children())
    try:
        with workers(2) as opened:
            processes = set(multiprocessing.active_children()) - others
            stream = opened.answers([*tickets(1), *tickets(1, "lasts")])
            next(stream)
            while not asleep.value:
                time.sleep(0.01)
            stream.close()  # type: ignore[attr-defined]
            (dies,) = (process for process in processes if process.pid != asleep.value)
            dies.kill()
            list(opened.answers(tickets(6)))  # By nobody of these two.
            assert opened.num_restarts == 1
            for process in processes:
                process.join(60)
                assert process.exitcode is not None, "it lives on"
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_a_worker_that_is_killed_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are handed over at a socket."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = set(multiprocessing.active_children())
    with workers(1) as opened:
        [worker] = set(multiprocessing.active_children()) - others
        list(opened.answers(tickets(6)))
        assert [*tmp_path.iterdir()] == []
        worker.kill()
        worker.join()
        assert [*tmp_path.iterdir()] == []


def segments_and_sockets() -> int:
    """Number of descriptors of these that this process has open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith(("/memfd:motet", "socket:"))
    return found


def test_descriptors_are_given_back() -> None:
    """Of answers that were read, that nobody reads, and of workers that were killed."""
    others = set(multiprocessing.active_children())
    with workers(1) as opened:
        list(opened.answers(tickets(6)))
        before = segments_and_sockets()
        for _ in range(3):
            list(opened.answers(tickets(6)))
            stream = opened.answers(tickets(6))
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        list(opened.answers(tickets(1)))  # What nobody waited for is done too.
        wait_until(lambda: segments_and_sockets() <= before)
        [worker] = set(multiprocessing.active_children()) - others
        stream = opened.answers(tickets(6))
        next(stream)
        worker.kill()
        assert len(list(stream)) == 5
        gc.collect()
        wait_until(lambda: segments_and_sockets() <= before)


def test_metadata_of_a_small_set_is_asked_for_once() -> None:
    with workers(1) as opened:
        producer = LocalProducer(opened, "train", len(SIZES))
        first = producer.samples([0, 3])
        asked: list[Ticket] = []
        answers = opened.answers
        opened.answers = lambda tickets: answers(asked.append(each) or each for each in tickets)  # type: ignore[method-assign]
        assert producer.samples([3, 2, 0]) == [first[1], Bytes().sample(2), first[0]]
        assert [ticket.indices for ticket in asked] == [(2,)]
        larger = LocalProducer(opened, "train", NUM_SAMPLES_KEPT + 1)
        for _ in range(2):
            larger.samples([1])
        assert [ticket.indices for ticket in asked] == [(2,), (1,), (1,)]
