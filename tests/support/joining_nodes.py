"""A node that joins a training of this machine."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from motet.config import RunConfig
from motet.plan import Plan
from motet.resilience.health.free_memory import NO_NEEDS, MemoryNeeds
from motet.resilience.launch_nodes import run_agent
from motet.resilience.store.embedded import StoreProcess
from motet.resilience.succession import Succession

FORK = multiprocessing.get_context("fork")


@contextmanager
def one_that_joins(
    config: RunConfig, plan: Plan, wait: Callable[[], object], needs: MemoryNeeds = NO_NEEDS
) -> Iterator[None]:
    """A node of a process of its own, which joins the training that is started meanwhile when `wait` has returned."""
    addresses, start = FORK.SimpleQueue(), StoreProcess.start

    def started(self: StoreProcess, *args: Any) -> None:
        start(self, *args)
        addresses.put((self.address, self._secret))

    def join() -> None:
        wait()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run_agent(config, *addresses.get(), None, 1, Succession(1, None, first_plan=plan.to_json()), needs=needs)

    helper = FORK.Process(target=join)
    helper.start()
    with mock.patch.object(StoreProcess, "start", started):
        yield
    helper.join()
