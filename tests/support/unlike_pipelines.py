"""Runs of pipelines that need not look alike."""

import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from distributed import run_distributed
from interrupted_training import STEPS, before_each_step, wait_for_a_change
from training import run_config

from motet.api import read_problem
from motet.config import RunConfig
from motet.plan import ContextOptions, Plan, Replica, Stage
from motet.planner.templates.pipelines import Template, Templates
from motet.planner.templates.planner import make_templates, plan_with_sizes
from motet.resilience.launch_nodes import run_agent, train_on_nodes
from motet.resilience.store.embedded import StoreProcess
from motet.resilience.succession import Succession
from motet.runtime.training.trainer import Trainer
from motet.runtime.training.worker import train_worker


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
        plan = plan_with_sizes(problem, make_templates(problem), (1, 1))
        return run_distributed(lambda rank: train_worker(config, plan), plan.num_ranks)[0]["losses"]


MadeTemplates = Callable[[int, int], Templates]
"""From the numbers of layers of vision and language model."""


def sharded_templates(num_vision_layers: int, num_layers: int) -> Templates:
    """The language model's stages share tokens and parameters between two processes."""
    one = {"vision": chain((0, num_vision_layers, (0,))), "language_model": chain((0, num_layers, (1, 2)), cp=2)}
    two = {
        "vision": chain((0, 1, (0,)), (1, num_vision_layers, (5,))),
        "language_model": chain((0, 2, (1, 2)), (2, num_layers, (3, 4)), cp=2),
    }
    return on_nodes_of_three(one, two, fully_sharded=("language_model",))


def tensor_parallel_templates(num_vision_layers: int, num_layers: int) -> Templates:
    """With one node the language model has tensor parallelism, with two the encoder and the middle of the language
    model."""
    one = {"vision": chain((0, num_vision_layers, (0,))), "language_model": chain((0, num_layers, (1, 2)))}
    two = {
        "vision": chain((0, num_vision_layers, (0, 1))),
        "language_model": chain((0, 1, (2,)), (1, 3, (3, 4)), (3, num_layers, (5,))),
    }
    return on_nodes_of_three(one, two)


def context_parallel_templates(num_vision_layers: int, num_layers: int) -> Templates:
    """With one node the language model's tokens are shared between two processes, with two nodes its stages have tensor
    parallelism, nothing, and context parallelism."""
    vision = chain((0, num_vision_layers, (0,)))
    one = {"vision": vision, "language_model": chain((0, num_layers, (1, 2)), cp=2)}
    first, last = chain((0, 2, (1, 2)), (2, 3, (3,))), chain((3, num_layers, (4, 5)), cp=2)
    two = {"vision": vision, "language_model": Replica(stages=(*first.stages, *last.stages))}
    return on_nodes_of_three(one, two)


def encoder_sharing_templates(
    num_vision_layers: int, num_layers: int, fully_sharded: tuple[str, ...] = ()
) -> Templates:
    """With one node the encoder's tokens are shared between two processes, with two nodes those of its second stage."""
    one = {"vision": chain((0, num_vision_layers, (0, 1)), cp=2), "language_model": chain((0, num_layers, (2,)))}
    first, second = chain((0, 2, (0,))), chain((2, num_vision_layers, (1, 2)), cp=2)
    two = {
        "vision": Replica(stages=(*first.stages, *second.stages)),
        "language_model": chain((0, 2, (3,)), (2, num_layers, (4, 5))),
    }
    return on_nodes_of_three(one, two, fully_sharded=fully_sharded)


def encoder_sharded_templates(num_vision_layers: int, num_layers: int) -> Templates:
    """The same, and who shares the encoder's tokens shares its parameters."""
    return encoder_sharing_templates(num_vision_layers, num_layers, ("vision",))


def chain(*stages: tuple[int, int, tuple[int, ...]], cp: int = 1) -> Replica:
    """Of each stage the first layer, that after the last, and the ranks."""
    return Replica(
        stages=tuple(
            Stage(layers=(first, last), ranks=ranks, tp_size=len(ranks) // cp, cp_size=cp)
            for first, last, ranks in stages
        )
    )


def on_nodes_of_three(
    one: Mapping[str, Replica], two: Mapping[str, Replica], fully_sharded: tuple[str, ...] = ()
) -> Templates:
    by_nodes = {n: Template(num_nodes=n, replicas=replicas) for n, replicas in ((1, one), (2, two))}
    return Templates(failures=1, devices_per_node=3, by_nodes=by_nodes, fully_sharded=fully_sharded)


def unlike_on_nodes_of_three(
    config: RunConfig, templates_of: MadeTemplates, sizes: tuple[int, ...]
) -> tuple[RunConfig, Templates, Plan]:
    """For `config` of `unlike_config`; the plan has pipelines of so many nodes each."""
    cluster = config.cluster.model_copy(update={"num_devices": 3 * sum(sizes)})
    config = config.model_copy(update={"cluster": cluster})
    problem = read_problem(config)
    context = ContextOptions(block_size=4)
    modules = {name: replace(module, context=context) for name, module in problem.modules.items()}
    problem = replace(problem, modules=modules)
    templates = templates_of(*(module.workload.num_layers for module in problem.modules.values()))
    return config, templates, plan_with_sizes(problem, templates, sizes)


def train_and_join(config: RunConfig, plan: Plan, templates: Templates) -> dict[str, Any]:
    """Two nodes of two processes begin, and wait before their third step for one more that joins."""
    addresses = multiprocessing.get_context("fork").SimpleQueue()
    original = StoreProcess.start

    def start(self: StoreProcess, *args: Any) -> None:
        original(self, *args)
        addresses.put((self.address, self._secret))

    def joiner() -> None:
        run_agent(config, *addresses.get(), None, 2, Succession(2, templates))

    helper = multiprocessing.get_context("fork").Process(target=joiner)
    helper.start()

    def wait_for_it(trainer: Trainer) -> None:
        if trainer.engine.model.mesh.world_size == 4 and trainer.finished_steps == 2:
            wait_for_a_change(trainer)

    with mock.patch.object(StoreProcess, "start", start), before_each_step(wait_for_it):
        result = train_on_nodes(config, plan, templates, num_nodes=2, node_size=2)
    helper.join()
    return result
