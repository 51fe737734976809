"""The store is lost: all nodes restart by themselves from the last checkpoint."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from interrupted_training import at, before_each_step, config_of, failures, train_and, undisturbed
from ledger import applied_ids, recorded
from nodes_elsewhere import secret, train_elsewhere  # noqa: F401
from sampling import in_campaigns

from motet.resilience import launch_nodes
from motet.resilience.store import embedded


@contextmanager
def store_pid() -> Iterator[Callable[[], int]]:
    """The number of the newest process that has the store, of those that are started meanwhile."""
    host, pid = embedded._host_store, multiprocessing.get_context("fork").Value("i", 0)

    def noted(*arguments: Any) -> None:
        pid.value = os.getpid()
        host(*arguments)

    with mock.patch.object(embedded, "_host_store", noted):
        yield lambda: pid.value


@pytest.mark.parametrize("how", ["SIGKILL", *in_campaigns(["SIGSTOP"])])
def test_all_start_again_from_the_last_checkpoint(tmp_path: Path, how: str) -> None:
    config = config_of(tmp_path, train__checkpoint_every=2)

    def lose(trainer: Any) -> None:
        trainer._checkpoints.finish()
        acts(trainer)

    def end_store() -> None:
        os.kill(pid(), signal.Signals[how])
        if how == "SIGSTOP":  # The training would be over before its silence is noticed.
            signal.pause()

    with (
        store_pid() as pid,
        recorded(tmp_path),
        # A silent store is waited for; on a busy machine a living one may be silent for a second.
        mock.patch.object(launch_nodes, "store_timeout_s", return_value=1.0 if how == "SIGSTOP" else 30.0),
    ):
        acts = at(3, 3, end_store)
        result = train_and(config, lose)
    assert result["losses"] == pytest.approx(undisturbed()[2:], rel=1e-12)
    assert applied_ids(tmp_path).keys() == set(range(1, len(undisturbed()) + 1))
    lost, again = failures(config)
    assert lost["done"].endswith("all nodes are restarted (restart 1 of 3)")
    assert again["done"] == "all nodes were restarted from the checkpoint of step 2"


@pytest.mark.campaign
@pytest.mark.usefixtures("secret")
def test_nodes_of_other_machines_come_again(tmp_path: Path) -> None:
    config = config_of(tmp_path, train__failures={"tolerate": 1, "detect_s": 3})
    with store_pid() as pid, before_each_step(at(2, 3, lambda: os.kill(pid(), signal.SIGKILL))):
        result, exit_codes = train_elsewhere(config)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert exit_codes == [0, 0, 0, 0]
