"""Optimizer states that only f + 1 pipelines keep: nothing is lost with a node, at whatever moment it is lost."""

import multiprocessing
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from interrupted_training import (
    STEPS,
    all_at,
    at,
    before_each_step,
    die,
    failures,
)
from sampling import in_campaigns
from training import plan_of, run_config, stored_tensors, train
from unlike_pipelines import (
    MadeTemplates,
    encoder_sharing_templates,
    sharded_templates,
    tensor_parallel_templates,
    train_and_join,
    undisturbed_unlike,
    unlike_config,
    unlike_on_nodes_of_three,
)
from victims import check_replicas, num_keepers

from motet.api import read_problem
from motet.config import RunConfig
from motet.plan import Plan
from motet.planner.reconfiguration.reconfigure import reconfigure
from motet.planner.reconfiguration.state_owners import initial_owners
from motet.planner.templates.pipelines import Templates
from motet.planner.templates.planner import make_templates, plan_with_sizes
from motet.resilience.launch_nodes import train_on_nodes
from motet.resilience.recover import TrainingProcess
from motet.runtime.executor import Executor
from motet.runtime.launch import WorkerFailedError
from motet.runtime.training.optimizer import Optimizer
from motet.runtime.training.trainer import Trainer
from motet.runtime.training.worker import train_worker


def sharing(config: RunConfig, **parallel: Any) -> RunConfig:
    values = config.model_dump(exclude_unset=True)
    values["parallel"] |= {"zero1": True, **parallel}
    return RunConfig.model_validate(values)


def three_pipelines(config: RunConfig) -> tuple[Plan, Templates]:
    """Of one node of two processes each."""
    return pipelines_of(config, (1, 1, 1))


def pipelines_of(config: RunConfig, sizes: tuple[int, ...]) -> tuple[Plan, Templates]:
    problem = read_problem(config)
    templates = make_templates(problem)
    return plan_with_sizes(problem, templates, sizes), templates


@contextmanager
def checked(num_recoveries: Any) -> Iterator[None]:
    """After every recovery, in every process that is started meanwhile, so many keep each state, and all bits agree."""
    recovered = TrainingProcess._recovered

    def checking(self: TrainingProcess, *args: Any) -> Trainer:
        trainer = recovered(self, *args)
        number = num_keepers(self, trainer)
        assert number is not None
        check_replicas(trainer, number)
        if dist.get_rank() == 0:
            num_recoveries.value += 1
        return trainer

    with mock.patch.object(TrainingProcess, "_recovered", checking):
        yield


def train_three(config: RunConfig, act: Callable[[Trainer], None] = lambda _: None) -> dict[str, Any]:
    plan, templates = three_pipelines(config)
    return train_and_check(config, plan, templates, act)


def train_and_check(
    config: RunConfig, plan: Plan, templates: Templates, act: Callable[[Trainer], None]
) -> dict[str, Any]:
    number = multiprocessing.get_context("fork").Value("i", 0)
    size = templates.devices_per_node
    with before_each_step(act), checked(number):
        result = train_on_nodes(config, plan, templates, num_nodes=plan.num_ranks // size, node_size=size)
    path = Path(config.train.output) / "failures.jsonl"
    assert number.value == 1 + (len(failures(config)) if path.exists() else 0)
    return result


def test_a_lost_node_takes_no_state_along(tmp_path: Path) -> None:
    config = sharing(unlike_config(tmp_path, 3))
    result = train_three(config, at(2, 2, die))
    assert result["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    assert result["world_size"] == 4
    [failure] = failures(config)
    # Only states, and of these what the lost node kept: about two thirds of all, once.
    layer_bytes = three_pipelines(config)[1].layer_bytes
    assert layer_bytes is not None
    moments = sum(map(sum, layer_bytes.values())) * 2 / 3
    assert 0.5 < failure["moved_bytes"] / moments < 0.85
    # That is what the plan says, which knows layers' parameters by their sizes alone.
    plan, templates = three_pipelines(config)
    planned = reconfigure(plan, templates, lost=[1], owned=initial_owners(plan, templates))
    assert {copy.what for copy in planned.copies} == {"states"}
    assert sum(copy.num_bytes for copy in planned.copies) == pytest.approx(failure["moved_bytes"], rel=0.1)


@contextmanager
def dying_in_the_exchange(step: int, rank: int, after: int) -> Iterator[None]:
    """The rank dies in that step's exchange, when it has waited for so many messages."""
    exchange, wait_for = Optimizer.exchange, Executor.wait_for
    is_due = [False]
    number = [0]

    def exchanging(self: Optimizer) -> None:
        is_due[0] = next(iter(self.states().values()))["step"] == step and dist.get_rank() == rank
        is_due[0] = is_due[0] and dist.get_world_size() == 6
        if is_due[0] and after == 0:
            die()
        exchange(self)

    def waiting(self: Executor, *args: Any) -> None:
        wait_for(self, *args)
        number[0] += is_due[0]
        if is_due[0] and number[0] == after:
            die()

    with mock.patch.object(Optimizer, "exchange", exchanging), mock.patch.object(Executor, "wait_for", waiting):
        yield


@pytest.mark.parametrize("after", [1, *in_campaigns([0, 2])])
def test_lost_while_new_parameters_are_sent(tmp_path: Path, after: int) -> None:
    """Some have got them, some have not: what they have not comes from another keeper, and no update is done twice."""
    config = sharing(unlike_config(tmp_path, 3))
    with dying_in_the_exchange(3, 3, after):
        result = train_three(config)
    assert result["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    [failure] = failures(config)
    assert failure["done"].startswith("went on with step 4")


def test_some_had_updated_what_they_keep_and_others_had_not(tmp_path: Path) -> None:
    """Rank 5 dies after the sum that ends step 3, ranks 0 and 2 have an error in the place of its end."""
    original = Executor.sum_over_ranks
    is_due = [False]

    def note(trainer: Trainer) -> None:
        is_due[0] = trainer.finished_steps == 2

    def sum_and_fail(self: Executor, values: Any, what: str) -> None:
        original(self, values, what)
        if what == "of losses" and is_due[0] and self.mesh.world_size == 6:
            if self.mesh.rank == 5:
                die()
            if self.mesh.rank in (0, 2):
                raise RuntimeError("as if the sum had been interrupted")

    config = sharing(unlike_config(tmp_path, 3))
    with mock.patch.object(Executor, "sum_over_ranks", sum_and_fail):
        result = train_three(config, note)
    assert result["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    [failure] = failures(config)
    assert failure["done"].startswith("went on with step 4")


@pytest.mark.campaign
@pytest.mark.parametrize(
    "templates_of", [sharded_templates, *in_campaigns([tensor_parallel_templates, encoder_sharing_templates])]
)
def test_pipelines_that_are_cut_in_other_ways(tmp_path: Path, templates_of: MadeTemplates) -> None:
    """Two pipelines of one node and one of two, with tensor parallelism, shared parameters or shared items in some."""
    config = sharing(unlike_config(tmp_path, 4))
    config, templates, plan = unlike_on_nodes_of_three(config, templates_of, (1, 1, 2))
    result = train_and_check(config, plan, templates, at(2, 1, die))
    assert result["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    assert result["world_size"] == 9


@pytest.mark.campaign
def test_given_layouts_whose_modules_are_fully_sharded(tmp_path: Path) -> None:
    """Three pipelines, of which two are lost one after the other: losses and all that the last checkpoint holds are
    those of one pipeline with nothing shared."""

    def config_of(output: Path, layout: dict[str, Any], **overrides: Any) -> RunConfig:
        told = {"train__steps": STEPS, "train__dtype": "float64", "train__checkpoint_every": STEPS}
        more = {"train__global_batch_size": 12, "parallel__packing": True}
        return run_config(output, layout, **told, **more, **overrides)

    shared = {"cp": 2, "fully_sharded": True, "context": {"block_size": 4}}
    layout = {"vision": {"dp": 3}, "audio": {"dp": 3}, "language_model": {"dp": 3, **shared}}
    failing = {"train__failures": {"tolerate": 1, "detect_s": 10}, "parallel__zero1": True}
    config = config_of(tmp_path / "shared", layout, **failing)
    plan = plan_of(config)
    first, second = at(2, 0, die), at(4, 1, die)

    def lose_two(trainer: Trainer) -> None:
        first(trainer)
        second(trainer)

    number = multiprocessing.get_context("fork").Value("i", 0)
    with before_each_step(lose_two), checked(number):
        result = train_on_nodes(config, plan, None, num_nodes=3, node_size=3)
    assert number.value == 3
    assert result["losses"] == pytest.approx(train(config_of(tmp_path / "whole", {}))[0]["losses"], rel=1e-10)
    left, right = (stored_tensors(tmp_path / name / "checkpoints" / f"step_{STEPS:08}") for name in ("shared", "whole"))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-6, atol=1e-8)


def test_more_losses_at_once_than_are_tolerated_go_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    """The pipeline that is left has all parameters, and two thirds of their states."""
    config = sharing(unlike_config(tmp_path, 3, checkpoint_every=1))
    result = train_three(config, all_at(3, [0, 2], die))
    number = len(result["losses"])
    assert result["losses"] == pytest.approx(undisturbed_unlike()[-number:], rel=1e-12)
    assert result["world_size"] == 2
    [done] = [failure["done"] for failure in failures(config)]
    # The third checkpoint may have been on its way.
    told = "no node held the optimizer's state of .* any more: went back from step 3 to the checkpoint of step [23]"
    assert re.fullmatch(told, done), done


@pytest.mark.campaign
def test_who_stops_without_all_states_says_what_is_lost(tmp_path: Path) -> None:
    told = {"tolerate": 1, "detect_s": 10, "stop_below_guarantee": True}
    config = sharing(unlike_config(tmp_path, 3, checkpoint_every=1, failures=told))
    plan, templates = three_pipelines(config)
    with (
        before_each_step(all_at(3, [0, 2], die)),
        pytest.raises(WorkerFailedError, match=r"saved as .*step_0*([23]), as of step \1: what came later is lost"),
    ):
        train_on_nodes(config, plan, templates, num_nodes=3, node_size=2)


@pytest.mark.campaign
def test_checkpoints_are_those_of_any_other_run(tmp_path: Path) -> None:
    """Each state is in them once; what has been written with ZeRO-1 goes on without it, and the other way round."""
    config = sharing(unlike_config(tmp_path / "sharing", 3, checkpoint_every=3, keep_checkpoints=9))
    assert train_three(config)["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    plain = unlike_config(tmp_path / "plain", 3, checkpoint_every=3, keep_checkpoints=9)
    plan, _ = three_pipelines(plain)
    run_distributed(lambda rank: train_worker(plain, plan), plan.num_ranks)
    for step in ("step_00000003", "step_00000006"):
        left, right = (stored_tensors(tmp_path / name / "checkpoints" / step) for name in ("sharing", "plain"))
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            assert torch.equal(tensor, right[name]), name
    resumed = {
        name: unlike_config(tmp_path / f"from_{name}", 3, resume=str(tmp_path / name / "checkpoints" / "step_00000003"))
        for name in ("sharing", "plain")
    }
    two, _ = pipelines_of(resumed["sharing"], (1, 2))
    losses = run_distributed(lambda rank: train_worker(resumed["sharing"], two), two.num_ranks)[0]["losses"]
    assert losses == pytest.approx(undisturbed_unlike()[3:], rel=1e-12)
    assert train_three(sharing(resumed["plain"]))["losses"] == pytest.approx(undisturbed_unlike()[3:], rel=1e-12)


def test_who_joins_keeps_a_share(tmp_path: Path) -> None:
    """Two pipelines keep everything, a third one joins: each keeps less, and two keep each state."""
    config = sharing(unlike_config(tmp_path, 2))
    plan, templates = pipelines_of(config, (1, 1))
    number = multiprocessing.get_context("fork").Value("i", 0)
    with checked(number):
        result = train_and_join(config, plan, templates)
    assert result["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    assert result["world_size"] == 6
    assert number.value == 2
