"""Nothing that was started is left, in whatever way the one that started it ends."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from motet.resilience.process_control import Children

FORK = multiprocessing.get_context("fork")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_for(is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not is_over():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stopped_children_end_with_the_block() -> None:
    """And no descriptor of theirs is left, whoever still refers to them, as a traceback may."""
    before = {*os.listdir("/proc/self/fd")}
    with Children() as children:
        child = children.start(signal.pause)
        number = child.pid
        assert number is not None
        os.kill(number, signal.SIGSTOP)
    assert not Path(f"/proc/{number}").exists()
    assert {*os.listdir("/proc/self/fd")} <= before
    with pytest.raises(ValueError, match="closed"):
        child.is_alive()


def start_family(told: Connection) -> None:
    """Tells the numbers of a child and a grandchild."""
    # Some are ignored in what is started in the background, or by nohup, or are an agent's that ran here before.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def grow_up() -> None:
        with Children() as grandchildren:
            told.send((os.getpid(), grandchildren.start(signal.pause).pid))
            signal.pause()

    with Children() as children:
        children.start(grow_up)
        while True:
            time.sleep(1)  # A signal that comes just before `signal.pause` would not end it.


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_all_descendants_end_with_a_process_that_is_ended(number: signal.Signals) -> None:
    ours, theirs = FORK.Pipe()
    parent = FORK.Process(target=start_family, args=(theirs,))
    parent.start()
    family = ours.recv()
    assert parent.pid is not None
    os.kill(parent.pid, number)
    parent.join(30)
    try:
        assert parent.exitcode is not None
        wait_for(lambda: not any(is_running(pid) for pid in family))
    finally:
        parent.kill()


def test_an_interrupt_while_a_child_is_started_is_not_lost() -> None:
    """Python ignores what is raised in the functions that it calls around a fork."""

    def interrupted() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with Children() as children:
            os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))
            try:
                children.start(signal.pause)
            except KeyboardInterrupt:
                os._exit(7)
        os._exit(0)

    parent = FORK.Process(target=interrupted)
    parent.start()
    parent.join(30)
    assert parent.exitcode == 7
