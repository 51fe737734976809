"""A training whose nodes all join a process that listens, as those of other machines do."""

import multiprocessing
from typing import Any

import pytest
from ports import port_of_its_own
from training import plan_of

from motet.config import RunConfig
from motet.errors import UserError
from motet.resilience.launch_nodes import join_training, train_on_nodes
from motet.resilience.store.store import SECRET_VARIABLE


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of all machines")


def train_elsewhere(config: RunConfig) -> tuple[dict[str, Any], list[int | None]]:
    """Every node joins a process that listens. The result, and how the nodes ended."""
    plan, address = plan_of(config), ("127.0.0.1", port_of_its_own())

    def node() -> None:
        while True:
            try:
                return join_training(config, lambda: None, address, 1)
            except UserError:  # Nobody listens, yet or at this moment.
                continue

    nodes = [multiprocessing.get_context("fork").Process(target=node) for _ in range(plan.num_ranks)]
    for process in nodes:
        process.start()
    result = train_on_nodes(config, plan, None, num_nodes=plan.num_ranks, node_size=1, listen=address)
    for process in nodes:
        process.join()
    return result, [process.exitcode for process in nodes]
