"""When nobody holds some layer any more, all go back to the last checkpoint, whatever happens meanwhile."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from chaos import Layout, config_of, plan_and_templates, undisturbed
from interrupted_training import STEPS, all_at, at, before_each_step, die, failures, kill_node, once, train_and
from interrupted_training import config_of as recover_config_of
from interrupted_training import undisturbed as alike_losses
from sampling import in_campaigns

from motet.api import read_problem
from motet.config import RunConfig
from motet.planner.templates.planner import plan_with_sizes
from motet.resilience.launch_nodes import train_on_nodes
from motet.resilience.recover import TrainingProcess
from motet.runtime.training.trainer import Trainer

UNLIKE: Layout = "unlike"


def has(trainer: Trainer, module: str) -> bool:
    return any(name == module for name, _, _ in trainer.engine.model.stages)


def unlike_config(folder: Path, **settings: Any) -> RunConfig:
    config = config_of(folder, 1, UNLIKE)
    return config.model_copy(update={"train": config.train.model_copy(update=settings)})


def train_without_language_model(
    folder: Path, checkpoint_every: int = 2, resume: str | None = None
) -> tuple[list[float], list[dict[str, Any]]]:
    """Pipelines of two and three nodes; in each a node with the same layers dies in step 4. Losses and failure log."""
    config = unlike_config(folder, checkpoint_every=checkpoint_every, resume=resume)
    plan, templates = plan_and_templates(UNLIKE, 1, (2, 3))
    die_together = all_at(3, (1, 4), die)

    def at_step(trainer: Trainer) -> None:
        if trainer.finished_steps == 3 and trainer.engine.plan == plan:
            trainer._checkpoints.finish()
            die_together(trainer)

    with before_each_step(at_step):
        result = train_on_nodes(config, plan, templates, num_nodes=5, node_size=1)
    return result["losses"], failures(config)


def test_all_go_back_where_a_layer_is_lost(tmp_path: Path) -> None:
    losses, log = train_without_language_model(tmp_path)
    done = log[-1]["done"]
    assert done.startswith("no node held language_model.")
    assert done.endswith(" any more: went back from step 3 to the checkpoint of step 2")
    assert losses == pytest.approx(undisturbed(1, UNLIKE)[0], rel=1e-12)


@pytest.mark.campaign
def test_all_go_back_to_where_the_run_was_resumed(tmp_path: Path) -> None:
    """It has saved nothing since."""
    earlier = unlike_config(tmp_path / "earlier", checkpoint_every=1, keep_checkpoints=STEPS, resume=None)
    plan, templates = plan_and_templates(UNLIKE, 1, (2, 3))
    train_on_nodes(earlier, plan, templates, num_nodes=5, node_size=1)
    checkpoints = Path(earlier.train.output) / "checkpoints"
    losses, log = train_without_language_model(tmp_path / "run", 0, str(checkpoints / "step_00000001"))
    assert log[-1]["done"].endswith("any more: went back from step 3 to the checkpoint of step 1")
    assert losses == pytest.approx(undisturbed(1, UNLIKE)[0][1:], rel=1e-12)


@pytest.mark.campaign
def test_what_was_held_before_going_back_is_not_mixed_with_the_checkpoint(tmp_path: Path) -> None:
    """Who has the encoder dies when all have loaded the checkpoint. The one of another step is still held by others."""
    begin, first = TrainingProcess._begin, once()

    def begin_and_die(self: TrainingProcess, trainer: Trainer, before: Any, *others: Any) -> None:
        begin(self, trainer, before, *others)
        if before is not None:
            dist.barrier()
            if has(trainer, "vision") and first():
                die()

    with mock.patch.object(TrainingProcess, "_begin", begin_and_die):
        losses, _ = train_without_language_model(tmp_path)
    assert losses == pytest.approx(undisturbed(1, UNLIKE)[0], rel=1e-12)


@pytest.mark.campaign
def test_who_no_template_takes_leaves(tmp_path: Path) -> None:
    """Of two pipelines of two nodes a node dies, and there is no template for three."""
    config = config_of(tmp_path, 1, UNLIKE)
    _, templates = plan_and_templates(UNLIKE, 1, (2, 3))
    assert templates is not None
    templates = replace(templates, by_nodes={2: templates.by_nodes[2]})
    plan = plan_with_sizes(read_problem(config), templates, (2, 2))
    with before_each_step(at(2, 0, die)):
        result = train_on_nodes(config, plan, templates, num_nodes=4, node_size=1)
    assert result["losses"] == pytest.approx(undisturbed(1, UNLIKE)[0], rel=1e-12)
    assert result["world_size"] == 2
    kinds = [[change["kind"] for change in line["changes"]] for line in failures(config)]
    assert kinds == [["lost"], ["left"]]


@pytest.fixture(scope="module")
def earlier_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2, 4 and 6."""
    config = recover_config_of(tmp_path_factory.mktemp("earlier"), train__checkpoint_every=2, train__keep_checkpoints=3)
    train_and(config, lambda trainer: None)
    return Path(config.train.output) / "checkpoints"


def train_and_lose_all_agents(config: RunConfig) -> dict[str, Any]:
    """Once, before step 4."""
    return train_and(config, all_at(3, range(4), kill_node))


@pytest.mark.parametrize("resumed_step", [2, *in_campaigns([0])])
def test_a_restart_begins_where_the_run_did(tmp_path: Path, earlier_run: Path, resumed_step: int) -> None:
    """It has saved nothing yet."""
    resumed = tmp_path / "start"
    shutil.copytree(earlier_run / "step_00000002", resumed)
    resume = {"train__resume": str(resumed)} if resumed_step else {}
    config = recover_config_of(tmp_path / "run", **resume)
    result = train_and_lose_all_agents(config)
    assert result["losses"] == pytest.approx(alike_losses()[resumed_step:], rel=1e-12)
    end, beginning = failures(config)
    assert end["done"] == "all nodes were lost: all nodes are restarted (restart 1 of 3)"
    assert sorted((change["kind"], change["node"], change["how"]) for change in end["changes"]) == [
        ("lost", node, "its agent was ended by SIGKILL") for node in range(4)
    ]
    checkpoint = "the checkpoint of step 2" if resumed_step else "the start, as there was no checkpoint"
    assert beginning["done"] == f"all nodes were restarted from {checkpoint}"
    assert (beginning["step"], beginning["changes"]) == (resumed_step + 1, [])


def test_a_run_of_which_only_the_end_was_lost_is_finished(tmp_path: Path) -> None:
    """All agents die when the last step is saved and before anyone has told it: there is nothing left to train."""
    train, die_together = Trainer.train, all_at(STEPS, range(4), kill_node)

    def train_and_die(self: Trainer) -> Any:
        summary = train(self)
        die_together(self)
        return summary

    config = recover_config_of(tmp_path / "run", train__checkpoint_every=STEPS)
    with mock.patch.object(Trainer, "train", train_and_die):
        result = train_and(config, lambda trainer: None)
    assert (result["steps"], result["losses"]) == (STEPS, [])
    assert result["checkpoint"].endswith(f"step_{STEPS:08d}")
    assert "NaN" not in json.dumps(result)
    assert failures(config)[-1]["done"] == f"all nodes were restarted from the checkpoint of step {STEPS}"
