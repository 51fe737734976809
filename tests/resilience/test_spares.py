"""Nodes that a loss leaves without a place wait as spares, and take the next place."""

import multiprocessing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from interrupted_training import (
    at,
    before_each_step,
    config_of,
    die,
    failures,
    once,
    train_and,
    undisturbed,
    wait_for_a_change,
)
from joining_nodes import one_that_joins
from ledger import applied_ids, recorded
from training import plan_of
from waiting import wait_until

from motet.resilience import stragglers
from motet.resilience.launch_nodes import train_on_nodes
from motet.resilience.membership import MembershipNotice
from motet.resilience.recover import TrainingProcess
from motet.runtime.training.trainer import Trainer

FORK = multiprocessing.get_context("fork")


def kinds(log: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(change["kind"], change["node"]) for line in log for change in line["changes"]]


@pytest.mark.campaign
def test_two_losses_within_one_recovery(tmp_path: Path) -> None:
    """One of each of two pipelines: each layer is left on one node, and training goes on without a restart."""
    config = config_of(tmp_path / "run", train__failures={"tolerate": 1, "detect_s": 10, "restarts": 0})
    join_world, first = TrainingProcess._join_world, once()

    def join_and_die(self: TrainingProcess, notice: MembershipNotice) -> None:
        node = notice.membership.all_nodes[notice.rank or 0]
        if notice.membership.generation == 2 and node == 3 and first():
            die()
        join_world(self, notice)

    with recorded(tmp_path), mock.patch.object(TrainingProcess, "_join_world", join_and_die):
        result = train_and(config, at(2, 0, die))
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert applied_ids(tmp_path).keys() == set(range(1, len(undisturbed()) + 1))
    log = failures(config)
    assert [change for change in kinds(log) if change[0] == "lost"] == [("lost", 0), ("lost", 3)]
    assert log[-1]["done"].startswith("went on with step 3")


@pytest.mark.campaign
def test_a_spare_takes_the_place_of_a_slow_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = {"tolerate": 1, "detect_s": 10, "replace_stragglers_after_s": 1e-9}
    config = config_of(tmp_path, train__failures=failing)
    plan, first, is_slow, has_come = plan_of(config), once(), [False], FORK.Event()
    seen: list[Trainer] = []
    monkeypatch.setattr(stragglers, "WINDOW", 1)
    monkeypatch.setattr(stragglers, "action_s", lambda _: 5e-3 if is_slow[0] else 1e-3)

    def note(trainer: Trainer) -> None:
        is_slow[0] = is_slow[0] or (trainer.engine.model.mesh.rank == 3 and first())
        if not seen and trainer.finished_steps:
            has_come.set()
        if trainer in seen:  # The first step under each membership tells who is slow.
            wait_until(lambda: trainer.engine.wants_pause() or has_come.is_set())
        seen.append(trainer)

    with before_each_step(note), one_that_joins(config, plan, lambda: None):
        result = train_on_nodes(config, plan, None, num_nodes=4, node_size=1)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert {("joined", 4), ("leaving", 3), ("left", 3)} <= set(kinds(failures(config)))
    assert sorted([line for line in failures(config) if "nodes" in line][-1]["nodes"]) == [0, 1, 2, 4]


def test_a_survivor_takes_a_place_when_another_node_joins(tmp_path: Path) -> None:
    """After the loss and the join there are as many pipelines as in the beginning."""
    config, plan = config_of(tmp_path), plan_of(config_of(tmp_path))
    is_small = FORK.Event()
    act = at(2, 3, die)

    def lose_and_wait(trainer: Trainer) -> None:
        act(trainer)
        if trainer.engine.model.mesh.world_size == 2 and trainer.finished_steps == 3:
            is_small.set()
            wait_for_a_change(trainer)

    with one_that_joins(config, plan, is_small.wait), before_each_step(lose_and_wait):
        result = train_on_nodes(config, plan, None, num_nodes=4, node_size=1)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert result["world_size"] == 4
    lost, joined = failures(config)
    assert lost["done"] == "went on with step 3: 1 whole pipeline; the plan has no use for node 2, waiting"
    assert joined["done"] == "went on with step 5: 2 whole pipelines"
    assert sorted(joined["nodes"]) == [0, 1, 2, 4]
