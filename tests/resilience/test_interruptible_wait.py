"""What gloo does not end by itself, though all connections are shut."""

import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed

from motet.resilience.interruptible_wait import Connections, InterruptibleWaits
from motet.resilience.process_control import PR_SET_PDEATHSIG
from motet.resilience.recover import leave_world

NEVER = timedelta(minutes=5)
"""Longer than the test may take."""
NUM_BYTES = 64 << 20
"""More than the buffers of a connection hold."""


def buffer() -> torch.Tensor:
    return torch.zeros(NUM_BYTES, dtype=torch.uint8)


def half_buffer(path: Path) -> torch.Tensor:
    """Sending it fails in the middle: the second half of its file is missing."""
    path.write_bytes(bytes(NUM_BYTES))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), NUM_BYTES)
    os.truncate(path, NUM_BYTES // 2)
    return torch.frombuffer(memory, dtype=torch.uint8)


def meet(path: Path, rank: int, size: int) -> None:
    store = dist.FileStore(str(path), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=NEVER)


class Peer:
    """A process of its own that acts as rank 1, and then stands still or lets go on what is under way."""

    def __init__(self, store: Path, act: Callable[[], object], *, stops: bool) -> None:
        self._ready, ready = os.pipe()
        self._process = os.fork()
        self._stops = stops
        if self._process == 0:
            try:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                meet(store, 1, 2)
                kept = act()
                os.write(ready, b"1")
                if stops:
                    os.kill(os.getpid(), signal.SIGSTOP)
                signal.pause()
                del kept
            finally:
                os._exit(1)
        os.close(ready)

    def await_act(self) -> None:
        assert os.read(self._ready, 1) == b"1"
        if self._stops:
            assert os.WIFSTOPPED(os.waitpid(self._process, os.WUNTRACED)[1])

    def kill(self) -> None:
        os.kill(self._process, signal.SIGKILL)


def wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait(NEVER)


def check_wait_ends(
    folder: Path, act: Callable[[], object], peer_act: Callable[[], object], *, stops: bool = True, kill: bool = False
) -> None:
    """And the group can be left, and another one be made. `kill`: the peer, when `act` waits for it; else it stays."""

    def work(_: int) -> int:
        leave_world()
        connections, waits = Connections(), InterruptibleWaits()
        peer = Peer(folder / "store", peer_act, stops=stops)
        meet(folder / "store", 0, 2)
        over = threading.Event()

        def end() -> None:
            time.sleep(0.2)  # The message is under way.
            if kill:
                peer.kill()
            since = time.monotonic()
            while not over.wait(0.05):
                connections.shut_down(num_ranks=2)
                waits.interrupt(before_generation=1, since=since)

        ender = threading.Thread(target=end)
        peer.await_act()
        ender.start()
        with waits.make_interruptible(dist.Work), pytest.raises(RuntimeError):
            act()
        over.set()
        ender.join()
        leave_world()
        peer.kill()
        meet(folder / "again", 0, 1)
        return dist.get_world_size()

    assert run_distributed(work, 1) == [1]


@pytest.mark.parametrize("kill", [False, True])
def test_a_peer_stands_still_while_it_is_sent_to(tmp_path: Path, kill: bool) -> None:
    check_wait_ends(tmp_path, lambda: wait(dist.isend(buffer(), 1)), lambda: dist.irecv(buffer(), 0), kill=kill)


@pytest.mark.parametrize("kill", [False, True])
def test_a_peer_stands_still_in_a_collective(tmp_path: Path, kill: bool) -> None:
    """The thread that runs it does not end, nor does the destructor of its group."""

    def take_part() -> object:
        return dist.broadcast(buffer(), 0, async_op=True)

    check_wait_ends(tmp_path, lambda: dist.broadcast(buffer(), 0), take_part, kill=kill)


def test_a_peer_fails_in_the_middle_of_a_message(tmp_path: Path) -> None:
    """And lives on; its connections are closed."""

    def send_half() -> object:
        half = half_buffer(tmp_path / "half")
        return half, dist.isend(half, 0)

    check_wait_ends(tmp_path, lambda: wait(dist.irecv(buffer(), 1)), send_half, stops=False)


class FakeWork:
    def __init__(self) -> None:
        self.is_over = threading.Event()

    def is_completed(self) -> bool:
        return False

    def wait(self, failure: Exception | None = None) -> bool:
        self.is_over.wait()
        if failure is not None:
            raise failure
        return True


def waiting(waits: InterruptibleWaits, work: FakeWork, failure: Exception | None = None) -> Future[bool]:
    """In a thread, until it does."""
    result = Future[bool]()

    def run() -> None:
        try:
            result.set_result(work.wait(failure))
        except RuntimeError as error:
            result.set_exception(error)

    threading.Thread(target=run).start()
    while not waits._pending:
        os.sched_yield()
    return result


@pytest.fixture
def waits() -> Iterator[InterruptibleWaits]:
    waits = InterruptibleWaits()
    with waits.make_interruptible(FakeWork), mock.patch("motet.resilience.interruptible_wait.GRACE_S", 0.0):
        yield waits


@pytest.mark.parametrize("before_generation", [1, 2, 3])
def test_only_what_began_before(waits: InterruptibleWaits, before_generation: int) -> None:
    waits.generation = 2
    work = FakeWork()
    result = waiting(waits, work)
    waits.generation = 3
    waits.interrupt(before_generation, since=0.0)
    if before_generation <= 2:
        work.is_over.set()
        assert result.result()
    else:
        with pytest.raises(RuntimeError, match="interrupted"):
            result.result()
        work.is_over.set()
    assert not waits._pending


def test_each_has_its_grace(waits: InterruptibleWaits) -> None:
    work = FakeWork()
    result = waiting(waits, work)
    waits.interrupt(1, since=time.monotonic() + 60)
    work.is_over.set()
    assert result.result()


def test_what_goes_wrong_is_told(waits: InterruptibleWaits) -> None:
    work = FakeWork()
    result = waiting(waits, work, RuntimeError("broken"))
    work.is_over.set()
    with pytest.raises(RuntimeError, match="broken"):
        result.result()


def test_helpers_end_with_whom_they_help(waits: InterruptibleWaits) -> None:
    for _ in range(20):
        work = FakeWork()
        result = waiting(waits, work)
        work.is_over.set()
        assert result.result()
    while [thread for thread in threading.enumerate() if thread.name == "interruptible waits"]:
        time.sleep(0.01)
