"""Machines, for which groups of processes stand: one has the process that listens, and each has a node that joins.

A machine is lost whole, as its power is cut (SIGKILL) or as it is held up and comes back later (SIGSTOP).
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from ports import port_of_its_own

from motet.config import RunConfig
from motet.errors import UserError
from motet.plan import Plan
from motet.planner.templates.pipelines import Templates
from motet.resilience import launch_nodes
from motet.runtime.launch import WorkerFailedError

FORK = multiprocessing.get_context("fork")


def _fields(pid: int | str) -> list[str]:
    """Of its line in /proc, from its state on; nothing if it has gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["X", "", ""]


def state_of(pid: int) -> str:
    return _fields(pid)[0]


def processes_of(group: int) -> list[int]:
    """All that are there and no zombies."""
    found = {int(path.name): _fields(path.name) for path in Path("/proc").glob("[0-9]*")}
    return [pid for pid, (state, _, its_group, *_) in found.items() if its_group == str(group) and state not in "ZX"]


class Machines:
    """As many as the plan has nodes. Machine 0 listens besides."""

    def __init__(self, config: RunConfig, plan: Plan, templates: Templates | None, number: int, node_size: int) -> None:
        self._results: Any = FORK.SimpleQueue()
        self._config, self._node_size, self._templates = config, node_size, templates
        self._address = ("127.0.0.1", port_of_its_own())
        outcome = launch_nodes._outcome

        def noted(*args: Any, **kwargs: Any) -> dict[str, Any]:
            result = outcome(*args, **kwargs)
            self._results.put(result)
            return result

        with mock.patch.object(launch_nodes, "_outcome", noted):
            self.listener = self._start(0, self._listen, plan, number)
            self.groups = [self.listener.pid or 0]
            self.nodes = [self._start(self.groups[0], self._join)]
            for _ in range(1, number):
                self.nodes.append(self._start(0, self._join))
                self.groups.append(self.nodes[-1].pid or 0)

    def _start(self, group: int, act: Callable[..., None], *args: Any) -> BaseProcess:
        def run() -> None:
            os.setpgid(0, group)
            try:
                act(*args)
            except WorkerFailedError as error:
                print(f"motet: error: {error}", file=sys.stderr, flush=True)
                sys.exit(1)

        process = FORK.Process(target=run)
        process.start()
        assert process.pid is not None
        os.setpgid(process.pid, group or process.pid)
        return process

    def _listen(self, plan: Plan, number: int) -> None:
        launch_nodes.train_on_nodes(
            self._config, plan, self._templates, num_nodes=number, node_size=self._node_size, listen=self._address
        )

    def _join(self) -> None:
        while True:
            try:
                return launch_nodes.join_training(self._config, lambda: self._templates, self._address, self._node_size)
            except UserError:  # Nobody listens, yet.
                time.sleep(0.05)

    @property
    def has_result(self) -> bool:
        return not self._results.empty()

    def result(self, longest_s: float) -> dict[str, Any]:
        """Of the training, once it is over."""
        self.wait_until(lambda: self.has_result, longest_s)
        result: dict[str, Any] = self._results.get()
        return result

    def exit_codes(self, longest_s: float) -> list[int | None]:
        """Of the listener and all nodes, once they have ended."""
        self.wait_until(lambda: None not in self._codes(), longest_s)
        return self._codes()

    def _codes(self) -> list[int | None]:
        return [process.exitcode for process in (self.listener, *self.nodes)]

    def wait_until(self, is_over: Callable[[], bool], longest_s: float) -> None:
        deadline = time.monotonic() + longest_s
        while not is_over():
            are_there = None in self._codes()
            assert are_there or is_over(), f"all machines have ended: {self._codes()}"
            assert time.monotonic() < deadline, f"it does not end: {self._codes()}"
            time.sleep(0.02)

    def is_stopped(self, group: int) -> bool:
        return any(state_of(pid) == "T" for pid in processes_of(group))

    def end(self) -> None:
        for group in self.groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        for process in (self.listener, *self.nodes):
            process.join()


@contextmanager
def machines(
    config: RunConfig, plan: Plan, templates: Templates | None = None, *, number: int, node_size: int = 1
) -> Iterator[Machines]:
    started = Machines(config, plan, templates, number, node_size)
    try:
        yield started
    finally:
        started.end()
