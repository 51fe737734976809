"""Measures plans of more ranks than there are cores: real executor and communication, computation that sleeps."""

from collections.abc import Mapping
from functools import partial

import torch

from benchmarks.emulation import emulated_stage_maker
from benchmarks.measuring import measure_in_turn
from motet.costs.iteration import IterationCosts
from motet.models.stages.stage import Batch
from motet.planner.evaluate import Evaluation
from motet.runtime.engine import Engine, Expect
from motet.runtime.launch import launch


def predicted_s(evaluation: Evaluation) -> float:
    """Predicted seconds of an iteration without the optimizer's step."""
    return evaluation.result.iteration_time_s - evaluation.costs.fixed_s


def expectation(costs: IterationCosts) -> Expect:
    """By which an engine orders its actions as the evaluation did."""
    return partial(
        IterationCosts, workloads=costs.workloads, table=costs.table, cluster=costs.cluster, memory=costs.memory
    )


def measure_emulated(
    evaluations: Mapping[str, Evaluation], batch: Batch, *, num_blocks: int, steps_per_block: int
) -> dict[str, list[list[float]]]:
    """Seconds of `Engine.run` under each plan, all of the same number of ranks, in turns."""
    num_ranks = {evaluation.plan.num_ranks for evaluation in evaluations.values()}
    return launch(_measure, evaluations, batch, num_blocks, steps_per_block, num_processes=num_ranks.pop())


def _measure(
    evaluations: Mapping[str, Evaluation], batch: Batch, num_blocks: int, steps_per_block: int
) -> dict[str, list[list[float]]]:
    engines = {
        name: Engine(
            evaluation.plan,
            emulated_stage_maker(evaluation.costs),
            device=torch.device("cpu"),
            expect=expectation(evaluation.costs),
        )
        for name, evaluation in evaluations.items()
    }
    # Gradients stay: they are zeros, and training has them when a reduction begins.
    return measure_in_turn(
        {name: partial(engine.run, batch) for name, engine in engines.items()},
        num_blocks=num_blocks,
        steps_per_block=steps_per_block,
    )
