"""Segments of memory that one process fills and another one reads."""

import multiprocessing
import os
import signal

import pytest
import torch
from waiting import wait_until

from motet.data.service import shared_segments
from motet.data.service.shared_segments import SegmentName, SegmentReceiver, new_segment, send_segment

FORK = multiprocessing.get_context("fork")


def test_what_another_process_has_written_is_read() -> None:
    receiver, names = SegmentReceiver(), FORK.SimpleQueue()

    def write() -> None:
        sender = receiver.sender()
        for number in range(3):
            segment = new_segment(1000 + number)
            segment.data.fill_(number)
            names.put(send_segment(sender, segment))

    process = FORK.Process(target=write)
    process.start()
    receiver.begin()
    for number, name in reversed([(number, names.get()) for number in range(3)]):  # In any order.
        got = receiver.take(name)
        assert torch.equal(got, torch.full((1000 + number,), number, dtype=torch.uint8))
    process.join()


def test_of_a_killed_sender_nothing_is_left() -> None:
    """What it has sent, and nobody has asked for, goes with the receiver."""
    before = {*os.listdir("/proc/self/fd")}
    receivers = [SegmentReceiver()]

    def send_and_die() -> None:
        send_segment(receivers[0].sender(), new_segment(10))
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=send_and_die)
    process.start()
    receivers[0].begin()
    process.join()
    process.close()
    wait_until(lambda: receivers[0]._arrived._descriptors)
    receivers.clear()
    wait_until(lambda: {*os.listdir("/proc/self/fd")} <= before)


def test_memory_that_is_kept_keeps_no_descriptor() -> None:
    """A large batch has more segments than a process may have descriptors."""
    before = {*os.listdir("/proc/self/fd")}
    kept = []
    for number in range(5):
        segment = new_segment(1000 + number)
        os.close(segment.descriptor)
        kept.append(segment.data.fill_(number))
    assert {*os.listdir("/proc/self/fd")} <= before
    assert [int(data.sum()) for data in kept] == [number * (1000 + number) for number in range(5)]


def test_a_segment_that_was_never_sent_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_segments, "PATIENCE_S", 0.0)
    with pytest.raises(RuntimeError, match="its memory is not"):
        SegmentReceiver().take(SegmentName(1, 2, 3))
