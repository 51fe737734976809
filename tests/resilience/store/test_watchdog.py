"""Whoever does not come round is ended; whoever was stopped altogether is not."""

import multiprocessing
import os
import signal
import threading
import time

from motet.resilience.store.store import Watchdog


def test_it_acts_when_nobody_comes_round() -> None:
    acted = threading.Event()
    with Watchdog(0.05, acted.set) as watchdog, watchdog.watch():
        assert acted.wait(30)


def test_it_does_not_act_afterwards() -> None:
    """Its thread is gone with the block, and does not wait for its time to pass."""
    acted = threading.Event()
    with Watchdog(3600.0, acted.set) as watchdog, watchdog.watch():
        assert watchers() == 1
    assert watchers() == 0
    assert not acted.is_set()


def test_it_does_not_act_where_nothing_is_watched() -> None:
    """Though it has as much time for it as another one that acts."""
    acted, other_acted = threading.Event(), threading.Event()
    with Watchdog(0.05, acted.set) as watchdog, Watchdog(0.05, other_acted.set) as other, other.watch():
        with watchdog.watch():
            pass
        assert other_acted.wait(30)
    assert not acted.is_set()


def watchers() -> int:
    return sum(thread.name == "watchdog" for thread in threading.enumerate())


def test_a_process_that_was_stopped_and_goes_on_was_not_late() -> None:
    """As by Ctrl-Z: the clock has gone on meanwhile, for both threads alike."""
    patience_s = 1.0
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def work() -> None:
        with Watchdog(patience_s, lambda: os._exit(3)) as watchdog:
            theirs.send("begun")
            is_told = False
            while not is_told:
                with watchdog.watch():
                    is_told = theirs.poll(patience_s / 20)
        os._exit(0)

    process = context.Process(target=work)
    process.start()
    ours.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.2 * patience_s)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    ours.send("end")
    process.join(30)
    assert process.exitcode == 0
