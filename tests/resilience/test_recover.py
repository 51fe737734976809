"""Processes are killed; those that are left go on, and come to what an undisturbed run comes to."""

import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from distributed import run_distributed
from training import plan_of, run_config, train
from waiting import wait_until

from motet.cli.typical_batch import read_problem
from motet.config import RunConfig
from motet.plan import ContextOptions, Plan, Replica, Stage
from motet.planner.oobleck import make_templates
from motet.planner.oobleck import plan_of as plan_of_sizes
from motet.resilience.failure_log import FAILURES
from motet.resilience.launch_nodes import run_agent, train_on_nodes
from motet.resilience.membership import Call
from motet.resilience.pipelines import Template, Templates
from motet.resilience.reconfigure import reconfigure
from motet.resilience.recover import TrainingProcess, leave_world
from motet.resilience.succession import Succession
from motet.runtime.executor import Executor
from motet.runtime.launch import WorkerFailedError
from motet.runtime.train_worker import train_worker
from motet.runtime.trainer import Trainer

TWO_PIPELINES = {name: {"dp": 2} for name in ("vision", "audio", "language_model")}
STEPS = 6


def config_of(output: Path, **overrides: Any) -> RunConfig:
    overrides = {
        "train__steps": STEPS,
        "train__dtype": "float64",
        "train__failures": {"tolerate": 1, "detect_s": 10},
        **overrides,
    }
    return run_config(output, TWO_PIPELINES, **overrides)


@contextmanager
def before_each_step(at_step: Callable[[Trainer], None]) -> Iterator[None]:
    """`at_step` is called in every process that is started meanwhile."""
    original = Trainer._step

    def step(self: Trainer, batch: Any) -> Any:
        at_step(self)
        return original(self, batch)

    with mock.patch.object(Trainer, "_step", step):
        yield


def train_and(config: RunConfig, at_step: Callable[[Trainer], None]) -> dict[str, Any]:
    """Trains two pipelines of two nodes of one process each."""
    plan = plan_of(config)
    with before_each_step(at_step):
        return train_on_nodes(config, plan, None, num_nodes=plan.num_ranks, node_size=1)


@cache
def undisturbed() -> list[float]:
    """The losses."""
    with tempfile.TemporaryDirectory() as folder:
        return train(config_of(Path(folder)))[0]["losses"]


def failures(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.train.output) / FAILURES).read_text().splitlines()]


def once() -> Callable[[], bool]:
    """True for the first process that asks, in all processes."""
    lock = multiprocessing.get_context("fork").Lock()
    return lambda: lock.acquire(block=False)


def at(step: int, rank: int, act: Callable[[], None]) -> Callable[[Trainer], None]:
    """`act` once, in the process of that rank, before that step (the first is 0)."""
    first = once()

    def when_due(trainer: Trainer) -> None:
        if trainer.finished_steps == step and trainer.engine.model.mesh.rank == rank and first():
            act()

    return when_due


def all_at(step: int, ranks: Sequence[int], act: Callable[[], None]) -> Callable[[Trainer], None]:
    """As `at`, in several processes, and in none before all have come there: what becomes of one may keep the others
    from coming."""
    together = multiprocessing.get_context("fork").Barrier(len(ranks))

    def meet_and_act() -> None:
        together.wait()
        act()

    acts = [at(step, rank, meet_and_act) for rank in ranks]

    def when_due(trainer: Trainer) -> None:
        for each in acts:
            each(trainer)

    return when_due


def wait_for_a_change(trainer: Trainer) -> None:
    """However long it takes the agents to tell of it: a step before which this is called is not the last."""
    wait_until(trainer.engine.wants_pause)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_survivors_go_on_and_lose_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    result = train_and(config, at(2, 3, die))
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert result["world_size"] == 2
    [failure] = failures(config)
    assert [(change["kind"], change["node"]) for change in failure["changes"]] == [("lost", 3)]
    assert "was ended by SIGKILL" in failure["changes"][0]["how"]
    assert failure["done"] == "went on with step 3: 1 whole pipelines are left"


@pytest.mark.slow
def test_who_had_not_applied_an_update_applies_it_and_counts_it(tmp_path: Path) -> None:
    """Rank 1 dies after the sum that ends step 3. Rank 3 has applied the update, rank 2 had an error instead; it alone
    holds the encoders then, and how many updates their optimizer has had."""
    original = Executor.sum_over_ranks
    is_due = [False]
    has_applied = multiprocessing.get_context("fork").Event()

    def note(trainer: Trainer) -> None:
        is_due[0] = trainer.finished_steps == 2
        if trainer.finished_steps == 3 and trainer.engine.model.mesh.rank == 3:
            has_applied.set()

    def sum_and_fail(self: Executor, values: Any, what: str) -> None:
        original(self, values, what)
        if is_due[0] and self.mesh.world_size == 4:
            if self.mesh.rank == 1:
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_all_start_anew_from_the_last_checkpoint_if_no_pipeline_is_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, train__checkpoint_every=1)
    result = train_and(config, all_at(3, (0, 3), die))
    assert "motet: no pipeline is left that is whole; starting anew" in capfd.readouterr().err
    assert result["steps"] == STEPS
    assert result["world_size"] == 4
    assert 1 <= len(result["losses"]) <= STEPS
    assert result["losses"] == pytest.approx(undisturbed()[-len(result["losses"]) :], rel=1e-12)
    log = failures(config)
    assert {(change["kind"], change["node"]) for line in log for change in line["changes"]} == {
        ("lost", 0),
        ("lost", 3),
    }
    assert log[-2]["done"] == "no pipeline is left that is whole: all nodes are started anew (restart 1 of 3)"
    assert log[-1]["done"].startswith("all nodes were started anew, from ")
    assert log[-1]["step"] == STEPS - len(result["losses"]) + 1


def unlike_config(output: Path, num_nodes: int, **overrides: Any) -> RunConfig:
    """Vision and language model on nodes of two processes."""
    values = run_config(output).model_dump(exclude_unset=True)
    del values["model"]["encoders"]["audio"]
    values["data"] |= {"no_sound": 1.0, "no_image": 0.0}
    values["cluster"] = {"num_devices": 2 * num_nodes, "num_nodes": num_nodes}
    values["parallel"] = {"planner": "oobleck", "num_microbatches": 2}
    values["train"] |= {
        "steps": STEPS,
        "global_batch_size": 8,
        "dtype": "float64",
        "failures": {"tolerate": 1, "detect_s": 10},
        **overrides,
    }
    return RunConfig.model_validate(values)


@cache
def undisturbed_unlike() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        config = unlike_config(Path(folder), 2)
        problem = read_problem(config)
        plan = plan_of_sizes(problem, make_templates(problem), (1, 1))
        return run_distributed(lambda rank: train_worker(config, plan), plan.num_ranks)[0]["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_pipelines_become_others_and_copy_what_they_lack(tmp_path: Path, rank: int) -> None:
    """Of a pipeline of one node and one of two; the microbatches stay what they were."""
    config = unlike_config(tmp_path, 3)
    problem = read_problem(config)
    templates = make_templates(problem)
    plan = plan_of_sizes(problem, templates, (1, 2))
    with before_each_step(at(2, rank, die)):
        result = train_on_nodes(config, plan, templates, num_nodes=3, node_size=2)
    assert result["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    assert result["world_size"] == 4
    [failure] = failures(config)
    # What moves is the fewest bytes that the plan can do with, by the sizes of the layers.
    planned = reconfigure(plan, templates, lost=[rank // 2]).copies
    assert failure["moved_bytes"] == sum(copy.num_bytes for copy in planned) > 0


def sharded_templates(num_vision_layers: int, num_layers: int) -> Templates:
    """On nodes of three processes: the language model's stages share tokens and parameters between two of them."""

    def chain(*stages: tuple[int, int, tuple[int, ...]]) -> Replica:
        return Replica(stages=tuple(Stage(layers=(a, b), ranks=ranks, cp_size=len(ranks)) for a, b, ranks in stages))

    one = {"vision": chain((0, num_vision_layers, (0,))), "language_model": chain((0, num_layers, (1, 2)))}
    two = {
        "vision": chain((0, 1, (0,)), (1, num_vision_layers, (5,))),
        "language_model": chain((0, 2, (1, 2)), (2, num_layers, (3, 4))),
    }
    by_nodes = {n: Template(num_nodes=n, replicas=replicas) for n, replicas in ((1, one), (2, two))}
    return Templates(failures=1, devices_per_node=3, by_nodes=by_nodes, fully_sharded=("language_model",))


def tensor_parallel_templates(num_vision_layers: int, num_layers: int) -> Templates:
    """On nodes of three processes: with one node the language model has tensor parallelism, with two the encoder and
    the middle of the language model."""

    def chain(*stages: tuple[int, int, tuple[int, ...]]) -> Replica:
        return Replica(stages=tuple(Stage(layers=(a, b), ranks=ranks, tp_size=len(ranks)) for a, b, ranks in stages))

    one = {"vision": chain((0, num_vision_layers, (0,))), "language_model": chain((0, num_layers, (1, 2)))}
    two = {
        "vision": chain((0, num_vision_layers, (0, 1))),
        "language_model": chain((0, 1, (2,)), (1, 3, (3, 4)), (3, num_layers, (5,))),
    }
    by_nodes = {n: Template(num_nodes=n, replicas=replicas) for n, replicas in ((1, one), (2, two))}
    return Templates(failures=1, devices_per_node=3, by_nodes=by_nodes)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 5])
def test_shards_are_copied_from_stages_that_are_cut_in_another_way(tmp_path: Path, rank: int) -> None:
    """Of the whole a half, of two halves the whole, and halves from halves; within a node and between nodes."""
    config = unlike_config(tmp_path, 3)
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"num_devices": 9})})
    problem = read_problem(config)
    templates = tensor_parallel_templates(*(module.workload.num_layers for module in problem.modules.values()))
    plan = plan_of_sizes(problem, templates, (1, 2))
    with before_each_step(at(2, rank, die)):
        result = train_on_nodes(config, plan, templates, num_nodes=3, node_size=3)
    assert result["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    assert result["world_size"] == 6
    [failure] = failures(config)
    assert failure["moved_bytes"] > 0


def context_parallel_templates(num_vision_layers: int, num_layers: int) -> Templates:
    """On nodes of three processes: with one node the language model's tokens are shared between two of them, with two
    nodes its stages have tensor parallelism, nothing, and context parallelism."""

    def stage(layers: tuple[int, int], ranks: tuple[int, ...], cp: int = 1) -> Stage:
        return Stage(layers=layers, ranks=ranks, tp_size=len(ranks) // cp, cp_size=cp)

    one = {
        "vision": Replica(stages=(stage((0, num_vision_layers), (0,)),)),
        "language_model": Replica(stages=(stage((0, num_layers), (1, 2), cp=2),)),
    }
    two = {
        "vision": Replica(stages=(stage((0, num_vision_layers), (0,)),)),
        "language_model": Replica(
            stages=(stage((0, 2), (1, 2)), stage((2, 3), (3,)), stage((3, num_layers), (4, 5), cp=2))
        ),
    }
    by_nodes = {n: Template(num_nodes=n, replicas=replicas) for n, replicas in ((1, one), (2, two))}
    return Templates(failures=1, devices_per_node=3, by_nodes=by_nodes)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "rank"), [((1, 2), 4), ((2, 2), 1), ((1, 2), 1)])
def test_stages_that_share_tokens_become_others(tmp_path: Path, sizes: tuple[int, ...], rank: int) -> None:
    """With context parallelism from without, and the other way."""
    num_nodes = sum(sizes)
    config = unlike_config(tmp_path, num_nodes)
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"num_devices": 3 * num_nodes})})
    problem = read_problem(config)
    llm = replace(problem.modules["language_model"], context=ContextOptions(block_size=4))
    problem = replace(problem, modules={**problem.modules, "language_model": llm})
    templates = context_parallel_templates(*(module.workload.num_layers for module in problem.modules.values()))
    plan = plan_of_sizes(problem, templates, sizes)
    planned = reconfigure(plan, templates, lost=[rank // 3]).plan
    assert planned is not None
    assert 2 in {s.cp_size for replica in planned.modules["language_model"].replicas for s in replica.stages}
    with before_each_step(at(2, rank, die)):
        result = train_on_nodes(config, plan, templates, num_nodes=num_nodes, node_size=3)
    assert result["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    [failure] = failures(config)
    assert failure["moved_bytes"] > 0


@pytest.mark.slow
def test_shared_parameters_are_copied_from_those_that_keep_them(tmp_path: Path) -> None:
    config = unlike_config(tmp_path, 3)
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"num_devices": 9})})
    problem = read_problem(config)
    llm = replace(problem.modules["language_model"], context=ContextOptions(block_size=4))
    problem = replace(problem, modules={**problem.modules, "language_model": llm})
    templates = sharded_templates(*(module.workload.num_layers for module in problem.modules.values()))
    plan = plan_of_sizes(problem, templates, (1, 2))
    assert plan.modules["language_model"].fully_sharded
    with before_each_step(at(2, 3, die)):
        result = train_on_nodes(config, plan, templates, num_nodes=3, node_size=3)
    assert result["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    assert result["world_size"] == 6
    [failure] = failures(config)
    assert failure["moved_bytes"] > 0


@pytest.mark.slow
def test_too_few_nodes_save_and_stop_if_told_to(tmp_path: Path) -> None:
    failures_config = {"tolerate": 1, "detect_s": 10, "stop_below_guarantee": True}
    config = unlike_config(tmp_path, 2, failures=failures_config)
    problem = read_problem(config)
    templates = make_templates(problem)
    plan = plan_of_sizes(problem, templates, (1, 1))
    with (
        before_each_step(at(2, 0, die)),
        pytest.raises(WorkerFailedError, match=r"1 nodes are left, but 2 pipelines .* need 2.*step_00000002"),
    ):
        train_on_nodes(config, plan, templates, num_nodes=2, node_size=2)
    [failure] = failures(config)
    assert failure["done"].startswith("stopped before step 3: 1 nodes are left")


def warn_node() -> None:
    os.kill(os.getppid(), signal.SIGTERM)


def kill_node() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("second", [warn_node, kill_node])
def test_who_is_left_and_warned_saves_and_stops(tmp_path: Path, second: Callable[[], None]) -> None:
    """Both nodes are told to end, or one is, and the other dies: nothing is lost."""
    config = unlike_config(tmp_path, 2, failures={"tolerate": 1, "detect_s": 2})
    problem = read_problem(config)
    templates = make_templates(problem)
    plan = plan_of_sizes(problem, templates, (1, 1))
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


def train_and_join(config: RunConfig, plan: Plan, templates: Templates) -> dict[str, Any]:
    """Two nodes of two processes begin, and wait before their third step for one more that joins."""
    addresses = multiprocessing.get_context("fork").SimpleQueue()
    original = TrainingProcess._join_world

    def join(self: TrainingProcess, call: Call) -> None:
        addresses.put(self._store_address)
        original(self, call)

    def joiner() -> None:
        run_agent(config, addresses.get(), None, 2, Succession(2, templates))

    helper = multiprocessing.get_context("fork").Process(target=joiner)
    helper.start()

    def wait_for_it(trainer: Trainer) -> None:
        if trainer.engine.model.mesh.world_size == 4 and trainer.finished_steps == 2:
            wait_for_a_change(trainer)

    with mock.patch.object(TrainingProcess, "_join_world", join), before_each_step(wait_for_it):
        result = train_on_nodes(config, plan, templates, num_nodes=2, node_size=2)
    helper.join()
    return result


@pytest.mark.slow
def test_a_node_that_joins_is_taken_in_after_the_iteration(tmp_path: Path) -> None:
    config = unlike_config(tmp_path, 2)
    problem = read_problem(config)
    templates = make_templates(problem)
    result = train_and_join(config, plan_of_sizes(problem, templates, (1, 1)), templates)
    assert result["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    assert result["world_size"] == 6
    [line] = failures(config)
    assert [(change["kind"], change["node"]) for change in line["changes"]] == [("joined", 2)]
