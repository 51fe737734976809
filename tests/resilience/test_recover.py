"""Processes are killed; those that are left go on, and come to what an undisturbed run comes to."""

import json
import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from distributed import run_distributed
from interrupted_training import (
    STEPS,
    all_at,
    at,
    before_each_step,
    config_of,
    die,
    failures,
    kill_node,
    train_and,
    undisturbed,
    wait_for_a_change,
    warn_node,
)
from sampling import in_campaigns
from training import plan_of
from unlike_pipelines import train_and_join, undisturbed_unlike, unlike_config

from motet.api import read_problem
from motet.planner.templates.planner import make_templates, plan_with_sizes
from motet.resilience.launch_nodes import train_on_nodes
from motet.resilience.recover import leave_world
from motet.runtime.executor import Executor
from motet.runtime.launch import WorkerFailedError
from motet.runtime.training.trainer import Trainer, TrainingSummary


def test_survivors_go_on_and_lose_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    result = train_and(config, at(2, 3, die))
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert result["world_size"] == 2
    [failure] = failures(config)
    assert [(change["kind"], change["node"]) for change in failure["changes"]] == [("lost", 3)]
    assert "was ended by SIGKILL" in failure["changes"][0]["how"]
    assert failure["done"] == "went on with step 3: 1 whole pipeline; the plan has no use for node 2, waiting"


def test_who_had_not_applied_an_update_applies_it_and_counts_it(tmp_path: Path) -> None:
    """Rank 0 dies after the sum that ends step 3, before it writes the step's metrics. Rank 3 has applied the update,
    rank 2 had an error instead; it alone holds the encoders then, and how many updates their optimizer has had."""
    original = Executor.sum_over_ranks
    is_due = [False]
    has_applied = multiprocessing.get_context("fork").Event()

    def note(trainer: Trainer) -> None:
        is_due[0] = trainer.finished_steps == 2
        if trainer.finished_steps == 3 and trainer.engine.model.mesh.rank == 3:
            has_applied.set()

    def sum_and_fail(self: Executor, values: Any, what: str) -> None:
        original(self, values, what)
        if what == "of losses" and is_due[0] and self.mesh.world_size == 4:
            if self.mesh.rank == 0:
                has_applied.wait()
                die()
            if self.mesh.rank == 2:
                raise RuntimeError("as if the sum had been interrupted")

    config = config_of(tmp_path)
    plan = plan_of(config)
    with before_each_step(note), mock.patch.object(Executor, "sum_over_ranks", sum_and_fail):
        result = train_on_nodes(config, plan, None, num_nodes=4, node_size=1)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    [failure] = failures(config)
    assert failure["step"] == 4
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == [*enumerate(result["losses"], 1)]


@pytest.mark.parametrize("written", ["loss", *in_campaigns(["held_out_loss"])])
def test_what_the_lost_writer_did_not_write_is_written(tmp_path: Path, written: str) -> None:
    """Rank 0 dies when all have finished step 2, before it writes the step's loss, or its evaluation; the others have
    gone on to the next step, where nothing is left to be done for this one."""
    original = Trainer._write
    at_next_step = multiprocessing.get_context("fork").Barrier(4)

    def note(trainer: Trainer) -> None:
        if trainer.finished_steps == 2 and trainer.engine.model.mesh.world_size == 4:
            at_next_step.wait()

    def write_or_die(self: Trainer, step: int, values: Any) -> None:
        if step == 2 and written in values and self.is_first and self.engine.model.mesh.world_size == 4:
            at_next_step.wait()
            die()
        original(self, step, values)

    evaluated = {"train__eval_every": 2, "train__eval_samples": 4} if written == "held_out_loss" else {}
    config = config_of(tmp_path, train__steps=4, **evaluated)
    with mock.patch.object(Trainer, "_write", write_or_die):
        result = train_and(config, note)
    [failure] = failures(config)
    assert failure["step"] == 3
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == [*enumerate(result["losses"], 1)]
    assert [line["step"] for line in lines if "held_out_loss" in line] == ([2, 4] if evaluated else [])


def test_a_world_that_never_came_about_leaves_no_trace() -> None:
    """Else its ranks would call the groups of the next one by other names than ranks that were not in it."""

    def work(rank: int) -> str:
        leave_world()
        with pytest.raises(RuntimeError):
            dist.init_process_group(
                "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(milliseconds=100)
            )
        leave_world()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        return dist.group.WORLD.group_name

    assert run_distributed(work, 1) == ["0"]


def test_a_node_that_is_warned_leaves_after_the_iteration(tmp_path: Path) -> None:
    config, warn = config_of(tmp_path), at(2, 1, warn_node)

    def warn_and_wait(trainer: Trainer) -> None:
        warn(trainer)
        if trainer.finished_steps == 2:
            wait_for_a_change(trainer)

    result = train_and(config, warn_and_wait)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert result["world_size"] == 2
    kinds = [[(change["kind"], change["node"]) for change in line["changes"]] for line in failures(config)]
    assert kinds == [[("leaving", 1)], [("left", 1), ("left", 0)]]  # One pipeline.


@pytest.mark.campaign
def test_all_start_anew_from_the_last_checkpoint_if_no_pipeline_is_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, train__checkpoint_every=1)
    result = train_and(config, all_at(3, (0, 1, 3), die))
    assert "motet: too few nodes are left for a whole pipeline; restarting all nodes" in capfd.readouterr().err
    assert result["steps"] == STEPS
    assert result["world_size"] == 4
    assert 1 <= len(result["losses"]) <= STEPS
    assert result["losses"] == pytest.approx(undisturbed()[-len(result["losses"]) :], rel=1e-12)
    log = failures(config)
    assert {(change["kind"], change["node"]) for line in log for change in line["changes"]} == {
        ("lost", 0),
        ("lost", 1),
        ("lost", 3),
    }
    assert log[-2]["done"] == "too few nodes are left for a whole pipeline: all nodes are restarted (restart 1 of 3)"
    assert log[-1]["done"].startswith("all nodes were restarted from ")
    assert log[-1]["step"] == STEPS - len(result["losses"]) + 1


def test_too_few_nodes_save_and_stop_if_told_to(tmp_path: Path) -> None:
    failures_config = {"tolerate": 1, "detect_s": 10, "stop_below_guarantee": True}
    config = unlike_config(tmp_path, 2, failures=failures_config)
    problem = read_problem(config)
    templates = make_templates(problem)
    plan = plan_with_sizes(problem, templates, (1, 1))
    with (
        before_each_step(at(2, 0, die)),
        pytest.raises(WorkerFailedError, match=r"1 nodes are left, but 2 pipelines .* need 2.*step_00000002"),
    ):
        train_on_nodes(config, plan, templates, num_nodes=2, node_size=2)
    [failure] = failures(config)
    assert failure["done"].startswith("stopped before step 3: 1 nodes are left")


@pytest.mark.parametrize("second", [kill_node, *in_campaigns([warn_node])])
def test_who_is_left_and_warned_saves_and_stops(tmp_path: Path, second: Callable[[], None]) -> None:
    """Both nodes are told to end, or one is, and the other dies: nothing is lost."""
    config = unlike_config(tmp_path, 2, failures={"tolerate": 1, "detect_s": 2})
    problem = read_problem(config)
    templates = make_templates(problem)
    plan = plan_with_sizes(problem, templates, (1, 1))
    acts = [at(2, 0, warn_node), at(2, 2, second)]

    def both(trainer: Trainer) -> None:
        for act in acts:
            act(trainer)
        if trainer.finished_steps >= 2:
            wait_for_a_change(trainer)

    told = r"without the nodes that leave \(.*\) no pipeline is whole; saved as .*step_0000000[2-5]"
    with before_each_step(both), pytest.raises(WorkerFailedError, match=told):
        train_on_nodes(config, plan, templates, num_nodes=2, node_size=2)
    config = config.model_copy(update={"train": config.train.model_copy(update={"resume": "latest"})})
    losses = train_on_nodes(config, plan, templates, num_nodes=2, node_size=2)["losses"]
    assert 1 <= len(losses) <= 4
    assert losses == pytest.approx(undisturbed_unlike()[-len(losses) :], rel=1e-12)


def test_a_node_that_joins_is_taken_in_after_the_iteration(tmp_path: Path) -> None:
    config = unlike_config(tmp_path, 2)
    problem = read_problem(config)
    templates = make_templates(problem)
    result = train_and_join(config, plan_with_sizes(problem, templates, (1, 1)), templates)
    assert result["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    assert result["world_size"] == 6
    [line] = failures(config)
    assert [(change["kind"], change["node"]) for change in line["changes"]] == [("joined", 2)]


def test_a_checkpoint_that_is_to_be_begun_again_is_not_forgotten() -> None:
    """A further failure may come before that: the next membership has to hear of it as of one that was begun."""
    trainer = Trainer.__new__(Trainer)
    trainer._checkpoints = mock.Mock(is_unfinished=False)
    trainer.summary = TrainingSummary(save_again=True)
    assert trainer.is_saving
    trainer.summary.save_again = False
    assert not trainer.is_saving
